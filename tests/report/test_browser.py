"""The report page in a real browser: what moves, sorts, copies and prints, with no complaint in the console."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensigma as ts
from tensigma.compression import PageData, Report
from tensigma.planning import Plan
from tensigma.report import Line, Panel, Run, Section, Table, write_results

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed; it comes with the extra dev"
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium was found (chromium, chromium-browser or google-chrome); install one"
)
COMMAND = ["tensigma", "compress", "zoo:m", "--data", "npz:my images.npz", "--budget", "params=0.5", "--out", "small"]

SECTION = Section(
    name="one",
    title="An experiment",
    origin="A `net` <stands> in.",
    substitute=True,
    tables=[Table(title="A net", columns=["α", "rate", "Σ"], rows=[["0.5", "2.02", "81.7"], ["0.7", "3.43", "50.1"]])],
    panels=[
        Panel(title="A net", x_label="rate", y_label="top-1", lines=[Line(name="Σ", points=[(2.02, 81.7), (3.43, 50)])])
    ],
    figure_title="An experiment (substitute)",
    printed=Table(columns=["α", "Σ"], rows=[["0.5", "67.9"]]),
    remark="As expected.",
)
RUNS = [
    Run(
        series=series, setting=f"vbmf={alpha}", rate=1 + alpha, params=123_456, macs=12_345_678, top1=0.9,
        agreement=0.95, seconds=1.0,
    )
    for series in ("Frobenius", "Σ (paper)", "Tensigma default")
    for alpha in (0.5, 0.7)
]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        options = ["--headless", "--no-sandbox", "--disable-gpu"]
        started = driver.chromium.launch(executable_path=CHROMIUM, args=options)
        yield started
        started.close()


@pytest.fixture(scope="module")
def report() -> Report:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(),
            nn.Linear(64, 10),
        )  # fmt: skip
        images = torch.randn(48, 3, 8, 8)
    _, made = ts.compress(model, [images], budget=ts.Params(0.5))
    return made


@pytest.fixture(scope="module")
def files(report: Report, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages with a command, without one, without a front, and with other ways of compressing beside this one."""
    folder = tmp_path_factory.mktemp("pages")
    notes = {"model": "zoo:m", "command": COMMAND}
    variants = {
        "page": replace(report, notes=notes),
        "python": report,
        "bare": replace(report, page_data=PageData()),
    }
    for name, each in variants.items():
        ts.write_report(each, folder / f"{name}.html")
    ts.write_report(report, folder / "compared.html", comparison=RUNS)
    write_results([SECTION], folder / "results.html", title="Results", lead="One **experiment**.")
    return {name: folder / f"{name}.html" for name in (*variants, "compared", "results")}


@pytest.fixture
def visit(browser: Any, files: dict[str, Path]) -> Iterator[Callable[..., Any]]:
    """Open a page; whatever the console says and whatever it asks of a network fails the test."""
    contexts, complaints = [], []

    def visit(name: str = "page", *, width: int = 1200, scheme: str = "light", **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(5000)
        page.on("console", lambda message: complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        own = files[name].as_uri()
        page.on(
            "request",
            lambda asked: (
                None
                if asked.url in (own, "data:,") or asked.url.startswith("data:image/svg")
                else complaints.append(asked.url)
            ),
        )
        page.goto(own)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert complaints == []


def number(text: str) -> float:
    """The number that a text begins with: 1500 for "1.5 k"."""
    match = re.match(r"([\d.,]+) ?([kMG]?)", text)
    assert match, text
    return float(match[1].replace(",", "")) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[match[2]]


def texts(page: Any, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


def set_slider(page: Any, place: int) -> None:
    page.locator("#budget").evaluate("(s, v) => { s.value = v; s.dispatchEvent(new Event('input')); }", place)


@pytest.mark.slow
def test_shows_every_section(visit, report: Report):
    page = visit()
    headings = [
        "Before and after",
        "Other budgets",
        "Where the parameters went",
        "Spectra",
        "Layers",
        "How it was made",
    ]
    assert texts(page, "h2") == headings
    assert page.locator(".card").count() == 3
    assert page.locator(".sortable tbody tr").count() == len(report.layers)
    assert page.locator(".spectra li").count() == len(report.spectra)
    assert page.locator(".columns:not(.errors) li").count() == len(report.layers)
    for link in page.locator("nav a").all():
        assert page.locator(link.get_attribute("href")).count() == 1


@pytest.mark.slow
def test_tables_sort_by_mouse_and_by_keyboard(visit):
    page = visit()
    heads = page.locator(".sortable thead th")
    after = heads.nth(7)

    def values() -> list[int]:
        return [int(text) for text in page.locator(".sortable tbody tr td:nth-child(8)").evaluate_all(
            "cells => cells.map((cell) => cell.dataset.value)")]  # fmt: skip

    after.locator("button").click()
    assert after.get_attribute("aria-sort") == "ascending"
    assert values() == sorted(values())
    after.locator("button").focus()
    page.keyboard.press("Enter")
    assert after.get_attribute("aria-sort") == "descending"
    assert values() == sorted(values(), reverse=True)
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Space")
    assert heads.nth(6).get_attribute("aria-sort") == "ascending"
    assert after.get_attribute("aria-sort") is None
    # Dense layers have no error and stay below, whichever way the others are sorted.
    for _ in range(2):
        heads.nth(4).locator("button").click()
        assert texts(page, ".sortable tbody tr td:nth-child(5)")[-1] == ""


@pytest.mark.slow
def test_the_slider_moves_everything(visit, report: Report):
    page = visit()
    assert report.front is not None
    columns = report.front["measures"]["params"]
    slider = page.locator("#budget")
    assert int(slider.input_value()) == columns["chosen"]
    assert int(slider.get_attribute("max")) == len(columns["share"]) - 1
    assert texts(page, "#rel-error") == ["this model"]
    seen = set()
    for place in (0, len(columns["share"]) // 3, len(columns["share"]) - 1):
        set_slider(page, place)
        assert number(page.locator("#out-params").inner_text()) == pytest.approx(columns["params"][place], rel=0.01)
        assert number(page.locator("#out-macs").inner_text()) == pytest.approx(columns["macs"][place], rel=0.01)
        assert float(page.locator("#out-error").inner_text()) == pytest.approx(columns["error"][place], abs=1e-4)
        rows = texts(page, "#choices tbody tr")
        seen.add("\n".join(rows))
        for layer, chosen, row in zip(report.front["layers"], columns["choices"][place], rows, strict=True):
            method, ranks, params, *_ = layer["options"][chosen]
            assert row.startswith(layer["name"])
            assert (f"{method} {' × '.join(map(str, ranks))}" if ranks else "dense") in row
            assert f"{params:,}" in row
        assert f"--budget params={columns['share'][place]:g}" in page.locator("#command").inner_text()
    assert len(seen) == 3
    page.locator("#chosen").click()
    assert int(slider.input_value()) == columns["chosen"]
    assert page.locator("#choices tr.moved").count() == 0
    assert page.locator("#chosen").is_disabled()


@pytest.mark.slow
def test_the_slider_obeys_the_keyboard(visit):
    page = visit()
    slider = page.locator("#budget")
    slider.focus()
    before, place = page.locator("#out-params").inner_text(), int(slider.input_value())
    page.keyboard.press("ArrowLeft")
    assert int(slider.input_value()) == place - 1
    assert page.locator("#out-params").inner_text() != before
    assert "of the parameters" in slider.get_attribute("aria-valuetext")
    page.keyboard.press("End")
    assert page.locator("#out-error").inner_text() == "0.0000"


@pytest.mark.slow
def test_budgets_in_multiply_adds(visit, report: Report):
    page = visit()
    assert report.front is not None
    columns = report.front["measures"]["macs"]
    page.get_by_label("multiply-adds", exact=True).check()
    assert int(page.locator("#budget").input_value()) == columns["chosen"]
    set_slider(page, 1)
    assert number(page.locator("#out-macs").inner_text()) == pytest.approx(columns["macs"][1], rel=0.01)
    assert f"--budget macs={columns['share'][1]:g}" in page.locator("#command").inner_text()


@pytest.mark.slow
def test_a_click_on_the_curve_moves_there(visit):
    page = visit()
    box = page.locator("#curve").bounding_box()
    page.mouse.click(box["x"] + 0.98 * box["width"], box["y"] + 100)
    assert page.locator("#out-error").inner_text() == "0.0000"
    page.mouse.click(box["x"] + 60, box["y"] + 100)
    assert page.locator("#budget").input_value() == "0"


@pytest.mark.slow
def test_command_and_plan_are_copied(visit, report: Report, tmp_path: Path):
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    set_slider(page, 3)
    page.locator("#copy-command").click()
    page.get_by_text("Command copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert report.front is not None
    columns = report.front["measures"]["params"]
    share = f"{columns['share'][3]:g}"
    assert copied == (
        f"tensigma compress zoo:m --data 'npz:my images.npz' --budget params={share} --out small-params-{share}/"
    )
    page.locator("#copy-plan").click()
    page.get_by_text("Plan copied").wait_for()
    check_plan(page.evaluate("navigator.clipboard.readText()"), columns["params"][3], tmp_path)


def check_plan(text: str, params: int, folder: Path) -> None:
    (folder / "plan.json").write_text(text, encoding="utf-8")
    plan = Plan.load(folder / "plan.json")
    assert plan.after.params == params
    # What is written for readers is what the plan itself says.
    assert json.loads(text)["layers"] == json.loads(json.dumps(plan.to_json()))["layers"]


@pytest.mark.slow
def test_plans_of_all_budgets_are_saved(visit, report: Report, tmp_path: Path):
    page = visit()
    assert report.front is not None
    for measure, label in (("params", "parameters"), ("macs", "multiply-adds")):
        page.get_by_label(label, exact=True).check()
        columns = report.front["measures"][measure]
        for place in (0, columns["chosen"], len(columns["share"]) - 1):
            set_slider(page, place)
            with page.expect_download() as waiting:
                page.locator("#save-plan").click()
            assert waiting.value.suggested_filename == "plan.json"
            check_plan(Path(waiting.value.path()).read_text(encoding="utf-8"), columns["params"][place], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("works", [True, False])
def test_copying_without_a_clipboard(visit, works: bool):
    page = visit()
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('no')); }")
    page.evaluate(f"() => {{ document.execCommand = () => {str(works).lower()}; }}")
    page.locator("#copy-command").click()
    page.get_by_text("Command copied" if works else "Copy the text below").wait_for()
    area = page.locator("#by-hand")
    assert area.is_visible() != works
    assert area.input_value() == page.locator("#command").inner_text()


@pytest.mark.slow
def test_without_a_command_there_is_python(visit):
    page = visit("python")
    assert page.locator("#copy-command").inner_text() == "Copy Python"
    set_slider(page, 2)
    code = page.locator("#command").inner_text()
    assert re.search(r"^plan = ts\.plan\(model, stats, budget=ts\.Params\(0\.\d+\)\)$", code, re.MULTILINE)
    compile(code, "command", "exec")


def test_without_a_front_the_page_says_why(visit):
    page = visit("bare")
    assert page.locator("#budget").count() == 0
    assert "no slider" in page.locator("#no-front").inner_text()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(visit, scheme: str):
    page = visit(scheme=scheme)
    brightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + Number(b), 0)"
    assert (page.evaluate(brightness) > 600) == (scheme == "light")
    button = page.locator("#theme")
    assert button.inner_text() == {"light": "Dark", "dark": "Light"}[scheme]
    button.click()
    assert (page.evaluate(brightness) > 600) == (scheme == "dark")
    assert button.inner_text() == {"light": "Light", "dark": "Dark"}[scheme]
    page.reload()
    assert (page.evaluate(brightness) > 600) == (scheme == "dark")


CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = rgb(getComputedStyle(node).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest("script, noscript, [disabled], .hidden")) continue;
    const svg = node.ownerSVGElement, style = getComputedStyle(node);
    const [a, b] = [light(rgb(svg ? style.fill : style.color)), light(behind(svg || node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(node.outerHTML.slice(0, 90));
  }
  return poor;
}"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read(visit, scheme: str):
    page = visit(scheme=scheme)
    set_slider(page, 1)
    assert page.evaluate(CONTRAST) == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 375, 800])
def test_fits_a_narrow_screen(visit, width: int):
    page = visit(width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for selector in ("#budget", "#copy-plan", "#curve", ".card >> nth=0"):
        box = page.locator(selector).bounding_box()
        assert 0 <= box["x"] < box["x"] + box["width"] <= width


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tables_on_a_phone_show_the_error_and_that_they_scroll(visit, scheme: str):
    page = visit("compared", width=390, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for section, wanted in (
        ("comparison", ["Way", "Rate", "Top-1"]),
        ("layers", ["Layer", "Format", "Ranks", "Error"]),
    ):
        frame = page.locator(f".scroll[aria-labelledby={section}]")
        right = edge(frame)
        for name in wanted:
            head = frame.get_by_role("columnheader", name=name, exact=True)
            assert head.is_visible()
            assert edge(head) <= right, name
        assert frame.evaluate("node => node.scrollWidth > node.clientWidth")
        # In shade is the side where there is more; the name of the row stays in sight.
        row = frame.locator("tbody th").first
        at_first, left = shade(page, frame), row.bounding_box()["x"]
        frame.evaluate("node => node.scrollTo(10000, 0)")
        assert at_first > shade(page, frame) + 10
        assert row.bounding_box()["x"] == pytest.approx(left, abs=1)


def edge(locator: Any) -> float:
    box = locator.bounding_box()
    return float(box["x"] + box["width"])


def shade(page: Any, frame: Any) -> float:
    """How far a spot at the right edge of a frame, beside its last line, is from the colour of its surface."""
    frame.scroll_into_view_if_needed()
    # What is written there is left out of the picture.
    page.add_style_tag(content="table { opacity: 0; }")
    box = frame.bounding_box()
    spot = {"x": edge(frame) - 4, "y": box["y"] + box["height"] / 2, "width": 1, "height": 1}
    shot = page.screenshot(clip=spot, type="png")
    return float(
        page.evaluate(
            """async ([text, surface]) => {
              const image = new Image();
              image.src = `data:image/png;base64,${text}`;
              await image.decode();
              const canvas = document.createElement("canvas").getContext("2d");
              canvas.drawImage(image, 0, 0);
              const seen = canvas.getImageData(0, 0, 1, 1).data, plain = surface.match(/\\d+/g).map(Number);
              return plain.slice(0, 3).reduce((sum, value, index) => sum + Math.abs(value - seen[index]), 0);
            }""",
            [base64.b64encode(shot).decode(), frame.evaluate("node => getComputedStyle(node).backgroundColor")],
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("measure", ["parameters", "multiply-adds"])
def test_the_scale_of_the_slider_is_true(visit, report: Report, width: int, measure: str):
    page = visit(width=width)
    page.get_by_label(measure, exact=True).check()
    assert report.front is not None
    shares = report.front["measures"]["params" if measure == "parameters" else "macs"]["share"]
    slider = page.locator("#budget").bounding_box()
    marks = page.locator("#scale span")
    found = {}
    for mark in marks.all():
        box = mark.bounding_box()
        found[float(mark.get_attribute("data-share"))] = box["x"] + box["width"] / 2
        assert 0 <= box["x"] < box["x"] + box["width"] <= width
        assert number(mark.inner_text()) == pytest.approx(100 * float(mark.get_attribute("data-share")), abs=0.051)
    assert {0.5, 1.0} <= set(found)
    for share, x in found.items():
        # Where the middle of the thumb would be, between the plans below and above.
        place = sum(min(max((share - low) / (high - low), 0), 1) for low, high in pairwise(shares)) / (len(shares) - 1)
        assert x == pytest.approx(slider["x"] + 9 + place * (slider["width"] - 18), abs=1)
    boxes = sorted((mark.bounding_box() for mark in marks.all()), key=lambda box: box["x"])
    assert all(first["x"] + first["width"] < second["x"] for first, second in pairwise(boxes))


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1200])
def test_few_layers_stand_in_the_middle(visit, report: Report, width: int):
    page = visit(width=width)
    frame = page.locator(".columns").first.bounding_box()
    boxes = [box.bounding_box() for box in page.locator(".columns").first.locator("li").all()]
    assert len(boxes) == len(report.layers)
    before, after = (
        boxes[0]["x"] - frame["x"],
        edge(page.locator(".columns").first) - boxes[-1]["x"] - boxes[-1]["width"],
    )
    assert before == pytest.approx(after, abs=1)
    # Each name stands below its own column.
    for box, name in zip(boxes, page.locator(".names li").all(), strict=True):
        below = name.bounding_box()
        assert below["x"] + below["width"] / 2 == pytest.approx(box["x"] + box["width"] / 2, abs=1)


def test_a_rank_beyond_the_axis_is_an_arrow(visit, report: Report):
    page = visit()
    beyond = [
        layer
        for layer in report.layers
        if layer.ranks and layer.name in report.spectra and layer.ranks[0] > report.spectra[layer.name]["rank"][-1]
    ]
    assert beyond
    assert page.locator(".spectra path.beyond").count() == len(beyond)
    assert page.locator(".spectra circle").count() == len(report.compressed) - len(beyond)
    for layer in beyond:
        assert layer.ranks is not None
        words = f"{layer.method} {layer.ranks[0]} (beyond the {report.spectra[layer.name]['rank'][-1]:g} shown)"
        assert page.get_by_text(words).is_visible()


@pytest.mark.slow
def test_paper_has_no_advice_for_the_mouse(visit):
    page = visit()
    page.emulate_media(media="print")
    assert page.get_by_text("Every point of the curve is a plan").is_visible()
    for words in ("Move the budget", "Press a column", "Copy", "What may remain"):
        assert not page.get_by_text(words).first.is_visible()
    bare = visit("bare")
    assert bare.locator("#explorer").is_visible()
    bare.emulate_media(media="print")
    assert not bare.locator("#explorer").is_visible()


@pytest.mark.slow
def test_controls_have_names_and_show_focus(visit):
    page = visit()
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, [role=region]")]
          .filter((node) => !node.ariaLabel && !node.getAttribute("aria-labelledby") && !node.labels?.length)
          .filter((node) => !node.textContent.trim()).map((node) => node.outerHTML)"""
    )
    assert unnamed == []
    for _ in range(12):
        page.keyboard.press("Tab")
        style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert style != "none", page.evaluate("document.activeElement.outerHTML")


@pytest.mark.slow
def test_prints_in_black_on_white(visit):
    page = visit(scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    for selector in ("#theme", "nav", ".dial", ".make"):
        assert not page.locator(selector).is_visible()
    assert page.locator("#curve").is_visible()
    pdf = page.pdf(format="A4")
    assert pdf.startswith(b"%PDF")
    assert 1 <= len(re.findall(rb"/Type */Page\b", pdf)) <= 5


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_results_of_experiments(visit, scheme: str):
    page = visit("results", scheme=scheme, width=390)
    assert "Substitute. A net <stands> in." in page.locator("main").inner_text()
    assert texts(page, "tbody tr:nth-child(2) td") == ["3.43", "50.1"]
    assert texts(page, "h3") == ["A net", "In the paper"]
    assert page.locator(".plot").evaluate("image => image.naturalWidth") > 100
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    flipped = page.locator(".plot").evaluate("image => getComputedStyle(image).filter") != "none"
    assert flipped == (scheme == "dark")
    page.locator("#theme").click()
    assert (page.locator(".plot").evaluate("image => getComputedStyle(image).filter") != "none") != flipped

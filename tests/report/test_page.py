"""The report page: what it says, that it needs nothing else, and that it survives any report."""

from __future__ import annotations

import builtins
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import tensigma as ts
from tensigma.compression import LayerReport, PageData, Report
from tensigma.errors import MissingExtra, StoreError
from tensigma.evaluation import Certificate, Evaluation, Size, Timing
from tensigma.report import Run, pictures, render_report, write_report
from tensigma.report.charts import line_chart

VOID = {"meta", "link", "input", "wbr"}


class Elements(HTMLParser):
    """All elements of a page; fails where tags do not nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" not in self.open and "style" not in self.open:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def size(params: int, macs: int | None = 1000) -> Size:
    return Size(params=params, macs=macs, bytes=4 * params)


@pytest.fixture
def report() -> Report:
    layers = (
        LayerReport(
            name="conv1", method="dense", ranks=None, norm=None, before=size(100), after=size(100), reason="skipped"
        ),
        LayerReport(
            name="layer<1>.conv",
            method="tucker2",
            ranks=(8, 4),
            norm="centred",
            before=size(40_000),
            after=size(9_000),
            error=0.125,
            frobenius_error=0.5,
            seconds=1.5,
        ),
        LayerReport(
            name="fc",
            method="svd",
            ranks=(3,),
            norm="centred",
            before=size(900),
            after=size(300),
            error=0.01,
            cached=True,
        ),
    )
    return Report(layers=layers, before=size(41_000), after=size(9_400), seconds=2.0, library="0.1")


@pytest.fixture
def evaluation() -> Evaluation:
    def latency(seconds: float) -> Timing:
        return Timing(batch=1, rounds=3, minimum=seconds, median=seconds, spread=0.1)

    first = Evaluation(samples=50, top1=0.92, top5=0.99, agreement=1.0, size=size(41_000), latency=latency(0.004))
    return replace(first, top1=0.9, agreement=0.96, size=size(9_400), latency=latency(0.002), original=first)


def run(series: str, rate: float, top1: float | None) -> Run:
    return Run(series=series, setting="", rate=rate, params=10, macs=None, top1=top1, agreement=0.5, seconds=1.0)


def test_says_what_was_done(report: Report, evaluation: Evaluation):
    page = Elements(render_report(report, evaluation=evaluation))
    for words in ("41 k", "9.4 k", "4.36×", "92.00 %", "90.00 %", "-2.00 points", "96.00 %", "2.00× faster", "skipped"):
        assert words in page.text
    assert "layer<1>.conv" in page.text
    assert len([tag for tag, _ in page.found if tag == "tr"]) == 1 + 3 + 1


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        pytest.param((100, 600, 400), (50, 400, 200), "2.00× fewer parameters, 1.50× fewer multiply-adds.", id="half"),
        pytest.param((100, 600, 400), (80, 300, 320), "2.00× fewer multiply-adds, 1.25× fewer parameters.", id="macs"),
        pytest.param(
            (100, 600, 400),
            (100, 600, 50),
            "8.00× fewer bytes, 1.00× fewer parameters, 1.00× fewer multiply-adds.",
            id="bits",
        ),
        pytest.param((100, 600, 400), (50, 900, 200), "2.00× fewer parameters, 1.50× more multiply-adds.", id="dearer"),
        pytest.param((100, None, 400), (40, None, 160), "2.50× fewer parameters.", id="no multiply-adds"),
    ],
)
def test_the_first_line_names_the_largest_saving_and_what_became_more(
    report: Report, before: tuple[int, int | None, int], after: tuple[int, int | None, int], words: str
) -> None:
    sizes = [Size(params=params, macs=macs, bytes=count) for params, macs, count in (before, after)]
    sized = replace(report, before=sizes[0], after=sizes[1])
    assert words in " ".join(Elements(render_report(sized)).text.split())
    for seconds, expected in ((0.025, f"{words[:-1]}, 2.50× slower in PyTorch."), (0.009, words)):
        timed = sized.with_notes(speed={"batch": 16, "before": 0.01, "after": seconds})
        assert expected in " ".join(Elements(render_report(timed)).text.split())


def test_needs_no_network_and_no_other_file(report: Report, evaluation: Evaluation):
    text = render_report(report, evaluation=evaluation, comparison=[run("a", 2, 0.9), run("a", 3, 0.8)])
    assert not re.search(r"https?:|@import|url\(", text)
    page = Elements(text)
    assert all("src" not in attributes for _, attributes in page.found)
    assert [attributes["href"] for attributes in page.all("link")] == ["data:,"]


def test_is_accessible(report: Report, evaluation: Evaluation):
    page = Elements(render_report(report, evaluation=evaluation, comparison=[run("a", 2, 0.9), run("b", 3, 0.8)]))
    assert page.all("html")[0]["lang"] == "en"
    assert len(page.all("h1")) == 1
    ids = [attributes["id"] for _, attributes in page.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    for section in page.all("section"):
        assert section["aria-labelledby"] in ids
    assert all(attributes.get("aria-hidden") or attributes.get("aria-label") for attributes in page.all("svg"))
    assert all(attributes.get("scope") for attributes in page.all("th"))


def test_names_are_not_taken_for_markup(report: Report):
    evil = replace(report.layers[0], name="<script>alert(1)</script>", reason="<b>")
    text = render_report(replace(report, layers=(evil,), notes={"model": "<i>m</i>"}))
    assert "<script>alert" not in text
    assert "<i>m</i>" not in text


@pytest.mark.parametrize("macs", [None, 500])
def test_takes_any_report(macs: int | None):
    nothing = Report(layers=(), before=size(0, macs), after=size(0, macs), seconds=0.0)
    Elements(render_report(nothing))
    bare = Evaluation(samples=1, top1=None, top5=None, agreement=None, size=size(1, macs))
    Elements(render_report(nothing, evaluation=bare, title="t", comparison=[run("a", 2.0, None)]))


def test_random_weights_are_pointed_out(report: Report):
    assert "were random" in render_report(replace(report, notes={"untrained": True}))
    assert "were random" not in render_report(report)


def test_writes_in_one_step(report: Report, tmp_path: Path):
    ts.write_report(report, tmp_path / "page.html")
    first = (tmp_path / "page.html").read_text(encoding="utf-8")
    write_report(report, tmp_path / "page.html", title="another")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") != first
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    with pytest.raises(StoreError, match="could not write"):
        write_report(report, tmp_path / "absent" / "page.html")


def test_says_which_extra_is_missing(report: Report, monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "jinja2":
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"tensigma\[report\]"):
        render_report(report)


def test_the_certificate_is_shown_where_it_holds(report: Report, evaluation: Evaluation):
    certified = replace(evaluation, samples=500, certificate=Certificate(samples=500, agreed=484))
    fresh = replace(report, notes={"data": "npz:calibration", "evaluated_on": "npz:test"})
    page = Elements(render_report(fresh, evaluation=certified))
    assert "at least 95.1 % of inputs like these, with 95 % confidence" in page.text
    assert "exact binomial, n = 500). It holds for" in page.text
    # Samples that had a part in making the model, or in choosing it among others, prove nothing.
    used: list[dict[str, Any]] = [{"data": "npz:a", "evaluated_on": "npz:a"}, {"comparison": [{}]}]
    for notes in used:
        assert "confidence" not in Elements(render_report(replace(report, notes=notes), evaluation=certified)).text


@pytest.mark.parametrize("front", [None, {"version": 2}])
def test_a_report_without_a_known_front_says_why(report: Report, front: dict[str, Any] | None):
    text = render_report(replace(report, page_data=PageData(front=front)))
    assert "There is no slider here" in text
    assert 'id="front"' not in text


def test_spectra_are_drawn_within_their_frame(report: Report):
    spectrum = {"rank": [0, 4, 8, 16], "error": [1.0, 0.4, 0.1, 0.0]}
    page_data = PageData(spectra={"conv1": spectrum, "layer<1>.conv": spectrum, "absent": spectrum})
    drawn = pictures.curves(replace(report, page_data=page_data))
    assert [curve.layer.name for curve in drawn] == ["conv1", "layer<1>.conv"]
    for curve in drawn:
        for point in curve.line.split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= pictures.WIDTH
            assert 0 <= y <= pictures.HEIGHT
    assert drawn[0].dot is None
    assert drawn[1].dot == (pictures.WIDTH / 2, pictures.HEIGHT * (1 - 0.125))
    assert "8 of 16 directions leave an error of 0.1 or less" in drawn[1].label
    assert drawn[1].arrow is drawn[1].beyond is None


def test_a_rank_beyond_a_spectrum_is_no_dot_at_its_edge(report: Report):
    tucker = report.layers[1]
    many = replace(tucker, name="many", method="cp", ranks=(46,))
    full = replace(tucker, name="full", method="cp", ranks=(32,))
    spectra = {name: {"rank": [0, 16, 32], "error": [1.0, 0.4, 0.0]} for name in ("many", "full")}
    both = replace(report, layers=(many, full), page_data=PageData(spectra=spectra))
    beyond, last = pictures.curves(both)
    assert beyond.dot is None
    assert beyond.arrow is not None
    assert "rank 46 lies beyond the 32 shown" in beyond.label
    assert last.dot == (pictures.WIDTH, pictures.HEIGHT * (1 - 0.125))
    assert last.arrow is last.beyond is None
    page = Elements(render_report(both))
    assert "cp 46 (beyond the 32 shown)" in page.text
    assert "cp 32 (" not in page.text
    assert "An arrow instead" in page.text
    assert "An arrow instead" not in render_report(replace(both, layers=(full,)))


def test_a_lower_bound_is_promised_where_it_holds(report: Report):
    spectra = {"conv1": {"rank": [0, 8], "error": [1.0, 0.0]}}
    drawn = replace(report, page_data=PageData(spectra=spectra))
    assert "no format can go below" in render_report(drawn)
    in_sequence = render_report(drawn.with_notes(sequential=True))
    assert "no format can go below" not in in_sequence
    assert "fitted in sequence" in in_sequence


@pytest.mark.parametrize("largest", [3e-4, 0.07, 0.2, 1.0, 7, 99, 36_864, 2.4e7])
def test_ticks_reach_the_largest_in_few_steps(largest: float):
    found = pictures.ticks(largest)
    assert found[0] == 0
    assert found[-2] < largest <= found[-1]
    assert 2 <= len(found) <= 5


def test_columns_keep_to_their_panel(report: Report):
    found = pictures.columns(report)
    assert [column.layer.name for column in found.columns] == ["conv1", "layer<1>.conv", "fc"]
    for column in found.columns:
        assert 0 <= column.after <= column.before <= 100
        assert all(0 <= value <= 100 for value in (column.error, column.weight_error) if value is not None)
    assert found.size_ticks[-1].label == "40 k"


def test_an_evil_front_stays_data(report: Report):
    evil = "</script><script>alert(1)</script>"
    front = {"version": 1, "measures": {"params": {}}, "layers": [{"name": evil}]}
    text = render_report(replace(report, page_data=PageData(front=front)))
    assert "</script><script>alert" not in text
    Elements(text)


def test_chart_keeps_to_its_frame():
    chart = line_chart([run("a", 2.0, 0.99), run("a", 12.0, 0.1), run("b", 3.0, 0.5)], original=0.995)
    assert chart is not None
    assert [series.name for series in chart.series] == ["a", "b"]
    for series in chart.series:
        for mark in series.marks:
            assert chart.left <= mark.x <= chart.width - chart.right
            assert chart.top <= mark.y <= chart.height - chart.bottom
    ordered = [mark.y for mark in chart.series[0].marks]
    assert ordered == sorted(ordered)  # higher values are further up
    assert chart.y_ticks[0].label == "0 %"
    assert chart.x_ticks


def test_chart_without_labels_shows_agreement():
    chart = line_chart([run("a", 2.0, None), run("b", 2.0, None)], original=None)
    assert chart is not None
    assert chart.what == "agreement"
    assert line_chart([run("a", 2.0, 0.5)], original=None) is None


def test_a_damaged_run_is_refused():
    with pytest.raises(StoreError, match="damaged"):
        Run.from_json({"series": "a"})

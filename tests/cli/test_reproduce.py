"""``tensigma reproduce``."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from support_experiments import stand_ins
from tensigma.cli.progress import step_of
from tensigma.cli.reproduce import _command, _Display, _overview
from tensigma.experiments import (
    NAMES,
    PAPER,
    TrainingProgress,
    configs_of,
    load_config,
    quick_form,
    reproduce,
    state_of,
)

TINY = """
kind = "accuracy"
title = "Digits at two ranks"
shown = "figure"
substitute = "digits stand in for everything"

[models.net]
spec = "zoo:digits-cnn?width=6"
title = "a net"

[sources]
test = "digits:?split=val&samples=40"
train = "digits:?split=train&samples=40"

[[series]]
name = "classical"
method = "tucker2"
norm = "frobenius"

[[series]]
name = "Σ"
method = "tucker2"
norm = "sigma"
source = "train"

[[study]]
model = "net"
evaluation = "test"
alphas = [0.9, 1.0]
"""


@pytest.fixture
def config(place: Path) -> str:
    (place / "tiny.toml").write_text(TINY)
    return "tiny.toml"


def test_all_are_listed_with_their_state(run_json, run):
    found = run_json("reproduce", "--list")
    assert [each["name"] for each in found["experiments"]] == list(NAMES)
    states = {each["name"]: each["state"] for each in found["experiments"]}
    assert states["fisher"] == "not run"
    assert states["gnetc100-randomseeds"] == "needs CIFAR-100"
    configs = {each["name"]: each["configs"] for each in found["experiments"]}
    assert all(configs[name] == ["substitute", "paper"] for name in PAPER)
    text = run("reproduce", "--list", "--config", "paper").stdout
    assert text.count("not run") == len(PAPER)


@pytest.mark.slow
def test_from_a_config_to_results_a_table_and_a_figure(run, run_json, place: Path, config: str):
    ours = ("--config", config, "--out", "found")
    text = run("reproduce", "fisher", *ours).stdout
    assert "**Substitute.** digits stand in for everything" in text
    stored = json.loads((place / "found" / "fisher.tiny.json").read_text())
    assert stored["config"] == "tiny"
    assert stored["substitute"] == "digits stand in for everything"
    assert len(stored["cells"]) == 5
    assert run_json("reproduce", "--list", "fisher", *ours)["experiments"][0]["state"] == "done"
    assert run("reproduce", "--table", "fisher", *ours).stdout == text
    found = run_json("reproduce", "--table", "fisher", *ours)
    assert found["experiments"]["fisher"] == stored["cells"]
    run("reproduce", "--table", "fisher", *ours, "--to", "fisher.svg")
    assert "Digits at two ranks (substitute)" in (place / "fisher.svg").read_text()
    run("reproduce", "--table", "fisher", *ours, "--to", "fisher.png")
    assert (place / "fisher.png").read_bytes().startswith(b"\x89PNG")
    run("reproduce", "--table", "fisher", *ours, "--to", "fisher.md")
    alone = (place / "fisher.md").read_text().strip()
    assert alone == text.strip().replace("## fisher: Digits at two ranks", "# Digits at two ranks")
    page = (place / "found" / "report.html").read_text()
    for shown in ("Digits at two ranks", "<strong>Substitute.</strong> digits stand in", "data:image/svg+xml;base64,"):
        assert shown in page
    run("reproduce", "--table", "fisher", *ours, "--to", "fisher.html")
    assert (place / "fisher.html").read_text() == page


@pytest.mark.parametrize(
    ("names", "config", "out", "quick", "seed", "expected"),
    [
        (["all"], "substitute", "results/paper", False, 0, "tensigma reproduce --table all"),
        (["fisher"], "substitute", "my quick", True, 0, "tensigma reproduce --table fisher --quick --out 'my quick'"),
        (["a", "b*"], "paper", "q", False, 3, "tensigma reproduce --table a 'b*' --config paper --out q --seed 3"),
    ],
)
def test_the_note_tells_what_to_type(names, config, out, quick, seed, expected: str):
    assert _command(names, config, Path(out), quick, seed) == expected


def test_the_names_are_whole_at_80_columns():
    states = [state_of(load_config(name, configs_of(name)[0]), Path("out"), None, 0) for name in NAMES]
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    with console.capture() as capture:
        console.print(_overview(states))
    assert set(NAMES) <= set(capture.get().split())
    assert "…" not in capture.get()


@pytest.mark.slow
def test_a_config_of_ones_own_may_have_a_name_of_its_own(run, place: Path, config: str):
    text = run("reproduce", "smaller", "--config", config, "--out", "found").stdout
    assert "## smaller: Digits at two ranks" in text
    assert "In the paper" not in text
    assert (place / "found" / "smaller.tiny.json").is_file()
    assert "letters, digits" in run("reproduce", "a/b", "--config", config, code=1).stderr


def test_the_whole_page(run, place: Path):
    run("reproduce", "--table", "all", "--to", "docs/paper.md")
    text = (place / "docs" / "paper.md").read_text()
    assert all(f"\n## {name}: " in text for name in PAPER)
    assert "| 0.85 | 2.53 | 20.9 | 66.5 |" in text


@pytest.mark.slow
def test_long_cells_say_what_goes_on(run, place: Path):
    overrides = stand_ins(place)
    shown: list[str] = []
    display = _Display(lambda state: shown.append(step_of(state).text))
    reproduce(
        [quick_form(load_config("t2sigma-c100", "paper"))],
        data=None,
        out=place / "found",
        cache=place / "cache",
        overrides=overrides,
        progress=display.cell,
        detail=display.within,
    )
    assert any("(calibration, batch" in text for text in shown)
    assert any("(compression, layer" in text for text in shown)
    assert any("(fine-tuning, rate 0.001, epoch 1 of 1, loss" in text for text in shown)
    display.within(TrainingProgress(done=1, total=2, loss=0.1, seconds=1.0))


@pytest.mark.slow
def test_the_users_own_models_and_images(run, place: Path):
    overrides = stand_ins(place)
    run(
        "reproduce",
        "r18or-divdata",
        *("--config", "paper", "--quick", "--out", "found"),
        *("--model", f"*={overrides.models['*']}"),
        *("--source", f"*={overrides.sources['*']}"),
    )
    found = json.loads((place / "found" / "r18or-divdata.paper.quick.json").read_text())
    assert found["quick"] is True
    assert len(found["cells"]) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name an experiment, or all"),
        (("fishr",), "no experiment 'fishr'"),
        (("fisher",), "--data DIR"),
        (("fisher", "--config", "papr"), "give substitute, paper, or a TOML file"),
        (("fisher", "Activation", "--config", "any.toml"), "the config of one experiment"),
        (("cpsigma-c100", "--data", "."), "needs CIFAR-100"),
        (("fisher", "--to", "x.md"), "add --table"),
        (("--table", "all", "--to", "x.svg"), "one experiment"),
        (("--table", "fisher", "--to", "x.pdf"), "a table is written to .md"),
        (("--table", "greedy_table", "--to", "x.svg"), "has no figure to show"),
        (("fisher", "--weights", "squeezenet"), "NAME=VALUE"),
        (("fisher", "--data", ".", "--only", "nothing"), "--only nothing matches no cell; they have names such as"),
    ],
)
def test_what_cannot_be_done_is_said(run, place: Path, arguments: tuple[str, ...], message: str):
    assert message in run("reproduce", *arguments, code=1).stderr
    assert not (place / "results").exists()

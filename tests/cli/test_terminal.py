"""A terminal: bars that keep to one line, shell completion, and a library that prints nothing by itself."""

from __future__ import annotations

import ast
import io
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import ProgressColumn
from typer.testing import CliRunner

import tensigma
from tensigma.calibration import CalibrationProgress
from tensigma.cli.app import app
from tensigma.cli.command import command_line
from tensigma.cli.progress import Bar, Lines, Step, step_of
from tensigma.cli.screen import Screen
from tensigma.cli.tables import Columns
from tensigma.evaluation import EvaluationProgress
from tensigma.planning import PlanningProgress
from tensigma.running import Progress
from tensigma.solving import CompressionProgress

SOURCES = sorted(Path(tensigma.__file__).parent.rglob("*.py"))


@dataclass(frozen=True, kw_only=True)
class Refining(Progress):
    """A kind of progress that the command line has never heard of."""

    loss: float

    def __str__(self) -> str:
        return f"{self.done:,} of {self.total:,} samples, loss {self.loss:.2f}"


def test_any_kind_of_progress_can_be_shown():
    step = step_of(Refining(done=500, total=2000, loss=0.25, seconds=1.0))
    assert step == Step(done=0.25, total=1.0, text="500 of 2,000 samples, loss 0.25", remaining=3.0)
    endless = step_of(Progress(done=7, total=None, seconds=1.0))
    assert endless == Step(done=7, total=None, text="7", remaining=None)


def test_another_kind_of_work_has_its_own_time(monkeypatch):
    clock = iter([0.0, 100.0, 104.0])
    monkeypatch.setattr("tensigma.cli.progress.time.perf_counter", lambda: next(clock))
    stream = io.StringIO()
    with Lines("working", Console(file=stream, width=200)) as lines:
        lines.update(PlanningProgress(layer="a", done=1, total=1, work=1.0, seconds=100.0))
        lines.update(EvaluationProgress(done=2, total=2, samples=48, seconds=4.0))
    assert stream.getvalue().splitlines() == [
        "working: curves of layer 1 of 1, a, 1 min 40 s",
        "working: batch 2 of 2, 12 samples/s, 4.0 s",
    ]


def drawn(table: Columns, width: int) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    with console.capture() as capture:
        console.print(table, markup=False, highlight=False)
    return re.sub(r"\x1b\[[0-9;]*m", "", capture.get())


FIGURES = ["cp-joint 132", "269,722 → 134,815", "2.36 M → 1.51 M", "0.0361", ""]
LONG = [[f"layer{index}.0.conv1", *FIGURES] for index in range(3)]
LONG.append(["linear", "dense", "650", "640", "–", "the budget is best kept without it"])
LONG.append(["downsample", "dense", "650", "640", "–", "the budget is best kept without it"])
LONG_HEADER = ["layer", "format", ">parameters", ">MACs", ">expected error", "why dense"]


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_a_table_never_cuts_a_word(width: int):
    shown = drawn(Columns(LONG_HEADER, LONG, remarks=5, marked=1), width)
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    words = set(shown.split())
    for row in LONG:
        assert row[0] in words
        assert set(" ".join(row).split()) <= words
    assert shown.count("best") == (2 if width == 140 else 1)


def test_a_name_wider_than_the_terminal_is_folded():
    shown = drawn(Columns(["layer", ">size"], [["features.denseblock3.denselayer12.conv2", "1,024"]]), 24)
    assert "…" not in shown
    assert "1,024" in shown
    assert "".join(line[:17].strip() for line in shown.splitlines()[3:]) == "features.denseblock3.denselayer12.conv2"


def test_names_are_wrapped_before_numbers():
    header = ["norm", "ranks", ">parameters", ">MACs", ">top-1"]
    shown = drawn(Columns(header, [["Tensigma default", "params=0.327", "77,579", "1.92 M", "99.44 %"]]), 52)
    assert "77,579  1.92 M  99.44 %" in shown
    assert "Tensigma default" not in shown


def test_messages_are_broken_between_words():
    stream = io.StringIO()
    screen = Screen()
    screen._err = Console(file=stream, force_terminal=True, width=40, color_system=None)
    text = "errors count by their effects on the answers, the best of 3 ways tried on 300 samples"
    screen.note(text)
    lines = stream.getvalue().splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 40
    assert stream.getvalue().split() == text.split()


@pytest.mark.parametrize("command", ["plan", "compress", "demo", "inspect", "stats merge", "export"])
def test_help_at_80_columns_cuts_nothing(command: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    manual = CliRunner().invoke(app, [*command.split(), "--help"]).stdout
    assert "<bool>" not in manual
    assert not re.search(r"[a-z0-9=,]…", manual)
    assert ("all by default" in manual) == (command != "demo")


@pytest.mark.parametrize("width", [40, 60, 120])
@pytest.mark.parametrize(
    "state",
    [
        CalibrationProgress(done=2, total=4, samples=64, seconds=2.0),
        CalibrationProgress(done=2, total=None, samples=64, seconds=2.0),
        CompressionProgress(layer="a.long.name." * 9, done=1, total=2, work=0.5, seconds=1.0, error=0.1),
        Step(done=1, total=1, text="all of it"),
        Refining(done=5, total=10, loss=1.0, seconds=1.0),
    ],
    ids=lambda state: type(state).__name__,
)
def test_a_bar_keeps_to_one_line(state, width: int):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    bar = Bar("working", console)
    bar.update(state)
    with console.capture() as capture:
        console.print(bar._progress.get_renderable())
    shown = capture.get().splitlines()
    assert len(shown) == 1
    assert len(shown[0]) <= width
    assert "working" in shown[0]


def test_the_time_to_go_runs_on_between_steps(monkeypatch):
    now = 0.0
    monkeypatch.setattr("tensigma.cli.progress.time.perf_counter", lambda: now)
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    bar = Bar("working", console)

    def shown() -> str:
        # A column keeps what it has drawn for a quarter of a second of real time.
        column = bar._progress.columns[-1]
        assert isinstance(column, ProgressColumn)
        column._renderable_cache.clear()
        with console.capture() as capture:
            console.print(bar._progress.get_renderable())
        return capture.get().strip()

    now = 3.0
    assert shown().endswith("3.0 s")
    bar.update(Step(done=1, total=4, text="", remaining=9.0))
    now = 7.0
    assert shown().endswith("5.0 s to go")
    now = 30.0
    assert shown().endswith("a moment to go")
    bar.update(Step(done=4, total=4, text=""))
    now = 99.0
    assert shown().endswith("30 s")


@pytest.mark.parametrize(
    ("words", "place", "expected"),
    [
        ("tensigma comp", 1, ["compress"]),
        ("tensigma compress --bud", 2, ["--budget"]),
        ("tensigma stats ", 2, ["show", "merge", "compare"]),
    ],
)
def test_bash_completes(words: str, place: int, expected: list[str]):
    environment = {"_TENSIGMA_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(place)}
    result = CliRunner().invoke(app, [], prog_name="tensigma", env=environment)
    assert result.stdout.split() == expected


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_completion_scripts_are_shells(name: str):
    result = CliRunner().invoke(app, [], prog_name="tensigma", env={"_TENSIGMA_COMPLETE": f"source_{name}"})
    assert "_TENSIGMA_COMPLETE" in result.stdout
    shell = shutil.which(name)
    if shell is not None:
        checked = subprocess.run([shell, "-n"], input=result.stdout, text=True, capture_output=True)
        assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["/usr/bin/tensigma", "compress", "zoo:m"], ["tensigma", "compress", "zoo:m"]),
        (["/lib/tensigma/__main__.py", "demo"], ["tensigma", "demo"]),
        (["/usr/bin/pytest", "tests"], None),
    ],
)
def test_the_command_line_is_known_to_programs_alone(monkeypatch, arguments: list[str], expected: list[str] | None):
    monkeypatch.setattr("sys.argv", arguments)
    assert command_line() == expected


@pytest.mark.slow
def test_the_library_prints_nothing():
    found = []
    for file in SOURCES:
        if "cli" in file.relative_to(Path(tensigma.__file__).parent).parts:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Name) and node.id == "print":
                found.append(f"{file.name}:{node.lineno}")
            if isinstance(node, ast.Attribute) and node.attr in ("stdout", "stderr", "__stdout__", "__stderr__"):
                found.append(f"{file.name}:{node.lineno}")
    assert found == []

"""What goes where: results, progress, warnings, and the same in other processes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from rich.console import Console

import tensigma
from support_cli import DATA, MODEL, readme_command, readme_material
from tensigma.calibration import CalibrationProgress
from tensigma.cli.progress import Bar, Lines, Step
from tensigma.cli.screen import Screen
from tensigma.cli.tables import Columns
from tensigma.evaluation import EvaluationProgress
from tensigma.solving import CompressionProgress
from tensigma.zoo import load_model

COMMANDS = ["inspect", "calibrate", "plan", "compress", "evaluate", "report", "demo"]


def test_version_and_help(run):
    assert run("--version").stdout.strip() == f"tensigma {tensigma.__version__}"
    manual = run("--help").stdout
    for words in ("Exit codes", "torchvision:NAME", "imagefolder:DIR", "--force", *COMMANDS, "stats"):
        assert words in manual


@pytest.mark.parametrize("command", [*COMMANDS, "stats show", "stats merge", "stats compare"])
def test_every_command_has_a_manual(run, command: str):
    manual = run(*command.split(), "--help").stdout
    assert "Example" in manual
    assert "Exit codes: 0 done" in manual
    assert f"tensigma {command}" in manual
    for option in ("--json", "--quiet", "--verbose", "--threads"):
        assert option in manual


def test_quiet_leaves_the_result_alone(run, weights: Path):
    arguments = ("calibrate", MODEL, "--weights", weights, "--data", DATA)
    result = run(*arguments, "--out", "a", "--quiet")
    assert not result.stderr
    assert "samples" in result.stdout
    assert "needs up to" in run(*arguments, "--out", "b", "--verbose").stderr


@pytest.mark.slow
def test_random_weights_are_pointed_out(run):
    result = run("calibrate", MODEL, "--data", DATA, "--out", "stats")
    assert "warning: the weights of" in result.stderr


def test_threads_are_given_back(run, stats: Path):
    before = torch.get_num_threads()
    run("stats", "show", stats, "--threads", before + 1)
    assert torch.get_num_threads() == before


def test_json_has_no_word_for_infinity(capsys):
    Screen(json=True).result("test", {"error": float("inf"), "list": [float("nan"), 1.0]})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["list"] == [None, 1.0]


def test_lines_come_now_and_then(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 4.0, 10.0, 11.0])
    monkeypatch.setattr("tensigma.cli.progress.time.perf_counter", lambda: next(clock))
    stream = io.StringIO()
    with Lines("working", Console(file=stream, width=200)) as lines:
        for done in (1, 2, 3, 4, 5):
            lines.update(Step(done=done, total=5, text=f"{done} of 5", remaining=5.0 - done))
    assert stream.getvalue().splitlines() == [
        "working: 2 of 5, 3.0 s to go",
        "working: 4 of 5, 1.0 s to go",
        "working: 5 of 5, 11 s",
    ]


@pytest.mark.parametrize(
    "state",
    [
        CalibrationProgress(done=2, total=4, samples=64, seconds=2.0),
        CalibrationProgress(done=2, total=None, samples=64, seconds=2.0),
        CompressionProgress(layer="conv1", done=1, total=2, work=0.5, seconds=1.0, error=0.1),
        EvaluationProgress(done=1, total=2, samples=10, seconds=1.0),
        EvaluationProgress(done=1, total=None, samples=10, seconds=1.0),
    ],
)
def test_a_bar_on_a_terminal(state):
    stream = io.StringIO()
    with Bar("working", Console(file=stream, force_terminal=True, width=120)) as bar:
        bar.update(state)
    assert "━" in stream.getvalue()
    assert "working" in stream.getvalue()
    ends = "to go" in stream.getvalue()
    assert ends == (not hasattr(state, "total") or state.total is not None)


def test_a_table_has_lines_on_a_terminal_only():
    table = Columns(["layer", ">size"], [["a[0]", "1"], ["all", "1"]], n_totals=1)
    for terminal in (True, False):
        stream = io.StringIO()
        Console(file=stream, force_terminal=terminal, width=80).print(table)
        assert "a[0]" in stream.getvalue()
        assert ("─" in stream.getvalue()) == terminal


def shell(*command: str, seconds: int = 180, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=own, timeout=seconds)


@pytest.mark.slow
def test_as_a_program_of_its_own(weights: Path):
    program = str(Path(sys.executable).with_name("tensigma"))
    arguments = ("--weights", str(weights), "--data", DATA, "--budget", "params=0.5", "--out", "small", "--json")
    done = shell(program, "compress", MODEL, *arguments, "--method", "tucker2")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["report"]["rate"] >= 2
    assert "\x1b" not in done.stderr
    again = shell(sys.executable, "-m", "tensigma", "compress", MODEL, *arguments)
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr.splitlines() == ["error: small exists; add --force to replace it, or choose another --out"]


@pytest.mark.slow
def test_without_the_extra(place: Path):
    (place / "typer.py").write_text("raise ModuleNotFoundError('typer')")
    done = shell(sys.executable, "-m", "tensigma", "--help", PYTHONPATH=str(place))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "pip install 'tensigma[cli]'" in done.stderr


@pytest.mark.slow
def test_two_processes_share_the_work(run_json, weights: Path):
    what = ("compress", MODEL, "--weights", str(weights), "--data", DATA, "--ranks", "vbmf=0.7")
    # Several processes do not fit in sequence.
    arguments = (*what, "--no-sequential", "--json", "--out")
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "tensigma")
    done = shell(*launch, *arguments, "two")
    assert done.returncode == 0, done.stderr
    both = json.loads(done.stdout)["report"]
    one = run_json(*arguments[:-2], "--out", "one")["report"]
    assert both["notes"]["samples"] == one["notes"]["samples"] == 96
    assert both["after"] == one["after"]
    for first, second in zip(both["layers"], one["layers"], strict=True):
        assert first["ranks"] == second["ranks"]
        assert first["error"] == pytest.approx(second["error"], abs=1e-3)


@pytest.mark.slow
def test_the_command_of_the_readme_in_the_installed_environment(place: Path):
    """torchvision is imported as it is installed, in a process that no test has prepared."""
    if find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    readme_material(place)
    # The formats and norms that make it take minutes have tests of their own; "make torture" runs it as it is written.
    quick = ("--norm", "frobenius", "--method", "svd", "--no-weigh")
    done = shell(*readme_command(), *quick, "--json", seconds=900)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["report"]
    assert report["before"]["params"] == 11_689_512
    assert report["rate"] >= 2
    tensigma.load(place / "small", load_model("torchvision:resnet18"))

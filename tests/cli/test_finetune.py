"""``tensigma finetune``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tensigma as ts
from support_cli import DATA, MODEL, files
from tensigma.files import seal
from tensigma.finetuning.unfinished import Unfinished
from tensigma.zoo import load_model

OUTPUT = {"manifest.json", "model.safetensors", "plan.json", "report.json", "report.html", "finetuning.json"}


@pytest.fixture
def small(run, stats: Path, weights: Path) -> Path:
    """A compressed model."""
    common = ("compress", MODEL, "--weights", weights, "--stats", stats, "--method", "svd", "--out", "small")
    run(*common, "--budget", "params=0.6", "--quiet")
    return Path("small")


@pytest.mark.slow
def test_labels(run, small: Path, place: Path) -> None:
    result = run(
        *("finetune", small, "--data", DATA, "--validation", DATA, "--out", "tuned", "--epochs", 8),
        *("--learning-rates", "1e-2,1e-3", "--learning-rates", "1e-9"),
    )
    assert "0.01 (kept)" in result.stdout
    assert "top-1" in result.stdout
    assert "samples/s" in result.stderr
    assert "validation samples" in result.stderr
    assert files(place / "tuned") == OUTPUT
    history = ts.FineTuning.from_json(json.loads(Path("tuned/finetuning.json").read_text()))
    assert [rate.learning_rate for rate in history.rates] == [1e-2, 1e-3, 1e-9]
    assert history.best.key > history.start.key
    tuned = ts.load("tuned", load_model(MODEL))
    before = ts.load(small, load_model(MODEL))
    assert not torch.equal(tuned.state_dict()["fc.weight"], before.state_dict()["fc.weight"])
    report = ts.Report.from_json(json.loads(Path("tuned/report.json").read_text()))
    assert "Layer errors are from before fine-tuning." in Path("tuned/report.html").read_text()
    assert report.notes["finetuning"] == history.to_json()
    assert "conv3" in run("report", "tuned").stdout


def test_teacher(run_json, small: Path, weights: Path, npz: str) -> None:
    common = ("finetune", small, "--teacher", "--data", npz, "--epochs", 1, "--learning-rates", "1e-3")
    found = run_json(*common, "--out", "tuned", "--validation", "digits:?samples=40")
    assert found["measure"] == "agreement"
    assert found["validation_samples"] == 40
    # The weights that the report names are found again; given ones are taken instead.
    given = run_json(*common, "--weights", weights, "--validation", "digits:?samples=40", "--out", "again")
    assert given["rates"][0]["epochs"][0]["loss"] == found["rates"][0]["epochs"][0]["loss"]


@pytest.mark.slow
def test_a_killed_command_goes_on(run, run_json, small: Path, place: Path, monkeypatch) -> None:
    common = ("finetune", small, "--data", DATA, "--epochs", 2, "--learning-rates", "1e-2,1e-3", "--batch-size", 32)
    whole = run_json(*common, "--out", "whole")
    save, calls = Unfinished.save, []

    def interrupted(self: Unfinished, *args: Any) -> None:
        save(self, *args)
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Unfinished, "save", interrupted)
    stopped = run(*common, "--out", "tuned", "--checkpoint", "state", code=130)
    assert "continues from there" in stopped.stderr
    assert not Path("tuned").exists()
    resumed = run_json(*common, "--out", "tuned", "--checkpoint", "state")
    assert len(calls) == 4
    assert (resumed["learning_rate"], resumed["epoch"]) == (whole["learning_rate"], whole["epoch"])
    one, other = (ts.load(folder, load_model(MODEL)).state_dict() for folder in ("whole", "tuned"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert not Path("state").exists()


def test_nothing_better_is_said(run, small: Path) -> None:
    common = ("finetune", small, "--data", DATA, "--epochs", 1, "--optimizer", "sgd", "--learning-rates", "1e30")
    result = run(*common, "--out", "tuned")
    assert "no epoch improved the model" in result.stderr
    assert "diverged" in result.stdout
    one, other = (ts.load(folder, load_model(MODEL)).state_dict() for folder in (small, "tuned"))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_refusals(run, small: Path, weights: Path, place: Path) -> None:
    out = ("--out", "tuned")
    assert "no images" in run("finetune", small, *out, code=1).stderr
    assert "not a number" in run("finetune", small, "--data", DATA, "--learning-rates", "fast", *out, code=2).stderr
    assert "no compressed model" in run("finetune", "stats", "--data", DATA, *out, code=1).stderr
    assert "--force" in run("finetune", small, "--data", DATA, "--out", small, code=1).stderr
    assert "up to 0.5" in run("finetune", small, "--data", DATA, "--validation-share", 2, *out, code=1).stderr
    weights.unlink()
    assert "--weights" in run("finetune", small, "--data", DATA, "--teacher", *out, code=1).stderr
    report = json.loads((small / "report.json").read_text())
    report["notes"]["model"] = "evil.py:make"
    # The digest guards against damage, not against an attacker, who can make a new one.
    (small / "report.json").write_text(json.dumps(seal(report)))
    assert "would be executed" in run("finetune", small, "--data", DATA, *out, code=1).stderr
    (small / "report.json").unlink()
    assert "--original" in run("finetune", small, "--data", DATA, *out, code=1).stderr
    run("finetune", small, "--original", MODEL, "--data", DATA, "--epochs", 1, "--out", small, "--force")
    assert files(place / "small") == OUTPUT - {"report.json", "report.html"}

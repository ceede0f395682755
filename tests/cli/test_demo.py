"""``tensigma demo``, with less training and fewer rates than a person gets."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

import tensigma as ts
from support_cli import files
from tensigma.cli import demo
from tensigma.experiments import demo as experiment
from tensigma.zoo import load_model


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(ts.experiments, "compare", functools.partial(experiment.compare, alphas=(0.8,)))
    monkeypatch.setattr(ts.experiments, "train_once", functools.partial(experiment.train_once, epochs=5))


@pytest.mark.slow
def test_the_gain_is_visible(run_json, short, place: Path):
    found = run_json("demo")
    runs = {run["series"]: run for run in found["runs"]}
    assert found["original"]["top1"] > 0.9
    assert runs["Σ (paper)"]["top1"] > runs["Frobenius"]["top1"] + 0.05
    assert runs["Tensigma default"]["top1"] >= runs["Σ (paper)"]["top1"]
    assert runs["Tensigma default"]["params"] <= runs["Frobenius"]["params"]
    out = place / "demo-output"
    assert {"demo.json", "report.html", "compressed", "digits-cnn-0.safetensors"} <= files(out)
    small = ts.load(out / "compressed", load_model("zoo:digits-cnn"))
    assert sum(p.numel() for p in small.parameters()) == found["runs"][found["chosen"]]["params"]
    assert json.loads((out / "demo.json").read_text())["runs"] == found["runs"]
    page = (out / "report.html").read_text()
    assert "Σ centred" in page
    # The second time the trained network is there already, and no data is needed for it.
    experiment.train_once(out / "digits-cnn-0.safetensors", data=None)
    # Results of the demonstration itself may be replaced.
    demo._check_out(out)


def test_a_folder_of_something_else_is_kept(run, place: Path):
    (place / "demo-output").mkdir()
    (place / "demo-output" / "notes.txt").write_text("mine")
    assert "something else" in run("demo", code=1).stderr
    assert files(place / "demo-output") == {"notes.txt"}

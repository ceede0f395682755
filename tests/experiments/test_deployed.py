"""Models judged in ONNX Runtime: the same answers as PyTorch's, kept by their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tensigma.experiments import deployed, markdown, reproduce, section_of
from tensigma.experiments.deployed import Bench
from tensigma.experiments.settings import Config, parse_config
from tensigma.experiments.workshop import Workshop
from tensigma.zoo import load_model

pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
TEST = "digits:?split=val&samples=40"


def digits() -> Config:
    budget = {"ranks": "budget", "method": "auto", "norm": "centred", "layers": "all"}
    table: dict[str, Any] = {
        "kind": "beyond",
        "title": "Digits",
        "models": {"net": {"spec": "zoo:digits-cnn?width=6", "title": "a net", "runtime": "onnxruntime"}},
        "sources": {"test": TEST, "train": "digits:?split=train&samples=60"},
        "study": [{"model": "net", "evaluation": "test", "source": "train"}],
        "options": {
            "rates": {"net": [2.0]},
            "macs": {"net": [2.0]},
            "variants": [
                {"name": "BALF's rule", "ranks": "balf", "method": "svd", "norm": "sigma", "layers": "all"},
                {"name": "budget", **budget, "rates": {"net": []}},
            ],
        },
    }
    return parse_config(table, name="beyond", config="mine")


@pytest.mark.slow
def test_rates_in_parameters_and_multiply_adds_become_two_tables(tmp_path: Path) -> None:
    (found,) = reproduce([digits()], data=None, out=tmp_path / "out", cache=tmp_path / "cache")
    cells = found.cells
    assert list(cells) == [
        "a net | original",
        "a net | BALF's rule | 2",
        "a net | BALF's rule | 2 MACs",
        "a net | budget | 2 MACs",
    ]
    for key, cell in cells.items():
        assert cell["images"] == 40
        assert 0 <= cell["agreement"] <= 1
        assert len(cell["seconds"]) == 2
        if "MACs" in key:
            assert cell["macs_rate"] >= float(key.split(" ")[-2])
        elif "original" not in key:
            assert cell["rate"] >= 2
    assert cells["a net | original"]["agreement"] == 1
    first, second = section_of(found).tables
    assert first.title.endswith("rates in parameters")
    assert [row[:2] for row in second.rows] == [["2", "BALF's rule"], ["2", "budget"]]
    assert "| rate |  | top-1 | agreement | parameters | multiply-adds | time |" in markdown(section_of(found))


@pytest.mark.slow
def test_answers_are_those_of_pytorch_and_no_model_runs_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    original, other = load_model("zoo:digits-cnn?width=4"), load_model("zoo:digits-cnn?width=5")
    workshop = Workshop(None, tmp_path)
    bench = Bench(original, workshop, "test", TEST)
    figures = bench.figures(other)
    assert figures["hits"] == workshop.count_hits(other, "test", TEST)
    answers = [workshop.answers(model, "test", TEST)[1] for model in (original, other)]
    assert figures["agreement"] == sum(map(int.__eq__, *answers)) / 40
    monkeypatch.setattr(deployed, "Deployed", None)
    assert Bench(original, Workshop(None, tmp_path), "test", TEST).figures(other) == figures

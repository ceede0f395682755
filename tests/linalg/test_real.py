"""CP beside deflation on the convolutions of a trained network, under the gram of its own inputs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tensigma.calibration import calibrate
from tensigma.linalg import CP, Deflation, Metric, cp_rank
from tensigma.zoo import load_data, load_model

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("TENSIGMA_DATA"), reason="TENSIGMA_DATA names no real models and images"),
]


def test_cp_als_beats_deflation_on_every_layer_of_resnet20():
    folder = Path(os.environ["TENSIGMA_DATA"]) / "cifar10"
    model = load_model("zoo:resnet20-cifar", folder / "resnet20.safetensors")
    stats = calibrate(model, load_data(f"cifar10:{folder}?samples=200"))
    rows = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Conv2d) or name == "conv1":
            continue
        weight, metric = module.weight.detach(), Metric.from_gram(stats[name].gram)
        rank = cp_rank(weight, 0.8)
        greedy, als = (
            Deflation(rank).fit(weight, metric).error,
            CP(rank, solver="als", max_sweeps=30).fit(weight, metric).error,
        )
        rows.append((name, rank, greedy, als, greedy / als))
    print("\nlayer            rank  deflation  CP-ALS-Σ  ratio")
    for name, rank, greedy, als, ratio in rows:
        print(f"{name:16} {rank:4}  {greedy:9.3f}  {als:8.3f}  {ratio:5.2f}")
    assert len(rows) == 18
    assert all(als < greedy for _, _, greedy, als, _ in rows)

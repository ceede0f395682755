"""Trained weights and real images: what knowing the data is worth."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import tensigma as ts
from tensigma.zoo import Data, load_data, load_model

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="module")
def root() -> Path:
    folder = os.environ.get("TENSIGMA_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("TENSIGMA_DATA does not name a folder with the real models and images")
    return Path(folder) / "cifar10"


def test_resnet20_keeps_its_accuracy_only_where_the_data_is_known(root: Path) -> None:
    model = load_model("zoo:resnet20-cifar", root / "resnet20.safetensors")
    stats = ts.calibrate(model, load_data(f"cifar10:{root}", samples=500))
    test = load_data(f"cifar10:{root}?split=test", samples=1000)
    assert isinstance(test, Data)
    top1: dict[str, float] = {}
    for norm in ("frobenius", "activation", "sigma", "centred"):
        plan = ts.plan(model, stats, method="tucker2", ranks=ts.VBMF(0.5), norm=norm, layers="spatial")
        assert 1.9 < plan.rate < 2.2
        small, _ = ts.compress(model, plan, stats)
        found = ts.evaluate(small, test).top1
        assert found is not None
        top1[norm] = 100 * found
    assert top1["sigma"] >= top1["frobenius"] + 20
    assert top1["sigma"] >= top1["activation"] + 10
    # Two standard errors of a difference of paired answers are about 2 points.
    assert top1["centred"] >= top1["sigma"] - 2


def test_resnet20_in_one_call(root: Path) -> None:
    model = load_model("zoo:resnet20-cifar", root / "resnet20.safetensors")
    data = load_data(f"cifar10:{root}", samples=500)
    small, report = ts.compress(model, data, budget=ts.Params(0.7))
    assert report.after.params <= 0.7 * report.before.params
    result = ts.evaluate(small, load_data(f"cifar10:{root}?split=test", samples=1000), original=model)
    assert result.agreement is not None
    assert result.agreement >= 0.85

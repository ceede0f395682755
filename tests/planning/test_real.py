"""A trained network and real images: a search keeps its promise on others, and errors of ranks and bits add up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import tensigma as ts
from tensigma.zoo import load_data, load_model

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture
def root() -> Path:
    folder = os.environ.get("TENSIGMA_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("TENSIGMA_DATA does not name a folder with the real models and images")
    return Path(folder) / "cifar10"


def test_a_search_keeps_its_promise_on_images_nobody_has_seen(root: Path) -> None:
    model = load_model("zoo:resnet20-cifar", root / "resnet20.safetensors")
    images = [batch[0] for batch in load_data(f"cifar10:{root}?split=train", batch_size=100, samples=1200)]
    calibration, held_out, fresh = images[:4], images[4:8], images[8:]
    stats = ts.calibrate(model, calibration)
    plan = ts.plan(model, stats, budget=ts.Drop(0.1, trials=4), data=held_out, method="tucker2")
    assert plan.rate > 1.2
    assert plan.notes["drop"]["kept"] >= 0.9
    small, _ = ts.compress(model, plan, stats, sequential=False)
    result = ts.evaluate(small, fresh, original=model)
    # Two standard errors of the difference of two samples of 400 are 4 points.
    assert result.agreement is not None
    assert result.agreement >= 0.85
    assert result.certificate is not None
    assert result.certificate.bound < result.agreement


def test_errors_of_ranks_and_of_rounding_add_up(root: Path) -> None:
    """What a plan expects of a layer of few bits is what it gets, to a factor of two in the squared error."""
    model = load_model("zoo:resnet20-cifar", root / "resnet20.safetensors").eval()
    images = [batch[0] for batch in load_data(f"cifar10:{root}?split=train", batch_size=100, samples=100)]
    name = "layer2.1.conv1"
    stats = ts.calibrate(model, images)
    front = ts.plan(model, stats, budget=ts.Bytes(1.0), layers=[name], weights=None).front()
    least = front.trade(ts.Bytes)[0].share
    seen = set()
    for more in (0.002, 0.003, 0.004, 0.006):
        plan = front.plan(ts.Bytes(least + more) & ts.Macs(0.98))
        entry = plan[name]
        _, report = ts.compress(model, plan, stats, sequential=False)
        reached = report[name].error
        assert entry.error is not None
        assert reached is not None
        assert 0.5 < (reached / entry.error) ** 2 < 2, (entry.label, entry.error, reached)
        seen.add(entry.label)
    assert len(seen) > 1

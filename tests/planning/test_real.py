"""A trained network and real images: a search on held-out images keeps its promise on others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import tensigma as ts
from tensigma.zoo import load_data, load_model

pytestmark = [pytest.mark.real, pytest.mark.slow]


def test_a_search_keeps_its_promise_on_images_nobody_has_seen() -> None:
    folder = os.environ.get("TENSIGMA_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("TENSIGMA_DATA does not name a folder with the real models and images")
    root = Path(folder) / "cifar10"
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

"""Architectures as people have them, from calibration to a loaded archive, without special cases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import support_torchvision  # noqa: F401  makes torchvision importable beside a CPU-only torch
import tensigma as ts
from tensigma.zoo import load_model

pytestmark = pytest.mark.slow

# Layers of 4096 outputs take longer than all else together; one of them is enough, the widest of AlexNet.
SKIP = {
    "torchvision:alexnet": ("features.0", "classifier.4"),
    "torchvision:vgg16": ("features.0", "classifier.0", "classifier.3"),
}
# Name, side of the images, and the least number of layers that must have been compressed.
ARCHITECTURES = [
    ("torchvision:resnet18", 64, 19),
    ("torchvision:resnet50", 48, 50),
    ("torchvision:googlenet", 48, 50),
    ("torchvision:alexnet", 64, 6),
    ("torchvision:vgg16", 32, 12),
    ("torchvision:densenet121", 32, 100),
    ("torchvision:mobilenet_v2", 48, 25),
    ("torchvision:efficientnet_b0", 48, 35),
    ("torchvision:convnext_tiny", 48, 35),
    ("timm:resnet26d", 48, 25),
    ("timm:resnext50_32x4d", 48, 30),
    ("timm:regnety_004", 48, 30),
    ("timm:efficientnet_lite0", 48, 25),
    ("timm:tf_efficientnet_b0", 48, 35),
    ("timm:mobilenetv3_small_100", 48, 20),
    ("timm:convnext_atto", 48, 20),
    ("timm:densenet121", 32, 100),
]


@pytest.mark.parametrize(("name", "pixels", "least"), ARCHITECTURES, ids=[name for name, _, _ in ARCHITECTURES])
def test_from_calibration_to_a_loaded_archive(name: str, pixels: int, least: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = load_model(name, num_classes=10)
    images = torch.randn(2, 3, pixels, pixels)
    stats = ts.calibrate(model, [images])
    plan = ts.plan(model, stats, ranks=ts.Ranks({"*": 4}), skip=SKIP.get(name), options={"max_sweeps": 2})
    assert len(plan.compressed) >= least
    assert all(entry.reason for entry in plan.values() if entry.format is None)
    plan.save(tmp_path / "plan.json")
    small, report = ts.compress(model, ts.Plan.load(tmp_path / "plan.json"), stats)
    assert report.after.params == plan.after.params == sum(p.numel() for p in small.parameters())
    assert report.rate > 1.1
    ts.save(small, tmp_path / "small")
    loaded = ts.load(tmp_path / "small", load_model(name, num_classes=10))
    with torch.inference_mode():
        expected, actual = small(images), loaded(images)
    assert actual.shape == (2, 10)
    assert actual.isfinite().all()
    assert torch.equal(actual, expected)
    evaluated = ts.evaluate(small, [images], original=model)
    # Layers that Tensigma cannot read are counted when they run, but not in plans.
    if all(entry.geometry is not None for entry in plan.values()):
        assert evaluated.size.macs == plan.after.macs
    assert all(type(module).__module__.startswith(("torch", "timm")) for module in small.modules())
    assert all(type(small.get_submodule(row.name)) is nn.Sequential for row in report.compressed)

"""Architectures as people have them, from calibration to an archive and an exported file, without special cases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tensigma as ts
from tensigma.running import leaves
from tensigma.zoo import load_model

pytestmark = pytest.mark.slow

# Layers of 4096 outputs take longer than all else together; one of them is enough, the widest of AlexNet.
SKIP = {"torchvision:alexnet": ("features.0", "classifier.4")}
# Name, side of the images, and the least number of layers that must have been compressed. `make zoo` runs all others.
ARCHITECTURES = [
    ("torchvision:resnet18", 64, 19),
    ("torchvision:googlenet", 48, 50),
    ("torchvision:alexnet", 64, 6),
    ("torchvision:squeezenet1_1", 32, 20),
    ("torchvision:mobilenet_v2", 48, 25),
    ("torchvision:shufflenet_v2_x0_5", 32, 25),
    ("torchvision:efficientnet_b0", 48, 35),
    ("torchvision:convnext_tiny", 48, 35),
    ("torchvision:lraspp_mobilenet_v3_large", 32, 25),
    ("timm:resnet26d", 48, 25),
    ("timm:resnext50_32x4d", 48, 30),
    ("timm:regnety_004", 48, 30),
    ("timm:tf_efficientnet_b0", 48, 35),
    ("timm:mobilenetv3_small_100", 48, 20),
    ("timm:convnext_atto", 48, 20),
    ("timm:densenet121", 32, 100),
    ("timm:ghostnet_100", 32, 30),
    ("timm:vit_tiny_patch16_224?img_size=32&depth=2", 32, 8),
    ("timm:mobilevitv2_050", 64, 20),
    ("timm:tinynet_d", 64, 20),
]


@pytest.mark.parametrize(("name", "pixels", "least"), ARCHITECTURES, ids=[name for name, _, _ in ARCHITECTURES])
def test_from_calibration_to_an_exported_file(name: str, pixels: int, least: int, tmp_path: Path) -> None:
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
        expected, actual = (leaves(network(images)) for network in (small, loaded))
    assert {tensor.shape[:2] for tensor in actual.values()} == {(2, 10)}
    for path, tensor in actual.items():
        assert tensor.isfinite().all()
        assert torch.equal(tensor, expected[path])
    # It raises where the file computes something else; `make zoo` writes ONNX files, which take twice as long.
    assert ts.export(loaded, tmp_path / "small.pt2", images, format="torch-export").batches == (1, 3, 5)
    evaluated = ts.evaluate(small, [images], original=model)
    # Layers that Tensigma cannot read are counted when they run, but not in plans.
    if all(entry.geometry is not None for entry in plan.values()):
        assert evaluated.size.macs == plan.after.macs
    assert all(type(module).__module__.startswith(("torch", "timm")) for module in small.modules())
    assert all(type(small.get_submodule(row.name)) is nn.Sequential for row in report.compressed)

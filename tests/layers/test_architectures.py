"""Architectures as people have them: every layer is found, and every layer left alone says why."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tensigma.layers import Layer, SVDFormat, Tucker2Format, find_layers, kernels_of, replace_, to_modules
from tensigma.linalg import Factors, SVDFactors, Tucker2Factors
from tensigma.zoo import load_model

pytestmark = pytest.mark.slow

ARCHITECTURES = [
    "torchvision:resnet18",
    "torchvision:resnet50",
    "torchvision:googlenet",
    "torchvision:alexnet",
    "torchvision:vgg16",
    "torchvision:densenet121",
    "torchvision:mobilenet_v2",
    "torchvision:efficientnet_b0",
    "torchvision:convnext_tiny",
    "timm:resnet26d",
    "timm:resnext50_32x4d",
    "timm:regnety_004",
    "timm:efficientnet_lite0",
    "timm:tf_efficientnet_b0",
    "timm:mobilenetv3_small_100",
    "timm:convnext_atto",
    "timm:densenet121",
]


def exact_factors(layer: Layer) -> list[Factors]:
    """Factors of full rank, so that nothing changes: Tucker-2 where there are taps, SVD elsewhere."""
    assert layer.geometry is not None
    factors: list[Factors] = []
    for kernel in kernels_of(layer.module):
        t, s = kernel.shape[:2]
        if layer.geometry.is_pointwise:
            factors.append(SVDFactors(torch.eye(t, dtype=kernel.dtype), kernel))
        else:
            eyes = torch.eye(t, dtype=kernel.dtype), torch.eye(s, dtype=kernel.dtype)
            factors.append(Tucker2Factors(eyes[0], kernel, eyes[1]))
    return factors


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.inference_mode()
def test_surgery_on_every_layer_changes_nothing(name: str) -> None:
    torch.manual_seed(0)
    model = load_model(name, num_classes=10)
    x = torch.randn(1, 3, 64, 64)
    expected = model(x)
    replacements: dict[str, nn.Module] = {}
    for layer in find_layers(model):
        format = SVDFormat if layer.geometry is not None and layer.geometry.is_pointwise else Tucker2Format
        reason = layer.why_not(format)
        if reason is not None:
            assert "depthwise" in reason or "is a subclass of nn." in reason
            continue
        assert layer.geometry is not None
        bias = layer.module.bias
        assert bias is None or isinstance(bias, Tensor)
        replacements[layer.name] = to_modules(exact_factors(layer), layer.geometry, bias)
    assert len(replacements) >= 5
    replace_(model, replacements)
    actual = model(x)
    assert (actual - expected).abs().max() <= 1e-3 * expected.abs().max()

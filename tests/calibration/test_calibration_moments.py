"""The streaming moments against the naive unfold in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from reference_calibration import naive_moments
from tensigma.calibration.lags import LagSums
from tensigma.calibration.moments import Moments
from tensigma.calibration.window import Window
from tensigma.layers import Geometry

LAYERS = [
    pytest.param(lambda: nn.Conv2d(5, 4, 3, padding=1), (9, 8), id="3x3"),
    pytest.param(lambda: nn.Conv2d(5, 4, 3), (9, 8), id="valid"),
    pytest.param(lambda: nn.Conv2d(5, 4, 3, stride=2, padding=1), (9, 8), id="stride-2"),
    pytest.param(lambda: nn.Conv2d(5, 4, 3, stride=(2, 1), padding=(0, 1)), (9, 8), id="stride-2x1"),
    pytest.param(lambda: nn.Conv2d(5, 4, 3, padding=2, dilation=2), (11, 9), id="dilation-2"),
    pytest.param(lambda: nn.Conv2d(5, 4, 3, padding=1, dilation=2), (11, 9), id="dilation-2-less-padding"),
    pytest.param(lambda: nn.Conv2d(5, 4, (3, 1), padding=(1, 0)), (9, 8), id="3x1"),
    pytest.param(lambda: nn.Conv2d(5, 4, (1, 5), padding=(0, 2)), (9, 12), id="1x5"),
    pytest.param(lambda: nn.Conv2d(3, 4, (5, 3), padding=(3, 1)), (12, 8), id="5x3-overpadded"),
    pytest.param(lambda: nn.Conv2d(3, 4, 5, padding=2), (12, 13), id="5x5"),
    pytest.param(lambda: nn.Conv2d(3, 4, 7, stride=2, padding=3), (16, 15), id="7x7-stride-2"),
    pytest.param(lambda: nn.Conv2d(5, 4, 2, padding="same"), (9, 8), id="2x2-same"),
    pytest.param(lambda: nn.Conv2d(5, 4, 4, padding="same", dilation=(1, 2)), (12, 15), id="4x4-same-dilated"),
    pytest.param(lambda: nn.Conv2d(5, 4, 3, padding="valid"), (9, 8), id="valid-by-name"),
    pytest.param(lambda: nn.Conv2d(5, 4, 3, padding=1, padding_mode="reflect"), (9, 8), id="reflect"),
    pytest.param(lambda: nn.Conv2d(5, 4, 3, padding=1, padding_mode="replicate"), (9, 8), id="replicate"),
    pytest.param(lambda: nn.Conv2d(5, 4, 3, padding=2, padding_mode="circular"), (9, 8), id="circular"),
    pytest.param(
        lambda: nn.Conv2d(5, 4, 3, padding="same", padding_mode="reflect", dilation=2), (9, 8), id="reflect-same"
    ),
    pytest.param(lambda: nn.Conv2d(5, 4, 3, padding=1), (2, 2), id="map-smaller-than-kernel"),
    pytest.param(lambda: nn.Conv2d(5, 4, 3, padding=1), (1, 9), id="map-one-row"),
    pytest.param(lambda: nn.Conv2d(5, 4, 5, padding=4), (1, 1), id="map-one-point"),
    pytest.param(lambda: nn.Conv2d(6, 4, 3, padding=1, groups=2), (9, 8), id="groups"),
    pytest.param(lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6), (9, 8), id="depthwise"),
    pytest.param(lambda: nn.Conv2d(6, 4, 1), (9, 8), id="1x1"),
    pytest.param(lambda: nn.Conv2d(6, 4, 1, stride=2), (9, 8), id="1x1-stride-2"),
    pytest.param(lambda: nn.Conv2d(6, 4, 1, padding=1), (9, 8), id="1x1-padded"),
    pytest.param(lambda: nn.Conv1d(5, 4, 3, padding=1), (20,), id="conv1d"),
    pytest.param(lambda: nn.Conv1d(5, 4, 4, padding=2, stride=3, dilation=2), (20,), id="conv1d-stride-3"),
    pytest.param(lambda: nn.Conv3d(3, 4, 3, padding=1), (5, 6, 4), id="conv3d"),
    pytest.param(lambda: nn.Conv3d(4, 4, (1, 3, 2), stride=(1, 2, 1), groups=2), (5, 6, 4), id="conv3d-grouped"),
    pytest.param(lambda: nn.ConvTranspose2d(6, 4, 3, stride=2), (5, 4), id="transposed"),
    pytest.param(lambda: nn.ConvTranspose1d(6, 4, 4, padding=1, groups=2), (7,), id="transposed-grouped"),
    pytest.param(lambda: nn.Linear(7, 4), None, id="linear"),
]


def window_of(param) -> Window:
    return Window.of(Geometry.of(param.values[0]()))


def make_input(layer: nn.Module, size: tuple[int, ...] | None, n: int, seed: int, offset: float = 0.5) -> Tensor:
    """Correlated, skewed inputs, away from zero, as after a ReLU."""
    generator = torch.Generator().manual_seed(seed)
    geometry = Geometry.of(layer)
    if size is None:
        return torch.randn(n, 3, geometry.in_channels, generator=generator).relu() + offset
    x = torch.randn(n, geometry.in_channels, *size, generator=generator)
    return (x + 0.5 * x.roll(1, 1) + 0.3 * x.roll(1, -1)).relu() + offset


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def gather(layer: nn.Module, inputs: list[Tensor], **options: int) -> Moments:
    moments = Moments(Geometry.of(layer), **options)
    for x in inputs:
        moments.update(x)
    return moments


@pytest.mark.parametrize(("make", "size"), LAYERS)
def test_equals_naive_unfold(make, size):
    layer = make()
    inputs = [make_input(layer, size, n, seed) for seed, n in enumerate([5, 1, 6])]
    stats = gather(layer, inputs).finish()
    count, mean, covariance, gram = naive_moments(layer, inputs)
    assert stats.count == count
    assert stats.mean.shape == mean.shape
    assert stats.covariance.shape == covariance.shape
    assert relative(stats.mean, mean) < 1e-6
    assert relative(stats.covariance, covariance) < 1e-6
    assert relative(stats.gram, gram) < 1e-6


LAG_LAYERS = [param for param in LAYERS if LagSums.applies(window_of(param), param.values[1] or ())]


@pytest.mark.parametrize(("make", "size"), LAG_LAYERS)
def test_lags_equal_naive_unfold(make, size, monkeypatch):
    monkeypatch.setattr("tensigma.calibration.moments.prefers_lags", LagSums.applies)
    test_equals_naive_unfold(make, size)

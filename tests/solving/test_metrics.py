"""Metrics from statistics: the norm of a kernel is what its layer does to the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensigma as ts
from cases import GEOMETRIES, LayerCase
from tensigma.calibration import LayerStats
from tensigma.errors import InputError
from tensigma.layers import Geometry, kernels_of
from tensigma.linalg import Metric, output_spectrum
from tensigma.solving import means, metrics, norm_of
from tensigma.solving.metrics import centred_metrics, gram_metrics


def outputs(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """What the layer puts out without its bias, one row per channel."""
    with torch.no_grad():
        if layer.bias is not None:
            layer.bias.zero_()
        y = layer(x)
    return y.flatten(0, -2).T if isinstance(layer, nn.Linear) else y.transpose(0, 1).flatten(1)


def calibrated(case: LayerCase) -> tuple[Any, torch.Tensor, LayerStats]:
    layer = case.layer()
    x = case.inputs(50) + 0.5
    return layer, outputs(layer, x), ts.calibrate(nn.Sequential(layer), [x])["0"]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("case", GEOMETRIES)
def test_norms_are_the_energy_of_outputs(case: LayerCase) -> None:
    layer, y, stats = calibrated(case)
    geometry = Geometry.of(layer)
    kernels = kernels_of(layer)
    gram = sum(m.norm(k).item() ** 2 for m, k in zip(gram_metrics(geometry, stats), kernels, strict=True))
    metrics = [metric.observed for metric in centred_metrics(geometry, stats)]
    centred = sum(m.norm(k).item() ** 2 for m, k in zip(metrics, kernels, strict=True))
    mu = torch.cat([k.flatten(1) @ m for k, m in zip(kernels, means(geometry, stats), strict=True)])
    # Exact, but for windows of a transposed convolution that overlap: there inputs are taken to be uncorrelated, as
    # these nearly are.
    exact = geometry.kind != "conv_transpose" or all(
        s >= k for s, k in zip(geometry.stride, geometry.kernel_size, strict=True)
    )
    tolerance = 1e-5 if exact else 0.1
    assert gram == pytest.approx(y.square().sum(0).mean().item(), rel=tolerance)
    assert centred == pytest.approx((y - y.mean(1, keepdim=True)).square().sum(0).mean().item(), rel=tolerance)
    torch.testing.assert_close(mu, y.mean(1), rtol=tolerance, atol=tolerance * y.abs().mean().item())


def test_transposed_moments_stay_positive() -> None:
    geometry = Geometry.of(nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1))
    stats = LayerStats.from_rows(torch.randn(100, 3) * 0.01 + 5, input_shape=(3, 4, 4))
    for build in (gram_metrics, centred_metrics):
        values = torch.linalg.eigvalsh(build(geometry, stats)[0].dense().double())
        assert values.min() >= -1e-5 * values.max()


def test_rows_of_wide_layers_serve_as_they_are() -> None:
    rows = torch.randn(20, 50) + 3
    stats = LayerStats(mean=rows.mean(0), rows=rows, count=20)
    layer = nn.Linear(50, 8, bias=False)
    y = (rows @ layer.weight.T).detach()
    geometry, kernel = Geometry.of(layer), layer.weight.detach()
    assert gram_metrics(geometry, stats)[0].norm(kernel).item() ** 2 == pytest.approx(
        y.square().sum(1).mean().item(), rel=1e-4
    )
    assert centred_metrics(geometry, stats)[0].observed.norm(kernel).item() ** 2 == pytest.approx(
        (y - y.mean(0)).square().sum(1).mean().item(), rel=1e-4
    )


def test_of_statistics_in_a_folder_only_the_latest_metrics_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    held = ts.calibrate(model, [torch.randn(20, 8)])
    held.save(tmp_path / "stats")
    stored = ts.Calibration.load(tmp_path / "stats")
    layers = [*held.values(), *stored.values()]
    assert [stats.is_stored for stats in layers] == [False] * 4 + [True] * 4
    one = layers[-1].n_bytes
    assert one == layers[0].covariance.nbytes
    geometry = Geometry.of(model[0])
    monkeypatch.setattr(metrics, "_MOST_BYTES", 2 * one)
    first = [centred_metrics(geometry, stats)[0] for stats in layers]
    kept = [
        centred_metrics(geometry, stats)[0] is metric for stats, metric in zip(layers[::-1], first[::-1], strict=True)
    ]
    # The oldest two were forgotten; those in memory anyway are kept.
    assert kept[::-1] == [True] * 4 + [False] * 2 + [True] * 2
    kernel = torch.randn(3, 8)
    assert all(a.norm(kernel) == b.norm(kernel) for a, b in zip(first[:4], first[4:], strict=True))


def test_statistics_of_another_layer_are_refused() -> None:
    stats = LayerStats.from_rows(torch.randn(10, 4))
    with pytest.raises(InputError, match="got statistics of 1 × 4 features; the layer has 1 × 27"):
        gram_metrics(Geometry.of(nn.Conv2d(3, 4, 3)), stats)
    with pytest.raises(InputError, match="shape of its input"):
        gram_metrics(Geometry.of(nn.ConvTranspose2d(4, 4, 3)), stats)
    for norm in ("sigma", "fisher", "activation"):
        with pytest.raises(InputError, match=r"needs the statistics|hold no"):
            norm_of(norm).targets(Geometry.of(nn.Linear(4, 4)), None)
    for norm in ("fisher", "activation"):
        with pytest.raises(InputError, match="hold no"):
            norm_of(norm).targets(Geometry.of(nn.Linear(4, 4)), stats)


@pytest.mark.parametrize("shape", [(4, 30), (30, 4), (9, 9)], ids=str)
@pytest.mark.parametrize("known", [False, True], ids=["identity", "gram"])
def test_output_spectra_are_squared_singular_values(shape: tuple[int, int], known: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(shape, generator=generator, dtype=torch.float64)
    root = (
        torch.randn(shape[1], shape[1], generator=generator, dtype=torch.float64)
        if known
        else torch.eye(shape[1]).double()
    )
    metric = Metric.from_gram(root @ root.T) if known else Metric.identity(shape[1])
    expected = torch.zeros(shape[0], dtype=torch.float64)
    expected[: min(shape)] = torch.linalg.svdvals(matrix @ root).square()
    torch.testing.assert_close(output_spectrum(matrix, metric), expected, rtol=1e-6, atol=1e-8)

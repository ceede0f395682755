"""How far apart two data sets look to a model, from the statistics of its layers alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tensigma.calibration.layer_stats import LayerStats
from tensigma.calibration.stats import Calibration
from tensigma.errors import InputError


@dataclass(frozen=True, kw_only=True)
class LayerDistance:
    """Distance of two sets of rows, each part between 0 (equal) and 1 (nothing in common).

    ``covariance`` is ‖C₁ − C₂‖ / √(‖C₁‖² + ‖C₂‖²) in the Frobenius norm; ``mean`` is ‖Δμ‖ / √(‖Δμ‖² + tr C₁ + tr C₂),
    the shift of the mean relative to the spread. Neither changes when both sets are scaled alike.
    """

    covariance: float
    mean: float

    @property
    def value(self) -> float:
        """Root mean square of the two parts."""
        return ((self.covariance**2 + self.mean**2) / 2) ** 0.5


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Distances per layer."""

    layers: dict[str, LayerDistance]

    @property
    def total(self) -> float:
        """Root mean square over layers, all weighted equally."""
        return (sum(layer.value**2 for layer in self.layers.values()) / len(self.layers)) ** 0.5


def distance(first: Calibration, second: Calibration) -> Distance:
    """Compare two calibrations of one architecture layer by layer; symmetric, needs no labels.

    >>> u = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    >>> near = Calibration({"fc": LayerStats.from_rows(u)})
    >>> far = Calibration({"fc": LayerStats.from_rows(u * torch.tensor([3.0, 1.0, 1.0, 0.1]))})
    >>> distance(near, near).total, round(distance(near, far).total, 2)
    (0.0, 0.61)
    """
    shared = [name for name in first if name in second]
    if not shared:
        raise InputError("the two calibrations share no layer, so there is nothing to compare")
    return Distance(layers={name: _layer_distance(first[name], second[name]) for name in shared})


def _layer_distance(first: LayerStats, second: LayerStats) -> LayerDistance:
    if first.mean.shape != second.mean.shape:
        shapes = f"{tuple(first.mean.shape)} and {tuple(second.mean.shape)}"
        raise InputError(f"the two calibrations are of different layers: their means have shapes {shapes}")
    norms = _inner(first, first) + _inner(second, second)
    apart = max(0.0, norms - 2 * _inner(first, second))
    # Below this the difference is only rounding of the stored covariances.
    apart = apart if apart > 1e-13 * norms else 0.0
    shift = (first.mean.double() - second.mean.double().to(first.mean.device)).square().sum().item()
    spread = shift + _trace(first) + _trace(second)
    return LayerDistance(
        covariance=(apart / norms) ** 0.5 if norms > 0 else 0.0, mean=(shift / spread) ** 0.5 if spread > 0 else 0.0
    )


def _inner(first: LayerStats, second: LayerStats) -> float:
    """tr(C₁ C₂)."""
    if first.rows is not None and second.rows is not None:
        # ‖X₁X₂ᵀ‖² / (n₁n₂) with centred rows, without a matrix as wide as the layer.
        left = (first.rows - first.mean).double()
        right = (second.rows - second.mean).double()
        return ((left @ right.T.to(left.device)).square().sum() / (len(left) * len(right))).item()
    left, right = first.covariance.flatten(), second.covariance.flatten()
    steps = range(0, len(left), 2**22)
    return sum(
        torch.dot(left[i : i + 2**22].double(), right[i : i + 2**22].double().to(left.device)).item() for i in steps
    )


def _trace(stats: LayerStats) -> float:
    if stats.rows is not None:
        return (stats.rows - stats.mean).double().square().sum().item() / len(stats.rows)
    return stats.covariance.diagonal(dim1=-2, dim2=-1).double().sum().item()

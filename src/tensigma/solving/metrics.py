"""Metrics of a layer from its statistics: one per group, in the order of the kernel's features."""

from __future__ import annotations

import math
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tensigma.calibration import LayerStats
from tensigma.errors import InputError
from tensigma.layers import Geometry
from tensigma.linalg import Metric
from tensigma.solving.shrinkage import shrunk

# Checking and damping a wide gram takes seconds. These metrics share the memory of the statistics they belong to, or
# are all that is in memory of statistics in a folder: of those, only the latest are kept, up to so many bytes.
_centred: WeakKeyDictionary[LayerStats, tuple[Metric, ...]] = WeakKeyDictionary()
_MOST_BYTES = 2 * 10**9
_lock = Lock()


def identity_metrics(geometry: Geometry) -> tuple[Metric, ...]:
    """The Frobenius norm of the weights."""
    return (Metric.identity(geometry.patch_size),) * geometry.groups


def gram_metrics(geometry: Geometry, stats: LayerStats) -> tuple[Metric, ...]:
    """Σ = E[u uᵀ]: the mean squared output.

    >>> from torch import nn
    >>> stats = LayerStats.from_rows(torch.randn(50, 4), input_shape=(4, 5, 5))
    >>> gram_metrics(Geometry.of(nn.ConvTranspose2d(4, 6, 2, stride=2)), stats)[0].size
    16
    """
    _check_width(geometry, stats)
    if stats.rows is not None:
        return (Metric.from_rows(stats.rows),)
    if geometry.kind == "conv_transpose":
        return _from_grams(_Scattered(geometry, stats).gram())
    return _from_grams(_by_group(stats.gram, geometry))


def centred_metrics(geometry: Geometry, stats: LayerStats) -> tuple[Metric, ...]:
    """Σ_c = E[(u − μ)(u − μ)ᵀ]: the variance of the output, which is what remains if the bias may move.

    Moments of few rows are drawn towards their diagonal.
    """
    _check_width(geometry, stats)
    if geometry.kind == "conv_transpose":
        return _from_grams(_Scattered(geometry, stats).covariance())
    metrics = _centred.get(stats)
    if metrics is None:
        if stats.rows is not None:
            metrics = (Metric.from_rows(stats.rows, stats.mean),)
        else:
            metrics = _from_grams(_by_group(stats.covariance, geometry))
        metrics = tuple(shrunk(metric, geometry, stats) for metric in metrics)
        with _lock:
            _centred[stats] = metrics
            _forget_oldest()
    return metrics


def _forget_oldest() -> None:
    """Keep no more of the metrics whose statistics lie in a folder than are allowed, and at least the latest."""
    stored = [stats for stats in _centred if stats.is_stored]
    total = sum(stats.n_bytes for stats in stored)
    for stats in stored[:-1]:
        if total <= _MOST_BYTES:
            break
        del _centred[stats]
        total -= stats.n_bytes


def means(geometry: Geometry, stats: LayerStats) -> Tensor:
    """μ = E[u], (groups, d)."""
    _check_width(geometry, stats)
    if geometry.kind == "conv_transpose":
        return _Scattered(geometry, stats).mean()
    return stats.mean.reshape(geometry.groups, -1)


#: Moments beyond this power of two, or below its inverse, are brought near 1, so that their products stay numbers.
_MODERATE = 60


def _from_grams(grams: Tensor) -> tuple[Metric, ...]:
    """One metric per group. Only ratios of norms matter, so extreme moments are scaled, all groups alike."""
    largest = grams.diagonal(dim1=-2, dim2=-1).max().item()
    if largest < torch.finfo(grams.dtype).tiny / torch.finfo(grams.dtype).eps:
        return tuple(map(Metric.from_gram, torch.zeros_like(grams)))  # too few digits are left to tell anything
    if 0 < largest < math.inf and abs(math.log2(largest)) > _MODERATE:
        # In two steps, because the factor itself may lie outside the range of the numbers.
        half = -math.floor(math.log2(largest)) // 2
        grams = torch.ldexp(torch.ldexp(grams, torch.tensor(half)), torch.tensor(half))
    return tuple(map(Metric.from_gram, grams))


def _by_group(moment: Tensor, geometry: Geometry) -> Tensor:
    return moment.reshape(geometry.groups, geometry.patch_size, geometry.patch_size)


def _check_width(geometry: Geometry, stats: LayerStats) -> None:
    channels = geometry.in_channels // geometry.groups
    expected = channels if geometry.kind == "conv_transpose" else geometry.patch_size
    if (stats.groups, stats.d) != (geometry.groups, expected):
        raise InputError(
            f"got statistics of {stats.groups} × {stats.d} features; the layer has {geometry.groups} × {expected}"
        )


class _Scattered:
    """Moments of what an output position of a transposed convolution sees, from those of the channels at its input.

    u[channel, tap] is the input that reaches the output through that tap, or 0 where the stride skips it. Which taps
    meet at an output is geometry and known exactly (w: the share of outputs that a tap reaches, P: that two taps
    reach together); inputs of different positions are taken to be uncorrelated but for their mean, which is exact
    where windows do not overlap. So E[u uᵀ] = Cov(x) ⊗ diag(w) + μμᵀ ⊗ P, which is positive semi-definite.
    """

    def __init__(self, geometry: Geometry, stats: LayerStats) -> None:
        if len(stats.input_shape) != geometry.n_spatial + 1:
            raise InputError("statistics of a transposed convolution need the shape of its input; calibrate again")
        self.geometry = geometry
        channels = geometry.in_channels // geometry.groups
        self.cov_x = stats.covariance.reshape(geometry.groups, channels, channels)
        self.mean_x = stats.mean.reshape(geometry.groups, channels).to(self.cov_x)
        together = torch.ones(1, 1)
        sizes = zip(stats.input_shape[1:], geometry.output_size(stats.input_shape[1:]), strict=True)
        for axis, (n_in, n_out) in enumerate(sizes):
            together = torch.kron(together, self._axis(axis, n_in, n_out))
        self.together = together.to(self.cov_x)  # P, (k, k)
        self.reach = self.together.diagonal()  # w, (k)

    def _axis(self, axis: int, n_in: int, n_out: int) -> Tensor:
        """The share of outputs along one axis that each pair of taps reaches together."""
        g = self.geometry
        taps = torch.arange(g.kernel_size[axis]) * g.dilation[axis]
        landing = torch.arange(n_in)[:, None] * g.stride[axis] - g.pads[axis][0] + taps  # (n_in, k)
        hits = (torch.arange(n_out)[:, None, None] == landing).any(1).float()  # (n_out, k)
        return hits.T @ hits / n_out

    def covariance(self) -> Tensor:
        spread = self.together - torch.outer(self.reach, self.reach)
        return self._moment(spread)

    def gram(self) -> Tensor:
        return self._moment(self.together)

    def mean(self) -> Tensor:
        return (self.mean_x[:, :, None] * self.reach).flatten(1)

    def _moment(self, taps: Tensor) -> Tensor:
        outer = self.mean_x[:, :, None] * self.mean_x[:, None, :]
        diagonal = torch.diag(self.reach)
        return torch.stack(
            [torch.kron(c, diagonal) + torch.kron(m, taps) for c, m in zip(self.cov_x, outer, strict=True)]
        )

"""Ranges of activations for INT8: what every tensor reaches on samples, and where to clip it.

Eight bits cover a range in 255 steps. Clipping a few large values makes the steps finer for all others. Several rules
say where to clip; each gives one range for every tensor, all from one pass over the samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tensigma.graphs import onnx_module, session_of

RangeRule = Literal["minmax", "mse", "p99.999", "p99.99", "p99.9"]
#: No clipping, the least mean square error of each tensor, or the middle share of its values in per cent.
RULES: tuple[RangeRule, ...] = ("minmax", "mse", "p99.999", "p99.99", "p99.9")
Ranges = Mapping[str, tuple[float, float]]
_BINS = 4096  # an even number; half of them for each sign
_STEPS = 255
#: Ends of a range that are tried, from the largest value down.
_ENDS = 64
#: Values of a tensor that are counted in each run; minimum and maximum are those of all.
_COUNTED = 2**17


class Histogram:
    """The values of a tensor: how many lie in each of many equal bins around 0, and the smallest and largest.

    Bins are doubled in width when larger values come.

    >>> histogram = Histogram()
    >>> histogram.add(torch.linspace(-1, 3, 100_000))
    >>> histogram.add(torch.linspace(0, 3, 100_000))
    >>> low, high = histogram.clipped("p99.9")
    >>> histogram.clipped("minmax"), -1 < low < -0.9, 2.9 < high <= 3
    ((-1.0, 3.0), True, True)
    """

    def __init__(self) -> None:
        self.low = self.high = 0.0
        self._reach = 0.0
        self._counts = np.zeros(_BINS)
        self._n_zeros = 0.0

    def add(self, values: Tensor) -> None:
        """Count more values; what is not a finite number is left out."""
        flat = values.flatten()
        if not bool(flat.isfinite().all()):
            flat = flat[flat.isfinite()]
        if not flat.numel():
            return
        low, high = (float(end) for end in flat.aminmax())
        self.low, self.high = min(self.low, low), max(self.high, high)
        largest = max(-low, high)
        if largest == 0:
            self._n_zeros += flat.numel()
            self._counts[_BINS // 2] += flat.numel()
            return
        self._widen(largest)
        counted = flat[:: -(-flat.numel() // _COUNTED)].float()
        share = flat.numel() / counted.numel()
        counts = torch.histc(counted, _BINS, -self._reach, self._reach)
        self._counts += share * counts.double().numpy()
        self._n_zeros += share * float((counted == 0).sum())

    def _widen(self, largest: float) -> None:
        if not self._reach:
            self._reach = 2.0 ** math.ceil(math.log2(largest))
        while self._reach < largest:
            inner = self._counts.reshape(-1, 2).sum(1)
            self._counts = np.pad(inner, _BINS // 4)
            self._reach *= 2

    @property
    def _middles(self) -> np.ndarray:
        return (np.arange(_BINS) + 0.5 - _BINS / 2) * (2 * self._reach / _BINS)

    def clipped(self, rule: RangeRule) -> tuple[float, float]:
        """The range by a rule. It includes 0, and never exceeds the smallest and largest value."""
        if rule == "minmax" or not self._reach:
            return self.low, self.high
        if rule == "mse":
            return self._least_error()
        tail = (1 - float(rule.removeprefix("p")) / 100) / 2
        below = np.cumsum(self._counts) / self._counts.sum()
        width = 2 * self._reach / _BINS
        first, last = int(np.searchsorted(below, tail)), int(np.searchsorted(below, 1 - tail))
        ends = (first - _BINS / 2) * width, (last + 1 - _BINS / 2) * width
        return max(self.low, min(ends[0], 0.0)), min(self.high, max(ends[1], 0.0))

    def _least_error(self) -> tuple[float, float]:
        """The ends that lose least: the noise of rounding, step² ÷ 12 for all but zeros, and what is cut off."""
        values, counts = self._middles, self._counts
        shares = np.arange(1, _ENDS + 1) / _ENDS
        highs, lows = shares * self.high, shares * self.low
        # Cut off at h: Σ (x − h)² over x > h, from sums over the bins beyond h.
        cut_above = _cut(values, counts, highs)
        cut_below = _cut(-values[::-1], counts[::-1], -lows)
        n_rounded = max(float(counts.sum()) - self._n_zeros, 0.0)
        steps = (highs[None, :] - lows[:, None]) / _STEPS
        loss = n_rounded * steps**2 / 12 + cut_above[None, :] + cut_below[:, None]
        low, high = np.unravel_index(int(loss.argmin()), loss.shape)
        return float(lows[low]), float(highs[high])


def _cut(values: np.ndarray, counts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Σ counts · (value − end)² over all values beyond each end; ``values`` ascend."""
    # moments[i] are sums over the bins from i on.
    zeroth, first, second = (np.append(np.cumsum((counts * values**k)[::-1])[::-1], 0.0) for k in range(3))
    start = np.searchsorted(values, ends, side="right")
    return np.maximum(second[start] - 2 * ends * first[start] + ends**2 * zeroth[start], 0.0)


def histograms_of(proto: Any, feeds: Iterable[Mapping[str, np.ndarray]]) -> dict[str, Histogram]:
    """The values of all floating-point tensors of a model, weights apart, for inputs given as ``feeds``."""
    onnx = onnx_module("onnx")
    watched = onnx.ModelProto()
    watched.CopyFrom(proto)
    graph = watched.graph
    stored = {tensor.name for tensor in graph.initializer}
    single = [
        value.name
        for value in (*graph.value_info, *graph.output, *graph.input)
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT and value.name not in stored
    ]
    names = list(dict.fromkeys(single))
    given = {value.name for value in graph.input}
    computed = [name for name in names if name not in given]
    del graph.output[:]
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in computed)
    session = session_of(watched.SerializeToString())
    histograms = {name: Histogram() for name in names}
    for feed in feeds:
        results = dict(zip(computed, session.run(computed, dict(feed)), strict=True))
        for name, histogram in histograms.items():
            histogram.add(torch.from_numpy(np.asarray(results.get(name, feed.get(name)))))
    return histograms


def ranges_by(rule: RangeRule, histograms: Mapping[str, Histogram]) -> Ranges:
    """The range of every tensor by one rule."""
    return {name: histogram.clipped(rule) for name, histogram in histograms.items()}

"""The cost and error of each way to treat a layer: the curves by which a budget is shared out.

Where a budget counts bytes, options with weights of few bits are added. The errors of cutting ranks and of rounding add
up as squares. What rounding adds is measured, not derived: for every layer with its kernel as it is, and for one layer
of every shape with two sets of ranks of every method, at 4 bits and at fewer if they are allowed. Between measured
ranks it is interpolated; every bit beyond the fourth divides it by four.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tensigma.layers import HALF, Cost, CPFormat
from tensigma.linalg import Factors, Metric, RankTuple
from tensigma.solving import DENSE_METHOD, Candidate, Method, energy_views, rounding_error, shrunk, side_by_side

#: The unit of cost.
Measure = Literal["params", "macs", "bytes", "seconds"]
# The largest squared error that counts, so that the loss stays finite: a layer cannot lose more than everything.
_MOST = 1 - 1e-9
# Bits at which errors are measured; those of more bits follow.
_MEASURED = 4
# Ranks that are measured, as shares of the parameters of the dense layer.
_SHARES = (0.25, 0.75)
# Rows of a wide kernel that tell its error.
_ROWS = 32
# Few steps of a solver: what rounding adds hardly depends on the last per cent.
_ROUGH = {"max_sweeps": 4, "tol": 1e-2}
# Except in CP, whose terms come to cancel each other as it converges, which few bits cannot follow. Rank 117 of a
# 64×64×3×3 kernel: squared error 0.028, and 0.059 more by 4 bits; stopped after 20 sweeps 0.037, and 0.022 more.
_EARLY = {"max_sweeps": 20, "tol": 1e-3}
_FEW = 8
# Shares of parameters, what rounding adds to the squared error there, and by which factor fewer bits add more.
_Points = tuple[list[float], list[float], dict[int, float]]


@dataclass(frozen=True)
class Option:
    """One way to treat a layer: a method with its ranks and bits, or none of them for the layer as it is."""

    method: Method | None
    ranks: RankTuple | None
    cost: Cost
    #: Expected squared relative error under the norm of the plan.
    error2: float
    #: Measured time; None if it was not measured.
    seconds: float | None = None
    #: Bits of the weights; None for float32.
    bits: int | None = None

    @property
    def error(self) -> float:
        return math.sqrt(self.error2)

    @property
    def loss(self) -> float:
        """The loss by which a budget is shared out: −log of the share of the output's energy that the layer keeps.

        For small errors it is the squared error. Large ones count more, because what layers keep multiplies.

        >>> [round(Option(None, None, Cost(1, 1), error2).loss, 3) for error2 in (0.0, 0.01, 0.5)]
        [0.0, 0.01, 0.693]
        """
        return -math.log1p(-min(self.error2, _MOST))

    def price(self, measure: Measure) -> float:
        """The cost of the option by this measure; a whole number except for seconds."""
        if measure == "seconds":
            assert self.seconds is not None
            return self.seconds
        price: int = getattr(self.cost, measure)
        return price


def early_stop(method: Method, bits: int | None) -> dict[str, Any]:
    """Options of a solver whose factors will be rounded to ``bits`` bits, where these ask for other than the usual.

    >>> from tensigma.solving import method_of
    >>> early_stop(method_of("cp-joint"), 4)["max_sweeps"], early_stop(method_of("cp"), 8)
    (20, {})
    """
    if bits is None or bits >= _FEW or not issubclass(method.format_type, CPFormat):
        return {}
    return {key: value for key, value in _EARLY.items() if key in method.options}


def curve(layer: Candidate) -> list[Option]:
    """Every option worth having for a layer, the dense layer included."""
    dense = layer.cost(None)
    options = [Option(None, None, dense, 0.0)]
    views = energy_views(layer.kernels, layer.norm.targets(layer.geometry, layer.stats))
    shares = [metric.norm(kernel).item() ** 2 for kernel, metric in views]
    total = sum(shares)
    for method in layer.choices:
        curves = [method.errors(kernel, metric) for kernel, metric in views]
        # The groups of a layer share their ranks; their losses add up, weighted by energy.
        for points in zip(*curves, strict=True):
            ranks = points[0][0]
            lost = sum(share * error2 for share, (_, error2) in zip(shares, points, strict=True))
            price = layer.cost_in(method.format(ranks))
            if price.params < dense.params or price.macs < dense.macs:
                error2 = lost / total if total > 0 else 0.0
                options.append(Option(method, ranks, price, error2))
    return options


def pareto(options: Sequence[Option], measure: Measure) -> list[Option]:
    """The options that no other beats in both cost and error, by rising cost.

    >>> cheap, poor, dear = (Option(None, None, Cost(n, 0), e) for n, e in ((5, 0.2), (7, 0.3), (9, 0.0)))
    >>> [option.cost.params for option in pareto([dear, poor, cheap], "params")]
    [5, 9]
    """
    best: list[Option] = []
    for option in sorted(options, key=lambda option: (option.price(measure), option.error2)):
        if not best or option.error2 < best[-1].error2:
            best.append(option)
    return best


def hull(front: Sequence[Option], measure: Measure) -> list[Option]:
    """The lower convex hull of a Pareto front: options that are best for some exchange rate of cost and loss."""
    corners: list[Option] = []
    for option in front:
        while len(corners) > 1 and _gain(corners[-2], option, measure) >= _gain(corners[-2], corners[-1], measure):
            corners.pop()
        corners.append(option)
    return corners


def _gain(cheaper: Option, dearer: Option, measure: Measure) -> float:
    """Loss saved per unit of cost by moving from one option to a more expensive one."""
    return (cheaper.loss - dearer.loss) / (dearer.price(measure) - cheaper.price(measure))


class BitCurves:
    """What rounding adds to the errors of the options of layers; measured when it is first asked for."""

    def __init__(self, layers: Sequence[Candidate], curves: Mapping[str, Sequence[Option]]) -> None:
        self._layers = {layer.name: layer for layer in layers}
        self._curves = curves
        self._dense: dict[tuple[str, int], float] = {}
        self._points: dict[tuple[object, str], _Points] = {}

    def with_bits(self, curves: Mapping[str, Sequence[Option]], bits: Sequence[int]) -> dict[str, list[Option]]:
        """``curves`` with every option also at these bits. None takes more multiply-adds than the dense layer."""
        # Layers of one shape share what was measured, so shapes are measured first, each once.
        few = [number for number in bits if number < _MEASURED]
        shapes: dict[object, Candidate] = {}
        for layer in self._layers.values():
            shapes.setdefault(_shape(layer), layer)
        missing = [layer for shape, layer in shapes.items() if not self._knows(shape, layer, few)]

        def done(layer: Candidate, points: dict[str, _Points]) -> None:
            for method, measured in points.items():
                self._points[_shape(layer), method] = measured

        side_by_side(missing, lambda layer: self._measure(layer, few), geometry=lambda layer: layer.geometry, done=done)
        return {name: self._options(self._layers[name], options, bits) for name, options in curves.items()}

    def _knows(self, shape: object, layer: Candidate, few: Sequence[int]) -> bool:
        return all(
            (shape, method.name) in self._points
            and all(number in self._points[shape, method.name][2] for number in few)
            for method in _methods(self._curves[layer.name])
        )

    def _options(self, layer: Candidate, options: Sequence[Option], bits: Sequence[int]) -> list[Option]:
        dense = options[0]
        grown = [option for option in options if option.cost.macs <= dense.cost.macs]
        allowed = [number for number in bits if number >= layer.least_bits]
        for option in grown[1:]:
            assert option.method is not None
            assert option.ranks is not None
            format = option.method.format(option.ranks)
            share = option.cost.params / dense.cost.params
            for number in allowed:
                added = self._added(layer, option.method, share, number)
                cost = layer.cost_in(format, number)
                grown.append(replace(option, cost=cost, error2=min(option.error2 + added, 1.0), bits=number))
        if DENSE_METHOD.why_not(layer.geometry, layer.norm) is None:
            for number in allowed:
                cost = layer.cost_in(DENSE_METHOD.format(()), number)
                lost = min(self._of_dense(layer, number), 1.0)
                seconds = dense.seconds
                grown.append(Option(DENSE_METHOD, (), cost, lost, seconds=seconds, bits=number))
        return grown

    def _of_dense(self, layer: Candidate, bits: int) -> float:
        if bits == HALF:
            return 0.0
        if bits > _MEASURED:
            return self._of_dense(layer, _MEASURED) * 4.0 ** (_MEASURED - bits)
        if (layer.name, bits) not in self._dense:
            kernel, metric = _view(layer)
            rows = torch.arange(0, len(kernel), max(1, len(kernel) // _ROWS))
            self._dense[layer.name, bits] = rounding_error(kernel[rows], None, metric, bits) ** 2
        return self._dense[layer.name, bits]

    def _added(self, layer: Candidate, method: Method, share: float, bits: int) -> float:
        if bits == HALF:
            return 0.0
        shares, errors, ratios = self._points[_shape(layer), method.name]
        added = float(np.interp(share, [0.0, *shares], [0.0, *errors]))
        return added * (ratios[bits] if bits < _MEASURED else 4.0 ** (_MEASURED - bits))

    def _measure(self, layer: Candidate, few: Sequence[int]) -> dict[str, _Points]:
        """Method → what rounding adds at some shares of the parameters, and how much more fewer bits add."""
        measured: dict[str, _Points] = {}
        kernel, metric = _view(layer)
        dense = self._curves[layer.name][0].cost.params
        for method in _methods(self._curves[layer.name]):
            options = [option for option in self._curves[layer.name] if option.method == method]
            picked = {_nearest(options, share * dense).ranks: _nearest(options, share * dense) for share in _SHARES}
            points: list[tuple[float, float]] = []
            ratios: dict[int, float] = {}
            for option in sorted(picked.values(), key=lambda option: option.cost.params):
                assert option.ranks is not None
                rough = {key: value for key, value in _ROUGH.items() if key in method.options}
                options_here = {**rough, **early_stop(method, _MEASURED), **_seed(layer, method)}
                fit = method.fit(kernel, option.ranks, metric, options_here)
                added = _added(fit.factors, method, kernel, metric, _MEASURED)
                points.append((option.cost.params / dense, added))
                ratios = {
                    number: max(1.0, _added(fit.factors, method, kernel, metric, number) / max(added, 1e-9))
                    for number in few
                }
            measured[method.name] = ([x for x, _ in points], [y for _, y in points], ratios)
        return measured


def _added(factors: Factors, method: Method, kernel: Tensor, metric: Metric, bits: int) -> float:
    """What rounding adds to the squared relative error of factors; never nothing, since it may fit them better too."""
    before = metric.relative_error(kernel, factors.to_dense()) ** 2
    stages = method.format_type.kernels(factors)
    return max(rounding_error(kernel, stages, metric, bits) ** 2 - before, 4.0**-bits / 100)


def _seed(layer: Candidate, method: Method) -> dict[str, int]:
    return {key: value for key, value in layer.options.items() if key == "seed" and key in method.options}


def _nearest(options: Sequence[Option], params: float) -> Option:
    return min(options, key=lambda option: abs(option.cost.params - params))


def _methods(options: Sequence[Option]) -> list[Method]:
    return list(dict.fromkeys(option.method for option in options if option.method is not None))


def _shape(layer: Candidate) -> object:
    return (layer.geometry, layer.norm.name)


def _view(layer: Candidate) -> tuple[Tensor, Metric]:
    """The kernel of the first group and the metric under which it is rounded."""
    targets = layer.norm.targets(layer.geometry, layer.stats)
    kernel, metric = energy_views(layer.kernels, targets)[0]
    if isinstance(targets[0], Metric) and layer.stats is not None:
        metric = shrunk(metric, layer.geometry, layer.stats)
    return kernel, metric.to(kernel)

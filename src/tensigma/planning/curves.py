"""The cost and error of each way to treat a layer: the curves by which a budget is shared out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tensigma.layers import Cost
from tensigma.linalg import RankTuple
from tensigma.solving import Candidate, Method, energy_views

#: The unit of cost.
Measure = Literal["params", "macs", "bytes", "seconds"]
# The largest squared error that counts, so that the loss stays finite: a layer cannot lose more than everything.
_MOST = 1 - 1e-9


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

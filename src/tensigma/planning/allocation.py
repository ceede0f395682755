"""Sharing out a budget: the trade-off between cost and error of several layers, from the curve of each.

The loss that is shared out is the sum of the losses of all layers, −log(1 − e²) with e the relative error, each with
its weight, 1 by default. Going along the convex hulls of the layers' curves, steepest step first, visits every
Lagrangian optimum in turn; what is left of a budget after the last step that fits is spent on options between the
corners.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise

from tensigma.planning.curves import Measure, Option, hull, pareto


class Allocation:
    """The choices among the options of several layers, for one measure of cost."""

    def __init__(
        self, curves: Mapping[str, Sequence[Option]], measure: Measure, weights: Mapping[str, float] | None = None
    ) -> None:
        self.measure = measure
        #: How much the loss of a layer counts; 1 for those that are not named.
        self.weights = weights or {}
        self._fronts = {name: pareto(options, measure) for name, options in curves.items()}

    @property
    def cheapest(self) -> float:
        """The lowest cost of all layers together."""
        return sum(self._price(front[0]) for front in self._fronts.values())

    @cached_property
    def _steps(self) -> list[tuple[str, Option]]:
        """Moves to the next corner of some layer's hull, steepest first."""
        steps = []
        for name, front in self._fronts.items():
            for before, after in pairwise(hull(front, self.measure)):
                saved = self._saved(name, before, after)
                steps.append((saved / (self._price(after) - self._price(before)), name, after))
        # Hulls are convex, so the steps of one layer stay in order.
        return [(name, option) for _, name, option in sorted(steps, key=lambda step: -step[0])]

    @cached_property
    def corners(self) -> list[tuple[float, float]]:
        """(cost, root mean square error) of every Lagrangian optimum, from the cheapest to the one without any loss."""
        chosen = {name: front[0] for name, front in self._fronts.items()}
        corners = [self._corner(chosen)]
        for name, option in self._steps:
            chosen[name] = option
            corners.append(self._corner(chosen))
        return corners

    def choose(self, limit: float) -> dict[str, Option]:
        """The best option of every layer so that together they cost at most ``limit``, which must be reachable."""
        chosen = {name: front[0] for name, front in self._fronts.items()}
        spent = self.cheapest
        stuck: set[str] = set()
        for name, option in self._steps:
            extra = self._price(option) - self._price(chosen[name])
            if name in stuck or spent + extra > limit:
                stuck.add(name)
                continue
            chosen[name] = option
            spent += extra
        return self._fill(chosen, limit - spent)

    def _fill(self, chosen: dict[str, Option], left: float) -> dict[str, Option]:
        """Spend what is left on the improvements that fit, best value first."""
        while True:
            best: tuple[float, str, Option] | None = None
            for name, front in self._fronts.items():
                now = chosen[name]
                for option in front:
                    extra = self._price(option) - self._price(now)
                    if not 0 < extra <= left:
                        continue
                    value = self._saved(name, now, option) / extra
                    if value > (best[0] if best else 0):
                        best = (value, name, option)
            if best is None:
                return chosen
            _, name, option = best
            left -= self._price(option) - self._price(chosen[name])
            chosen[name] = option

    def _saved(self, name: str, before: Option, after: Option) -> float:
        return self.weights.get(name, 1.0) * (before.loss - after.loss)

    def _price(self, option: Option) -> float:
        return option.price(self.measure)

    def _corner(self, chosen: Mapping[str, Option]) -> tuple[float, float]:
        mean = sum(option.error2 for option in chosen.values()) / max(len(chosen), 1)
        return sum(self._price(option) for option in chosen.values()), math.sqrt(mean)

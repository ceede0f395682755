"""All budgets at once: the trade between cost and error of the whole model, from the curves of its layers.

The loss that is shared out is the sum of the losses of all layers, −log(1 − e²) with e the relative error, each with
its weight, which is 1 unless asked for otherwise. Going along the convex hulls of the layers' curves, steepest step
first, visits every Lagrangian optimum in turn; what a budget has left over after the last step that fits is spent on
options between the corners.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from tensigma.planning.curves import Measure, Option, hull, pareto


@dataclass(frozen=True)
class FrontPoint:
    """One point of the trade: the cost of the layers that may be compressed, and the error they have together."""

    cost: float
    #: Root of the mean squared relative error of the layers.
    error: float


class Front:
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
        """What the layers cost at least."""
        return sum(self._price(front[0]) for front in self._fronts.values())

    @cached_property
    def _steps(self) -> list[tuple[str, Option]]:
        """Moves to the next corner of some layer's hull, steepest first."""
        steps = []
        for name, front in self._fronts.items():
            corners = hull(front, self.measure)
            for before, after in pairwise(corners):
                saved = self._saved(name, before, after)
                steps.append((saved / (self._price(after) - self._price(before)), name, after))
        # Hulls are convex, so the steps of one layer come in their own order.
        return [(name, option) for _, name, option in sorted(steps, key=lambda step: -step[0])]

    @cached_property
    def points(self) -> list[FrontPoint]:
        """The whole front, from the cheapest choice to the one without any loss."""
        chosen = {name: front[0] for name, front in self._fronts.items()}
        points = [self._point(chosen)]
        for name, option in self._steps:
            chosen[name] = option
            points.append(self._point(chosen))
        return points

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

    def _point(self, chosen: Mapping[str, Option]) -> FrontPoint:
        loss = sum(option.error2 for option in chosen.values()) / max(len(chosen), 1)
        return FrontPoint(sum(self._price(option) for option in chosen.values()), math.sqrt(loss))

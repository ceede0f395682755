"""Sharing out a budget: the trade-off between cost and error of several layers, from the curve of each.

The loss that is shared out is the sum of the losses of all layers, −log(1 − e²) with e the relative error, each with
its weight, 1 by default. Going along the convex hulls of the layers' curves, steepest step first, visits every
Lagrangian optimum in turn; what is left of a budget after the last step that fits is spent on options between the
corners. That is far from the best where a step of one layer is a large part of the budget: a wide layer that saves
nothing before it loses much, such as a classifier. So the budget is also divided into cells and shared out exactly, by
dynamic programming over the layers, and the better of the two is taken.

Several limits each get a price, a Lagrange multiplier; each layer takes the option with the lowest loss plus price of
its costs. A price rises until its limit is kept, the prices after it being found anew each time. What is left within
all limits is again spent on single improvements, best value first. With two limits, each is also shared out exactly
while the other has a price.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tensigma.planning.curves import Measure, Option, hull, pareto

Numbers = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
# Halvings of the range of a price: with one price within another, as many passes as the product.
_HALVINGS = 24
# The same where every pass is a dynamic program.
_FEWER_HALVINGS = 16
_LOWEST, _HIGHEST = 1e-7, 1e9
# Costs are sums of floating-point numbers.
_SLACK = 1 + 1e-9
# Cells of a budget for each layer, and at least in all.
_CELLS_PER_LAYER, _FEWEST_CELLS = 32, 2048


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
        return min(self._by_hulls(limit), self._by_cells(limit), key=self._loss)

    def _by_hulls(self, limit: float) -> dict[str, Option]:
        """Along the hulls, as far as ``limit`` allows, and then option by option."""
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

    def _by_cells(self, limit: float) -> dict[str, Option]:
        """By dynamic programming, and what that leaves option by option."""
        fronts = self._fronts
        costs = [np.array([self._price(option) for option in front]) for front in fronts.values()]
        losses = [
            np.array([self.weights.get(name, 1.0) * option.loss for option in front]) for name, front in fronts.items()
        ]
        indices = least_loss(costs, losses, limit)
        chosen = {name: front[index] for (name, front), index in zip(fronts.items(), indices, strict=True)}
        return self._fill(chosen, limit - sum(self._price(option) for option in chosen.values()))

    def _loss(self, chosen: Mapping[str, Option]) -> float:
        return sum(self.weights.get(name, 1.0) * option.loss for name, option in chosen.items())

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


class SeveralLimits:
    """Options of several layers under a limit for each of several measures; all limits are above 0."""

    def __init__(
        self,
        curves: Mapping[str, Sequence[Option]],
        limits: Mapping[Measure, float],
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.limits = dict(limits)
        self._names = list(curves)
        self._options = [undominated(curves[name], list(limits)) for name in self._names]
        width = max(map(len, self._options), default=0)
        # (layers, options, measures), as shares of the limits; what fills up the rows costs and loses too much.
        self._costs = np.full((len(self._names), width, len(limits)), np.inf)
        self._losses = np.full((len(self._names), width), np.inf)
        for row, (name, options) in enumerate(zip(self._names, self._options, strict=True)):
            weight = (weights or {}).get(name, 1.0)
            for column, option in enumerate(options):
                self._losses[row, column] = weight * option.loss
                for place, (measure, limit) in enumerate(limits.items()):
                    self._costs[row, column, place] = option.price(measure) / limit

    def choose(self) -> dict[str, Option] | None:
        """The best option of every layer within all limits; None if there is no such choice."""
        chosen = self._priced(self._losses)
        if chosen is None:
            return None
        ways = [chosen, *self._by_cells()]
        return self._named(min(map(self._filled, ways), key=self._loss))

    def _by_cells(self) -> list[Indices]:
        """With two limits: one shared out exactly, the other kept by a price, either way round."""
        if self._costs.shape[2] != 2:
            return []
        return [chosen for exact in (0, 1) if (chosen := self._exact_in(exact)) is not None]

    def _exact_in(self, place: int) -> Indices | None:
        """Limit ``place`` shared out exactly, at the lowest price of the other that keeps its limit."""
        counts = [len(options) for options in self._options]
        exact, priced = (
            [row[:count] for row, count in zip(self._costs[..., axis], counts, strict=True)]
            for axis in (place, 1 - place)
        )
        losses = [row[:count] for row, count in zip(self._losses, counts, strict=True)]
        if sum(row.min() for row in exact) > 1:
            return None

        def at(price: float) -> Indices | None:
            rows = [loss + price * cost for loss, cost in zip(losses, priced, strict=True)]
            chosen = np.array(least_loss(exact, rows, 1.0), np.intp)
            return chosen if (self._spent(chosen) <= _SLACK).all() else None

        return _at_lowest_price(at, _FEWER_HALVINGS)

    def _loss(self, chosen: Indices) -> float:
        return float(self._losses[np.arange(len(chosen)), chosen].sum())

    def least(self, measure: Measure) -> float | None:
        """The lowest cost by ``measure`` within the limits of all others; None if these cannot be kept together."""
        place = list(self.limits).index(measure)
        others = [index for index in range(len(self.limits)) if index != place]
        costs = self._costs
        self._costs = costs[..., others]
        try:
            chosen = self._priced(np.where(np.isfinite(self._losses), costs[..., place], np.inf))
        finally:
            self._costs = costs
        return None if chosen is None else float(self._spent(chosen)[place]) * self.limits[measure]

    def _priced(self, losses: Numbers) -> Indices | None:
        """The indices of the options with the lowest loss at the lowest prices that keep all limits."""
        return self._search(losses, 0)

    def _search(self, losses: Numbers, place: int) -> Indices | None:
        if place == self._costs.shape[2]:
            return losses.argmin(1)

        def at(price: float) -> Indices | None:
            # Not inf · 0 where rows are filled up.
            costs = np.where(np.isfinite(self._losses), self._costs[..., place], 0.0)
            chosen = self._search(losses + price * costs, place + 1)
            return chosen if chosen is not None and self._spent(chosen)[place] <= _SLACK else None

        return _at_lowest_price(at, _HALVINGS)

    def _spent(self, chosen: Indices) -> Numbers:
        total: Numbers = self._costs[np.arange(len(chosen)), chosen].sum(0)
        return total

    def _filled(self, chosen: Indices) -> Indices:
        """Single changes that lower the loss within all limits, best value for what is left first."""
        rows = np.arange(len(chosen))
        finite = np.isfinite(self._losses)
        while True:
            left = np.maximum(1 - self._spent(chosen), 0)
            extra = np.where(finite[..., None], self._costs, np.inf) - self._costs[rows, chosen][:, None, :]
            saved = self._losses[rows, chosen][:, None] - self._losses
            fits = (extra <= left * _SLACK).all(2) & (saved > 0)
            if not fits.any():
                return chosen
            shares = np.maximum(np.where(fits[..., None], extra, 0), 0) / np.maximum(left, 1e-12)
            value = np.where(fits, saved / (shares.sum(2) + 1e-9), -np.inf)
            row, column = np.unravel_index(value.argmax(), value.shape)
            chosen = chosen.copy()
            chosen[row] = column

    def _named(self, chosen: Indices) -> dict[str, Option]:
        return {name: options[index] for name, options, index in zip(self._names, self._options, chosen, strict=True)}


def _at_lowest_price(at: Callable[[float], Indices | None], halvings: int) -> Indices | None:
    """What ``at`` gives at the lowest price at which it gives anything; None if it gives nothing at any."""
    best = at(0.0)
    if best is not None:
        return best
    best = at(_HIGHEST)
    low, high = np.log(_LOWEST), np.log(_HIGHEST)
    for _ in range(halvings):
        middle = (low + high) / 2
        chosen = at(float(np.exp(middle)))
        low, high = (low, middle) if chosen is not None else (middle, high)
        best = best if chosen is None else chosen
    return best


def least_loss(costs: Sequence[Numbers], losses: Sequence[Numbers], limit: float) -> list[int]:
    """For each layer the index of an option, so that they cost at most ``limit`` together and lose least.

    Costs are rounded to cells of the budget. The cheapest options together must keep the limit.

    >>> costs = [np.array([0.0, 6.0, 10.0]), np.array([0.0, 5.0])]
    >>> losses = [np.array([9.0, 8.0, 0.0]), np.array([4.0, 0.0])]
    >>> least_loss(costs, losses, 12.0), least_loss(costs, losses, 9.0)
    ([2, 0], [0, 1])
    """
    cheapest = sum(each.min() for each in costs)
    n_cells = max(_FEWEST_CELLS, _CELLS_PER_LAYER * len(costs))
    cell = max(limit - cheapest, 0.0) / n_cells or 1.0
    cells = [np.rint((each - each.min()) / cell).astype(np.intp) for each in costs]
    # Every layer is rounded by half a cell at most, up or down.
    size = n_cells + len(costs) // 2 + 1
    picks = _picks(cells, losses, size)
    for most in range(size - 1, -1, -1):
        indices, place = [], most
        for layer in reversed(range(len(costs))):
            indices.append(int(picks[layer][place]))
            place -= cells[layer][indices[-1]]
        indices.reverse()
        if sum(each[index] for each, index in zip(costs, indices, strict=True)) <= limit:
            return indices
    return [int(each.argmin()) for each in costs]


def _picks(cells: Sequence[Indices], losses: Sequence[Numbers], size: int) -> list[Indices]:
    """For each layer, by the number of cells that it and all layers before it may take, the option that loses least."""
    tables = []
    lowest = np.zeros(size)
    for layer_cells, layer_losses in zip(cells, losses, strict=True):
        with_layer, picks = np.full(size, np.inf), np.zeros(size, np.intp)
        for index in np.flatnonzero(layer_cells < size):
            start = layer_cells[index]
            with_option = lowest[: size - start] + layer_losses[index]
            better = with_option < with_layer[start:]
            with_layer[start:][better] = with_option[better]
            picks[start:][better] = index
        lowest = with_layer
        tables.append(picks)
    return tables


def undominated(options: Sequence[Option], measures: Sequence[Measure]) -> list[Option]:
    """The options that no other beats in all costs and in loss; the first of equal ones."""
    table = np.array([[option.loss, *(option.price(measure) for measure in measures)] for option in options])
    # In this order an option can only be beaten by one before it, so each is compared with the few that are left.
    order = np.lexsort((np.arange(len(table)), *table.T[::-1]))
    front = np.empty_like(table)
    kept: list[int] = []
    for index in order:
        if not (front[: len(kept)] <= table[index]).all(1).any():
            front[len(kept)] = table[index]
            kept.append(index)
    return [options[index] for index in sorted(kept)]

"""Models out of plans, for trying them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from tensigma.calibration import Calibration
from tensigma.errors import TensigmaError
from tensigma.layers import Geometry, find_layers, replace_
from tensigma.planning.entry import Entry
from tensigma.planning.parallel import side_by_side
from tensigma.planning.plans import Plan
from tensigma.planning.solve import Solution, solve


class Builder:
    """Models out of plans. A layer that was solved once with the same method and ranks is not solved again."""

    def __init__(self, model: nn.Module, stats: Calibration | None) -> None:
        self.model, self.stats = model, stats
        self._layers = {layer.name: layer.module for layer in find_layers(model)}
        self._solved: dict[tuple[Any, ...], Solution] = {}

    def __call__(self, plan: Plan) -> nn.Module:
        """A compressed copy of the model."""
        wanted = [entry for entry in plan.compressed if _key(entry) not in self._solved]
        side_by_side(wanted, self._solve, geometry=_geometry, done=self._keep)
        found: Mapping[str, Solution] = {entry.name: self._solved[_key(entry)] for entry in plan.compressed}
        small = copy.deepcopy(self.model)
        replace_(small, {name: copy.deepcopy(solution.modules) for name, solution in found.items()})
        return small

    def _solve(self, entry: Entry) -> Solution:
        own = None if self.stats is None else self.stats.get(entry.name)
        try:
            return solve(entry, self._layers[entry.name], own)
        except TensigmaError as error:
            raise type(error)(f"{entry.name}: {error}") from error

    def _keep(self, entry: Entry, solution: Solution) -> None:
        self._solved[_key(entry)] = solution


def _key(entry: Entry) -> tuple[Any, ...]:
    return entry.name, entry.method, entry.ranks


def _geometry(entry: Entry) -> Geometry:
    assert entry.geometry is not None
    return entry.geometry

"""The layers of a model that share one budget: curves found once, a plan for any budget at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tensigma.errors import InputError
from tensigma.planning.budget import Budget, Macs, Params, allocate
from tensigma.planning.candidate import Candidate
from tensigma.planning.curves import Option, curve
from tensigma.planning.entry import Entry
from tensigma.planning.front import Front
from tensigma.planning.methods import Method, RankTuple
from tensigma.planning.plans import Plan
from tensigma.planning.progress import PlanningProgress


@dataclass(frozen=True)
class TradeOff:
    """One point of the front: the share of the original that remains, and the root mean square error of the layers."""

    share: float
    error: float


class Allocation:
    """The whole Pareto front of a model, as :meth:`tensigma.Plan.front` gives it.

    >>> import torch
    >>> from torch import nn
    >>> import tensigma as ts
    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(64, 10))
    >>> stats = ts.calibrate(model, [torch.randn(32, 3, 6, 6)])
    >>> front = ts.plan(model, stats, budget=ts.Params(0.5)).front()
    >>> front.plan(ts.Params(0.8)).rate >= 1.25, front.trade(ts.Params)[-1]
    (True, TradeOff(share=1.0, error=0.0))
    """

    def __init__(
        self,
        drafts: Sequence[Entry | Candidate],
        *,
        n_params: int,
        report: Callable[[PlanningProgress], None] = lambda state: None,
    ) -> None:
        self._drafts = list(drafts)
        self.n_params = n_params
        self._sized = all(draft.input_size is not None for draft in drafts if isinstance(draft, Candidate))
        #: Layer name → everything that may become of it.
        self.curves: Mapping[str, list[Option]] = _curves(
            [draft for draft in drafts if isinstance(draft, Candidate)], report
        )

    def plan(self, budget: Budget) -> Plan:
        """The plan for this budget. Nothing is computed that was not before, so it takes milliseconds."""
        total, rest = self._total_and_rest(type(budget))
        chosen = allocate(self.curves, budget, total=total, rest=rest)
        entries = [
            draft if isinstance(draft, Entry) else _entry_of(draft, chosen[draft.name]) for draft in self._drafts
        ]
        return Plan(entries, n_params=self.n_params, allocation=self)

    def trade(self, budget: type[Budget] = Params) -> list[TradeOff]:
        """Every corner of the front, by rising share of the parameters (or, for ``Macs``, of the MACs)."""
        total, rest = self._total_and_rest(budget)
        points = Front(self.curves, budget.field).points
        return [TradeOff((rest + point.cost) / max(total, 1), point.error) for point in points]

    def _total_and_rest(self, budget: type[Budget]) -> tuple[int, int]:
        """What the model costs now, and what of it does not depend on the budget."""
        if issubclass(budget, Macs) and not self._sized:
            raise InputError(
                "Macs(…) needs stats= (from tensigma.calibrate), which know the size of every layer's input"
            )
        entries = [draft for draft in self._drafts if isinstance(draft, Entry)]
        dense = sum(getattr(options[0].cost, budget.field) for options in self.curves.values())
        if issubclass(budget, Macs):
            total = dense + sum(entry.before.macs for entry in entries)
            return total, sum(entry.after.macs for entry in entries)
        saved = sum(entry.before.params - entry.after.params for entry in entries)
        return self.n_params, self.n_params - dense - saved


def _curves(layers: Sequence[Candidate], report: Callable[[PlanningProgress], None]) -> dict[str, list[Option]]:
    start = time.perf_counter()
    # Products with the gram make up most of the work; layers differ a thousandfold.
    work = [layer.geometry.n_weights * layer.geometry.patch_size for layer in layers]
    curves: dict[str, list[Option]] = {}
    for done, layer in enumerate(layers, start=1):
        curves[layer.name] = curve(layer)
        seconds, share = time.perf_counter() - start, sum(work[:done]) / sum(work)
        report(PlanningProgress(layer=layer.name, done=done, total=len(layers), work=share, seconds=seconds))
    return curves


def entry(
    layer: Candidate,
    method: Method | None = None,
    ranks: RankTuple | None = None,
    *,
    reason: str | None = None,
    error: float | None = None,
) -> Entry:
    """What a plan says about a candidate: a method with its ranks, or the reason why it stays dense."""
    return Entry(
        name=layer.name,
        geometry=layer.geometry,
        method=method or layer.method,
        norm=layer.norm,
        format=None if method is None or ranks is None else method.format(ranks),
        reason=reason,
        error=error,
        input_size=layer.input_size,
        options={key: value for key, value in layer.options.items() if key in (method or layer.method).options},
    )


def _entry_of(layer: Candidate, option: Option) -> Entry:
    if option.ranks is None:
        return entry(layer, reason="the budget is best kept without it")
    return entry(layer, option.method, option.ranks, error=option.error)

"""The layers of a model that share one budget: curves found once, a plan for any budget at once."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tensigma.errors import InputError
from tensigma.planning.budget import CostBudget, Macs, Params, allocate
from tensigma.planning.candidate import Candidate
from tensigma.planning.curves import Option, curve
from tensigma.planning.entry import Entry
from tensigma.planning.front import Front
from tensigma.planning.latency import Clock, Latency
from tensigma.planning.methods import Method, RankTuple
from tensigma.planning.plans import Plan
from tensigma.planning.progress import PlanningProgress, Report, reporter
from tensigma.planning.timing import runtime_facts

_SMALLEST = 2_000_000


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
        report: Report = lambda state: None,
    ) -> None:
        self._drafts = list(drafts)
        self.n_params = n_params
        self._candidates = [draft for draft in drafts if isinstance(draft, Candidate)]
        self._entries = [draft for draft in drafts if isinstance(draft, Entry)]
        self._timed: dict[Latency, _Priced] = {}
        #: How much the loss of each layer counts; 1 for those that are not named.
        self.weights: Mapping[str, float] = {}
        #: Layer name → everything that may become of it.
        self.curves: Mapping[str, list[Option]] = _curves(self._candidates, report)

    def weighted(self, weights: Mapping[str, float]) -> Allocation:
        """The same curves, shared out with other weights for the losses of the layers."""
        other = copy.copy(self)
        other.weights = dict(weights)
        return other

    def plan(self, budget: CostBudget, *, progress: bool | Callable[[Any], None] = False) -> Plan:
        """The plan for this budget. Nothing is computed that was not before, so it takes milliseconds.

        Only for :class:`~tensigma.Latency` are shapes timed that never were on this machine; ``progress`` tells of it.
        """
        if not isinstance(budget, CostBudget):
            raise InputError(f"the front knows costs alone: Params, Macs or Latency; {budget!r} needs tensigma.plan")
        priced = self._priced(budget, reporter(progress))
        chosen = allocate(priced.curves, budget, total=priced.total, rest=priced.rest, weights=self.weights)
        entries = [
            draft if isinstance(draft, Entry) else _entry_of(draft, chosen[draft.name]) for draft in self._drafts
        ]
        notes = dict(priced.notes)
        if isinstance(budget, Latency):
            after = priced.rest + sum(option.price("seconds") for option in chosen.values())
            notes["latency"] = {"asked": budget.share, "seconds": [priced.total, after], **notes["latency"]}
        return Plan(entries, n_params=self.n_params, allocation=self, notes=notes)

    def trade(self, budget: CostBudget | type[CostBudget] = Params) -> list[TradeOff]:
        """Every corner of the front, by rising share of the parameters (or of what else the kind of budget counts)."""
        asked = budget(1.0) if isinstance(budget, type) else budget
        priced = self._priced(asked, reporter(False))
        points = Front(priced.curves, asked.field, self.weights).points
        return [TradeOff((priced.rest + point.cost) / (priced.total or 1), point.error) for point in points]

    def _priced(self, budget: CostBudget, report: Report) -> _Priced:
        """Options and totals in the unit of the budget."""
        name = type(budget).__name__
        if not isinstance(budget, Params) and any(layer.input_size is None for layer in self._candidates):
            raise InputError(
                f"{name}(…) needs stats= (from tensigma.calibrate), which know the size of every layer's input"
            )
        if isinstance(budget, Latency):
            key = replace(budget, share=1.0)
            if key not in self._timed:
                self._timed[key] = self._time(budget, report)
            return self._timed[key]
        dense = sum(options[0].price(budget.field) for options in self.curves.values())
        if isinstance(budget, Macs):
            total = dense + sum(entry.before.macs for entry in self._entries)
            return _Priced(self.curves, total, sum(entry.after.macs for entry in self._entries))
        saved = sum(entry.before.params - entry.after.params for entry in self._entries)
        return _Priced(self.curves, self.n_params, self.n_params - dense - saved)

    def _time(self, budget: Latency, report: Report) -> _Priced:
        device = next((layer.kernels[0].device for layer in self._candidates), None)
        clock = Clock(budget, device)
        curves = clock.price(self._candidates, self.curves, report)
        before, after = clock.entries(self._entries)
        total = before + sum(options[0].price("seconds") for options in curves.values())
        about = {"batch": budget.batch, **runtime_facts(clock.table.runtime)}
        return _Priced(curves, total, after, {"latency": about})


@dataclass(frozen=True)
class _Priced:
    """Options in the unit of a budget, what the model costs now, and what of it the budget does not decide."""

    curves: Mapping[str, Sequence[Option]]
    total: float
    rest: float
    notes: Mapping[str, Any] = field(default_factory=dict)


def _curves(layers: Sequence[Candidate], report: Report) -> dict[str, list[Option]]:
    start = time.perf_counter()
    # Products with the gram make up most of the work; layers differ a thousandfold. Small ones take as long as their
    # solvers take to turn round, which is known from measuring.
    work = [layer.geometry.n_weights * layer.geometry.patch_size + _SMALLEST * len(layer.choices) for layer in layers]
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
        calls=layer.calls,
        options={key: value for key, value in layer.options.items() if key in (method or layer.method).options},
    )


def _entry_of(layer: Candidate, option: Option) -> Entry:
    if option.ranks is None:
        return entry(layer, reason="the budget is best kept without it")
    return entry(layer, option.method, option.ranks, error=option.error)

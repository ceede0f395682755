"""The whole Pareto front of a model: curves computed once, then a plan for any budget."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from tensigma.errors import InputError
from tensigma.linalg import RankTuple
from tensigma.planning.allocation import Allocation
from tensigma.planning.budgets import CostBudget, Macs, Params
from tensigma.planning.curves import Option
from tensigma.planning.entry import CompressedEntry, DenseEntry
from tensigma.planning.latency import Clock, Latency
from tensigma.planning.planning_store import PlanningStore
from tensigma.planning.plans import Plan
from tensigma.planning.weighing import Weigher
from tensigma.running import Listener, Wanted, WeightedProgress, reporter, runtime_facts, silent
from tensigma.solving import Candidate, Method, Solutions, Treatment, side_by_side

# Small layers take as long as their solvers need to start, whatever their size.
_SMALLEST = 2_000_000


@dataclass(frozen=True, kw_only=True)
class PlanningProgress(WeightedProgress):
    """The error curves of a layer are known.

    >>> print(PlanningProgress(layer="conv1", done=1, total=4, work=0.25, seconds=2.0))
    curves of layer 1 of 4, conv1
    """

    title: ClassVar[str] = "planning"

    layer: str

    def __str__(self) -> str:
        return f"curves of layer {self.done} of {self.total}, {self.layer}"


@dataclass(frozen=True)
class FrontPoint:
    """One point of the front: the share of the original that remains, and the root mean square error of the layers."""

    share: float
    error: float


class ParetoFront:
    """The trade-off between size and error of a whole model, as :meth:`tensigma.Plan.front` gives it.

    >>> import torch
    >>> from torch import nn
    >>> import tensigma as ts
    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(64, 10))
    >>> stats = ts.calibrate(model, [torch.randn(32, 3, 6, 6)])
    >>> front = ts.plan(model, stats, budget=ts.Params(0.5)).front()
    >>> front.plan(ts.Params(0.8)).rate >= 1.25, front.trade(ts.Params)[-1]
    (True, FrontPoint(share=1.0, error=0.0))
    """

    def __init__(
        self,
        drafts: Sequence[DenseEntry | CompressedEntry | Candidate],
        *,
        n_params: int,
        model_weights: str | None = None,
        solutions: Solutions | None = None,
        report: Listener = silent,
        workers: int | None = None,
    ) -> None:
        self._drafts = list(drafts)
        self.n_params = n_params
        self._model_weights, self._solutions = model_weights, solutions or Solutions()
        self._candidates = [draft for draft in drafts if isinstance(draft, Candidate)]
        self._entries = [draft for draft in drafts if not isinstance(draft, Candidate)]
        self._timed: dict[Latency, _Priced] = {}
        #: Effects of the layers on the answers and the samples to try plans on, if a plan was weighed by them.
        self.weigher: Weigher | None = None
        #: How much the loss of each layer counts; 1 for those that are not named.
        self.weights: Mapping[str, float] = {}
        #: Layer name → its options.
        self.curves: Mapping[str, list[Option]] = _curves(self._candidates, report, workers, self._solutions.folder)

    def weighted(self, weights: Mapping[str, float]) -> ParetoFront:
        """The same curves, shared out with other weights for the losses of the layers."""
        other = copy.copy(self)
        other.weights = dict(weights)
        return other

    def plan(self, budget: CostBudget, *, progress: Wanted = False) -> Plan:
        """The plan for this budget. All curves are known already, so it takes milliseconds.

        Only :class:`~tensigma.Latency` times shapes that are new to this machine; ``progress`` reports it.
        """
        if not isinstance(budget, CostBudget):
            raise InputError(f"the front takes Params, Macs or Latency, got {budget!r}; use tensigma.plan for it")
        priced = self._priced(budget, reporter(progress))
        allocation = Allocation(priced.curves, budget.field, self.weights)
        smallest, limit = priced.rest + allocation.cheapest, budget.share * priced.total
        if smallest > limit:
            raise unreachable(budget, priced.total, smallest)
        chosen = allocation.choose(limit - priced.rest)
        if isinstance(budget, Params) and budget.at_most is not None:
            chosen = self._with_few_macs(chosen, limit - priced.rest, budget.at_most)
        entries = [
            entry_of(draft, chosen[draft.name]) if isinstance(draft, Candidate) else draft for draft in self._drafts
        ]
        notes = dict(priced.notes)
        if isinstance(budget, Latency):
            after = priced.rest + sum(option.price("seconds") for option in chosen.values())
            notes["latency"] = {"asked": budget.share, "seconds": [priced.total, after], **notes["latency"]}
        return Plan(
            entries,
            n_params=self.n_params,
            weights=self._model_weights,
            source=self,
            solutions=self._solutions,
            notes=notes,
        )

    def best_plan(self, budget: CostBudget, *, progress: Wanted = False) -> Plan:
        """The plan for this budget that :func:`tensigma.plan` would make, curves and effects as they were measured.

        Where layers are weighed by their effects, plans are tried again, because which weights do best depends on the
        budget; :meth:`plan` keeps the weights of the plan that the front came from.
        """
        if self.weigher is None:
            return self.plan(budget, progress=progress)
        return self.weigher.best_plan(self, budget, progress=progress)

    def _with_few_macs(self, chosen: dict[str, Option], left: float, at_most: float) -> dict[str, Option]:
        """Options for the same parameters that need at most this share of the multiply-adds; ``chosen`` if none do."""
        if any(layer.input_size is None for layer in self._candidates):
            return chosen
        rest = sum(entry.after.macs for entry in self._entries)
        total = sum(entry.before.macs for entry in self._entries)
        total += sum(options[0].cost.macs for options in self.curves.values())
        # The layers that need more multiply-adds than now are the first to go; then all are held tighter and tighter.
        for tightness in (math.inf, *(at_most * step / 20 for step in range(20, 0, -1))):
            if math.isfinite(tightness):
                curves = {name: _frugal(options, tightness) for name, options in self.curves.items()}
                allocation = Allocation(curves, "params", self.weights)
                if allocation.cheapest > left:
                    break
                chosen_here = allocation.choose(left)
            else:
                chosen_here = chosen
            if rest + sum(option.cost.macs for option in chosen_here.values()) <= at_most * total:
                return chosen_here
        return chosen

    def trade(self, budget: CostBudget | type[CostBudget] = Params) -> list[FrontPoint]:
        """Every corner of the front, by rising share of the parameters (or whatever else the budget counts)."""
        kind = budget(1.0) if isinstance(budget, type) else budget
        priced = self._priced(kind, silent)
        corners = Allocation(priced.curves, kind.field, self.weights).corners
        return [FrontPoint((priced.rest + cost) / (priced.total or 1), error) for cost, error in corners]

    def _priced(self, budget: CostBudget, report: Listener) -> _Priced:
        """Options and totals in the unit of the budget."""
        name = type(budget).__name__
        if not isinstance(budget, Params) and any(layer.input_size is None for layer in self._candidates):
            raise InputError(
                f"{name}(…) needs {{stats}} (from tensigma.calibrate), which hold the size of every layer's input",
                parameters=("stats",),
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

    def _time(self, budget: Latency, report: Listener) -> _Priced:
        device = next((layer.kernels[0].device for layer in self._candidates), None)
        clock = Clock(budget, device)
        curves = clock.price(self._candidates, self.curves, report)
        before, after = clock.entries(self._entries)
        total = before + sum(options[0].price("seconds") for options in curves.values())
        about = {"batch": budget.batch, **runtime_facts(clock.table.runtime)}
        return _Priced(curves, total, after, {"latency": about})


def check_reachable(
    drafts: Sequence[DenseEntry | CompressedEntry | Candidate], n_params: int, budget: CostBudget
) -> None:
    """Refuse a budget that not even ranks of 1 would keep, which follows from shapes, before any curve is computed."""
    if not isinstance(budget, Params | Macs):
        return
    entries = [draft for draft in drafts if not isinstance(draft, Candidate)]
    candidates = [draft for draft in drafts if isinstance(draft, Candidate)]
    if isinstance(budget, Macs) and any(layer.input_size is None for layer in candidates):
        return
    field = budget.field
    dense = sum(getattr(layer.cost(None), field) for layer in candidates)
    before, after = (sum(getattr(getattr(entry, at), field) for entry in entries) for at in ("before", "after"))
    total = n_params if isinstance(budget, Params) else dense + before
    smallest = total - dense - (before - after) + sum(_least(layer, field) for layer in candidates)
    if smallest > budget.share * total:
        raise unreachable(budget, total, smallest)


def _least(layer: Candidate, field: str) -> int:
    formats = [None, *(method.format((1,) * len(method.rank_names)) for method in layer.choices)]
    return min(getattr(layer.cost_in(format), field) for format in formats)


def unreachable(budget: CostBudget, total: float, smallest: float) -> InputError:
    """The error for a budget below what the lowest ranks leave."""
    return InputError(
        f"no plan leaves {budget.share:.4g} of the {budget.show(total)}: with the lowest ranks the "
        f"layers that may be compressed still leave {budget.show(smallest)}, a share of "
        f"{smallest / (total or 1):.4g}; ask for more, or let more layers be compressed "
        "({layers}, {skip})",
        parameters=("layers", "skip"),
    )


def _frugal(options: Sequence[Option], tightness: float) -> list[Option]:
    """The options that need at most this share of the dense layer's multiply-adds; the most frugal if none does."""
    limit = tightness * options[0].cost.macs
    return [option for option in options if option.cost.macs <= limit] or [
        min(options, key=lambda option: option.cost.macs)
    ]


@dataclass(frozen=True)
class _Priced:
    """Options in the unit of a budget, the cost of the model now, and the cost that the budget does not decide."""

    curves: Mapping[str, Sequence[Option]]
    total: float
    rest: float
    notes: Mapping[str, Any] = field(default_factory=dict)


def _curves(
    layers: Sequence[Candidate], report: Listener, workers: int | None, folder: Path | None
) -> dict[str, list[Option]]:
    start = time.perf_counter()
    total_work = sum(map(_work, layers))
    curves: dict[str, list[Option]] = {}
    done_work = 0

    def done(layer: Candidate, options: list[Option]) -> None:
        nonlocal done_work
        curves[layer.name] = options
        done_work += _work(layer)
        report(
            PlanningProgress(
                layer=layer.name,
                done=len(curves),
                total=len(layers),
                work=done_work / total_work,
                seconds=time.perf_counter() - start,
            )
        )

    side_by_side(layers, PlanningStore(folder).curve, geometry=lambda layer: layer.geometry, workers=workers, done=done)
    return {layer.name: curves[layer.name] for layer in layers}


def _work(layer: Candidate) -> int:
    # Products with the gram make up most of the work; layers differ a thousandfold.
    return layer.geometry.n_weights * layer.geometry.patch_size + _SMALLEST * len(layer.choices)


def dense_entry(layer: Candidate, reason: str) -> DenseEntry:
    """The entry of a candidate that stays dense."""
    return DenseEntry(
        name=layer.name,
        geometry=layer.geometry,
        norm=layer.norm,
        method=layer.method,
        reason=reason,
        input_size=layer.input_size,
        calls=layer.calls,
    )


def compressed_entry(
    layer: Candidate, method: Method, ranks: RankTuple, *, error: float | None = None
) -> CompressedEntry:
    """The entry of a candidate that takes a method with its ranks."""
    treatment = Treatment(
        geometry=layer.geometry,
        method=method,
        norm=layer.norm,
        format=method.format(ranks),
        options={key: value for key, value in layer.options.items() if key in method.options},
    )
    return CompressedEntry.of(layer.name, treatment, error=error, input_size=layer.input_size, calls=layer.calls)


def entry_of(layer: Candidate, option: Option) -> DenseEntry | CompressedEntry:
    """What a plan says about a candidate for which a budget has chosen ``option``."""
    if option.method is None or option.ranks is None:
        return dense_entry(layer, "the budget is best kept without it")
    return compressed_entry(layer, option.method, option.ranks, error=option.error)

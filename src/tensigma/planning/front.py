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
from tensigma.planning.allocation import Allocation, SeveralLimits
from tensigma.planning.budgets import AllOf, CostBudget, Params, bits_allowed, unreachable
from tensigma.planning.curves import BitCurves, Measure, Option, early_stop
from tensigma.planning.entry import CompressedEntry, DenseEntry
from tensigma.planning.latency import Clock, Latency
from tensigma.planning.planning_store import PlanningStore
from tensigma.planning.plans import Plan
from tensigma.planning.weighing import Weigher
from tensigma.running import Listener, Wanted, WeightedProgress, reporter, runtime_facts, silent
from tensigma.solving import Candidate, Folding, Method, Solutions, Treatment, side_by_side

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
        n_bytes: int | None = None,
        folding: Folding | None = None,
        model_weights: str | None = None,
        solutions: Solutions | None = None,
        report: Listener = silent,
        workers: int | None = None,
    ) -> None:
        self._drafts = list(drafts)
        self.n_params = n_params
        self.n_bytes = 4 * n_params if n_bytes is None else n_bytes
        self._folding = folding or Folding()
        self._model_weights, self._solutions = model_weights, solutions or Solutions()
        self._candidates = [draft for draft in drafts if isinstance(draft, Candidate)]
        self._entries = [draft for draft in drafts if not isinstance(draft, Candidate)]
        self._timed: dict[Latency, _Timed] = {}
        #: Effects of the layers on the answers and the samples to try plans on, if a plan was weighed by them.
        self.weigher: Weigher | None = None
        #: How much the loss of each layer counts; 1 for those that are not named.
        self.weights: Mapping[str, float] = {}
        #: Layer name → its options.
        self.curves: Mapping[str, list[Option]] = _curves(self._candidates, report, workers, self._solutions.folder)
        self._bits = BitCurves(self._candidates, self.curves)
        self._with_bits: dict[tuple[int, ...], Mapping[str, Sequence[Option]]] = {}

    def weighted(self, weights: Mapping[str, float]) -> ParetoFront:
        """The same curves, shared out with other weights for the losses of the layers."""
        other = copy.copy(self)
        other.weights = dict(weights)
        return other

    def plan(self, budget: CostBudget | AllOf, *, progress: Wanted = False) -> Plan:
        """The plan for this budget. All curves are known already, so it takes milliseconds.

        Only :class:`~tensigma.Latency` times shapes that are new to this machine, and the first budget of
        :class:`~tensigma.Bytes` measures what rounding adds to errors; ``progress`` reports the former.
        """
        if not isinstance(budget, CostBudget | AllOf):
            raise InputError(
                f"the front takes Params, Macs, Bytes or Latency, got {budget!r}; use tensigma.plan for it"
            )
        priced = self._priced(budget, reporter(progress))
        chosen = self._chosen(budget, priced)
        entries = [
            entry_of(draft, chosen[draft.name]) if isinstance(draft, Candidate) else draft for draft in self._drafts
        ]
        notes = dict(priced.notes)
        if bits_allowed(budget):
            notes["bits"] = list(bits_allowed(budget))
        for part in budget.parts:
            if isinstance(part, Latency):
                after = priced.rest["seconds"] + sum(option.price("seconds") for option in chosen.values())
                seconds = [priced.total["seconds"], after]
                notes["latency"] = {"asked": part.share, "seconds": seconds, **notes["latency"]}
        return Plan(
            entries,
            n_params=self.n_params,
            n_bytes=self.n_bytes,
            folding=self._folding,
            weights=self._model_weights,
            source=self,
            solutions=self._solutions,
            notes=notes,
        )

    def _chosen(self, budget: CostBudget | AllOf, priced: _Priced) -> dict[str, Option]:
        """An option for every candidate, within all limits of the budget."""
        left: dict[Measure, float] = {}
        for part in budget.parts:
            allocation = Allocation(priced.curves, part.field, self.weights)
            total, rest = priced.total[part.field], priced.rest[part.field]
            if rest + allocation.cheapest > part.share * total:
                raise unreachable(part, total, rest + allocation.cheapest)
            left[part.field] = part.share * total - rest
        if len(left) == 1:
            chosen = allocation.choose(*left.values())
            if isinstance(budget, Params) and budget.at_most is not None:
                chosen = self._with_few_macs(chosen, left["params"], budget.at_most)
            return chosen
        # A limit of 0 is kept only by options that cost nothing; as shares of it, costs would be no numbers.
        limits = {measure: max(limit, 1e-12) for measure, limit in left.items()}
        several = SeveralLimits(priced.curves, limits, self.weights)
        together = several.choose()
        if together is None:
            raise _unreachable_together(budget, priced, several)
        return together

    def best_plan(self, budget: CostBudget | AllOf, *, progress: Wanted = False) -> Plan:
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
        priced, field = self._priced(kind, silent), kind.field
        corners = Allocation(priced.curves, field, self.weights).corners
        return [FrontPoint((priced.rest[field] + cost) / (priced.total[field] or 1), error) for cost, error in corners]

    def _priced(self, budget: CostBudget | AllOf, report: Listener) -> _Priced:
        """Options and totals in the units of the budget."""
        curves: Mapping[str, Sequence[Option]] = self.curves
        total: dict[Measure, float] = {}
        rest: dict[Measure, float] = {}
        notes: dict[str, Any] = {}
        timed = None
        for part in budget.parts:
            if part.field in ("macs", "seconds") and any(layer.input_size is None for layer in self._candidates):
                raise InputError(
                    f"{type(part).__name__}(…) needs {{stats}} (from tensigma.calibrate), which hold the size of "
                    "every layer's input",
                    parameters=("stats",),
                )
            if isinstance(part, Latency):
                timed = self._times(part, report)
                curves, total["seconds"], rest["seconds"] = timed.curves, timed.total, timed.rest
                notes["latency"] = timed.about
                continue
            dense = sum(options[0].price(part.field) for options in self.curves.values())
            before = sum(getattr(entry.before, part.field) for entry in self._entries)
            after = sum(getattr(entry.after, part.field) for entry in self._entries)
            whole = {"params": self.n_params, "bytes": self.n_bytes}
            total[part.field] = whole.get(part.field, dense + before)
            rest[part.field] = total[part.field] - getattr(self._folding, part.field, 0) - dense - (before - after)
        bits = bits_allowed(budget)
        if bits and timed is not None:
            curves = self._bits.with_bits(curves, bits)
        elif bits:
            if bits not in self._with_bits:
                self._with_bits[bits] = self._bits.with_bits(curves, bits)
            curves = self._with_bits[bits]
        return _Priced(curves, total, rest, notes)

    def _times(self, budget: Latency, report: Listener) -> _Timed:
        key = replace(budget, share=1.0)
        if key not in self._timed:
            device = next((layer.kernels[0].device for layer in self._candidates), None)
            clock = Clock(budget, device)
            curves = clock.price(self._candidates, self.curves, report)
            before, after = clock.entries(self._entries)
            total = before + sum(options[0].price("seconds") for options in curves.values())
            about = {"batch": budget.batch, **runtime_facts(clock.table.runtime)}
            self._timed[key] = _Timed(curves, total, after, about)
        return self._timed[key]


def _unreachable_together(budget: CostBudget | AllOf, priced: _Priced, several: SeveralLimits) -> InputError:
    """The error for budgets that can be kept, but not together."""
    names = " and ".join(f"{type(part).__name__}({part.share:.4g})" for part in budget.parts)
    reachable = []
    for part in budget.parts:
        least = several.least(part.field)
        if least is not None:
            total = priced.total[part.field]
            smallest = priced.rest[part.field] + least
            others = " and ".join(type(other).__name__ for other in budget.parts if other is not part)
            reachable.append(
                f"within {others}, {part.show(round(smallest) if part.field != 'seconds' else smallest)} remain at "
                f"least, a share of {smallest / (total or 1):.4g}"
            )
    return InputError(f"no plan keeps {names} together: {'; '.join(reachable) or 'relax one of them'}")


def _frugal(options: Sequence[Option], tightness: float) -> list[Option]:
    """The options that need at most this share of the dense layer's multiply-adds; the most frugal if none does."""
    limit = tightness * options[0].cost.macs
    return [option for option in options if option.cost.macs <= limit] or [
        min(options, key=lambda option: option.cost.macs)
    ]


@dataclass(frozen=True)
class _Priced:
    """Options in the units of a budget, the cost of the model now, and the cost that the budget does not decide."""

    curves: Mapping[str, Sequence[Option]]
    total: Mapping[Measure, float]
    rest: Mapping[Measure, float]
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Timed:
    """Options with their times, the time of the model now, that of layers which are settled, and how it was taken."""

    curves: Mapping[str, Sequence[Option]]
    total: float
    rest: float
    about: Mapping[str, Any]


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
    layer: Candidate, method: Method, ranks: RankTuple, *, bits: int | None = None, error: float | None = None
) -> CompressedEntry:
    """The entry of a candidate that takes a method with its ranks."""
    treatment = Treatment(
        geometry=layer.geometry,
        method=method,
        norm=layer.norm,
        format=method.format(ranks),
        options={
            **early_stop(method, bits),
            **{key: value for key, value in layer.options.items() if key in method.options},
        },
        bits=bits,
    )
    return CompressedEntry.of(layer.name, treatment, error=error, input_size=layer.input_size, calls=layer.calls)


def entry_of(layer: Candidate, option: Option) -> DenseEntry | CompressedEntry:
    """What a plan says about a candidate for which a budget has chosen ``option``."""
    if option.method is None or option.ranks is None:
        return dense_entry(layer, "the budget is best kept without it")
    return compressed_entry(layer, option.method, option.ranks, bits=option.bits, error=option.error)

"""The smallest plan that keeps enough of the original's answers, found by trying plans on held-out data."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from torch import nn

from tensigma.errors import InputError
from tensigma.planning.allocation import Allocation
from tensigma.planning.budget import Budget, Params
from tensigma.planning.heldout import Kept, Kind
from tensigma.planning.plans import Plan
from tensigma.planning.progress import Report, SearchProgress

_KINDS = ("auto", "agreement", "accuracy")


@dataclass(frozen=True)
class Drop(Budget):
    """At most ``share`` of the answers lost, on held-out data; as few parameters as that allows.

    Without labels, an answer is lost where the model disagrees with the original: 0.01 asks for agreement on 99 of 100
    held-out samples. With labels in every batch, what counts is the share of right answers: 0.01 lets top-1 accuracy
    fall by one point below the original's, both measured on the held-out samples. ``measure`` settles it.

    Plans from the front are tried one after the other: solved, put into a copy of the model, judged. Sizes are
    bisected, as if more parameters always kept more. That is nearly but not strictly so; the plan that comes back was
    itself measured and kept enough, but a smaller one that was never tried might have done so too.

    Args:
        share: What may be lost, from 0 up to but not including 1.
        measure: ``"agreement"`` (labels are not read), ``"accuracy"`` (labels are needed), or ``"auto"``: accuracy
            where every batch has labels and the original knows them, agreement with a warning where it does not.
        trials: How many plans are tried. Each halves the range in which the size may lie.

    >>> Drop(0.01)
    Drop(share=0.01, measure='auto', trials=8)
    """

    _: KW_ONLY
    measure: Kind = "auto"
    trials: int = 8

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 <= self.share < 1:
            raise InputError(f"Drop: the share of answers that may be lost lies in [0, 1), got {self.share!r}")
        if self.measure not in _KINDS:
            raise InputError(f"measure {self.measure!r} is unknown; choose one of {', '.join(map(repr, _KINDS))}")
        if isinstance(self.trials, bool) or not isinstance(self.trials, int) or self.trials < 1:
            raise InputError(f"trials is a whole number of at least 1, got {self.trials!r}")


def smallest_plan(
    allocation: Allocation,
    drop: Drop,
    *,
    build: Callable[[Plan], nn.Module],
    judge: Callable[[nn.Module], Kept],
    searched_on: str | None = None,
    report: Report = lambda state: None,
) -> Plan:
    """The smallest plan tried that loses no more than ``drop`` allows; the one that changes nothing where none does.

    ``build`` carries a plan out and ``judge`` measures what came of it, however either is done, on data that is called
    ``searched_on``.
    """
    start = time.perf_counter()
    low, high = allocation.trade(Params)[0].share, 1.0
    best: tuple[Plan, Kept] | None = None
    tried: list[list[float]] = []
    for done in range(1, drop.trials + 1):
        share = (low * high) ** 0.5
        plan = allocation.plan(Params(min(1.0, share * (1 + 1e-9))))
        kept = judge(build(plan))
        enough = kept.lost <= drop.share + 1e-12
        size = plan.after.params / plan.before.params
        tried.append([size, kept.share])
        if enough and (best is None or plan.after.params <= best[0].after.params):
            best = plan, kept
        low, high = (low, min(share, size)) if enough else (share, high)
        seconds = time.perf_counter() - start
        report(
            SearchProgress(
                done=done,
                total=drop.trials,
                share=size,
                kept=kept.share,
                measure=kept.measure,
                enough=enough,
                seconds=seconds,
            )
        )
        if high / low < 1 + 1e-3:
            break
    plan, kept = best or _unchanged(allocation, build, judge)
    notes = {
        "asked": drop.share,
        "measure": kept.measure,
        "kept": kept.share,
        "original": kept.original_hits / kept.samples,
        "samples": kept.samples,
        "tried": tried,
        "data": searched_on,
    }
    return Plan(plan.values(), n_params=plan.n_params, allocation=allocation, notes={"drop": notes})


def _unchanged(
    allocation: Allocation, build: Callable[[Plan], nn.Module], judge: Callable[[nn.Module], Kept]
) -> tuple[Plan, Kept]:
    plan = allocation.plan(Params(1.0))
    return plan, judge(build(plan))

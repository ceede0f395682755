"""The smallest plan that keeps enough of the original's answers, found by trying plans on held-out data."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from tensigma.errors import CalibrationWarning, InputError
from tensigma.files import integer, number, optional, record, text
from tensigma.layers import fingerprint
from tensigma.planning.budgets import Budget, Params
from tensigma.planning.planning_store import PlanningStore
from tensigma.planning.plans import Front, Plan
from tensigma.running import (
    Batches,
    Digest,
    Key,
    Listener,
    Progress,
    ScoresTally,
    Tally,
    Wish,
    borrowed,
    everyone,
    first_answers,
    kept_rng,
    process_group,
    rank_and_size,
    run,
    silent,
    tensors_in,
    weights_digest,
)

Kind = Literal["auto", "agreement", "accuracy"]
_KINDS = ("auto", "agreement", "accuracy")


@dataclass(frozen=True)
class Drop(Budget):
    """At most ``share`` of the answers lost, on held-out data; as few parameters as that allows.

    Without labels, an answer is lost where the model disagrees with the original: 0.01 asks for agreement on 99 of 100
    held-out samples. With labels in every batch, what counts is the share of right answers: 0.01 lets top-1 accuracy
    fall by one point below the original's, both measured on the held-out samples. ``measure`` sets it explicitly.
    Where answers are not one class for each sample, what may be lost is the same share of what takes its place:
    positions with the same class, average precision by the original's detections, or 0.01 of relative error in numbers.

    Plans from the front are tried in turn: solved, put into a copy of the model and measured. Sizes are bisected as if
    more parameters always kept more. That is nearly but not strictly so: the returned plan was itself measured and kept
    enough, but a smaller one that was not tried might have done so too.

    Args:
        share: What may be lost, from 0 up to but not including 1.
        measure: ``"agreement"`` (labels are not read), ``"accuracy"`` (labels are needed), or ``"auto"``: accuracy if
            every batch has labels that fit the original, otherwise agreement, with a warning if labels do not fit.
        trials: How many plans are tried. Each halves the range of possible sizes.

    >>> Drop(0.01)
    Drop(share=0.01, measure='auto', trials=8)
    """

    share: float
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


@dataclass(frozen=True, kw_only=True)
class SearchProgress(Progress):
    """A plan has been tried on held-out data.

    >>> print(SearchProgress(done=2, total=8, size=0.5, kept=0.97, measure="agreement", enough=False, seconds=3.0))
    trial 2 of 8, 50.0 % of the parameters: agreement 97.00 %, too little
    """

    title: ClassVar[str] = "planning"

    #: The share of the parameters that the plan leaves.
    size: float
    #: Agreement or accuracy of the model it gives.
    kept: float
    measure: str
    #: Whether that is enough for the budget.
    enough: bool

    def __str__(self) -> str:
        outcome = f"{self.measure} {100 * self.kept:.2f} %, {'enough' if self.enough else 'too little'}"
        return f"trial {self.done} of {self.total}, {100 * self.size:.1f} % of the parameters: {outcome}"


@dataclass(frozen=True, kw_only=True)
class Kept:
    """How much a model answers like the labels or like the original, and how much the original does."""

    measure: str
    samples: int
    #: Between 0 and 1.
    share: float
    #: That of the original; 1 if likeness to it is measured.
    original: float = 1.0
    #: Why labels were not used though there are some.
    doubt: str | None = None
    #: What is compared, in words.
    answers: str = ""

    @property
    def lost(self) -> float:
        """What is lost compared with the original; negative if the model is better."""
        return self.original - self.share


_KEPT = record(
    {
        "measure": text(),
        "samples": integer(),
        "share": number(),
        "original": number(),
        "doubt": optional(text()),
    },
    {"answers": text()},
)


class Judge:
    """Compares models with the original on held-out batches, which are read once for every comparison.

    Args:
        measure: ``"auto"`` counts right answers if every batch has labels that fit the original, and agreement with
            the original otherwise.
        losable: The share of answers that may be lost. If the original itself is right no more often than that, any
            model would pass, so accuracy is not used.
        store: Where outcomes are kept; under ``torchrun``, where all processes must measure together, none are.
    """

    def __init__(
        self,
        original: nn.Module,
        data: Any,
        *,
        measure: Kind = "auto",
        losable: float = 0.0,
        input: Key = None,
        answers: Wish = None,
        store: PlanningStore | None = None,
    ) -> None:
        self.original, self.measure, self.losable = original, measure, losable
        self._wish = answers
        self._store = PlanningStore() if store is None or rank_and_size()[1] > 1 else store
        self._batches = Batches(data, input=input, name="data")
        self._batches.check_rereadable("a search by Drop")

    def __call__(self, model: nn.Module) -> Kept:
        kept = Kept(
            **self._store.recall("search", lambda: self._key(model), _KEPT, lambda: asdict(self._measured(model)))
        )
        if kept.doubt is not None:
            warnings.warn(f"agreement is measured instead of accuracy: {kept.doubt}", CalibrationWarning, stacklevel=2)
        return kept

    @cached_property
    def _facts(self) -> str:
        """A digest of the original, of what is asked, and of all held-out samples, which are read for it once."""
        digest = Digest(20).add([self.measure, self.losable, repr(self._wish)]).add(weights_digest(self.original))
        with kept_rng(), torch.no_grad(), borrowed(self.original):
            for batch in self._batches:
                digest.add(list(tensors_in(batch.inputs)))
                digest.add(batch.targets if self.measure != "agreement" else None)
                if batch.index == 0:  # weights do not tell what else the model computes
                    digest.add(run(self.original, batch))
        return digest.text

    def _key(self, model: nn.Module) -> Digest:
        return Digest(20).add(self._facts).add(fingerprint(model)).add(weights_digest(model))

    def _measured(self, model: nn.Module) -> Kept:
        tallies: list[Tally] = []
        with torch.no_grad(), borrowed(model), borrowed(self.original):
            for batch in self._batches:
                labels = None if self.measure == "agreement" else batch.targets
                if tallies:
                    reference = run(self.original, batch)
                else:
                    reference, reading = first_answers(self.original, batch, self._wish)
                    tallies = [Tally(reading), Tally(reading)]
                tallies[0].add(run(model, batch), len(batch), labels, reference)
                tallies[1].add(reference, len(batch), labels)
        tally, original = _together(tallies)
        assert tally.main is not None
        assert original.main is not None
        accuracy, of_original = tally.main.accuracy, original.main.accuracy
        labelled = self.measure != "agreement" and accuracy is not None and of_original is not None
        if self.measure == "accuracy" and not labelled:
            raise InputError("Drop(measure='accuracy') needs labels in every batch of data; 'agreement' needs none")
        doubt = self._doubt(original) if labelled else None
        if doubt is not None and self.measure == "accuracy":
            raise InputError(f"Drop(measure='accuracy'): {doubt}; check the labels, or use measure='agreement'")
        answers = str(tally.answers)
        if accuracy is not None and of_original is not None and labelled and doubt is None:
            return Kept(
                measure="accuracy", samples=tally.samples, share=accuracy, original=of_original, answers=answers
            )
        if tally.likeness is None:
            raise InputError(
                "the original finds nothing in the held-out batches that a small model could be measured by; pass "
                "other data, or {answers}, such as Boxes(score=0.1)",
                parameters=("answers",),
            )
        measure = tally.answers.measure
        return Kept(measure=measure, samples=tally.samples, share=tally.likeness, doubt=doubt, answers=answers)

    def _doubt(self, original: Tally) -> str | None:
        """Why the labels in the batches cannot be those of this model; None if they can."""
        tally = original.main
        assert tally is not None
        accuracy = tally.accuracy or 0.0
        guessing = 0.0
        if isinstance(tally, ScoresTally):
            if tally.foreign and not tally.dense:
                return f"some labels lie outside the {tally.classes} classes of the model"
            # A tenth of the way from guessing to perfect is too little to tell the model's labels from any others.
            guessing = 1 / tally.classes if self.measure == "auto" else 0.0
        least = max(guessing + 0.1 * (1 - guessing) if guessing else 0.0, self.losable)
        if accuracy <= least:
            return f"the original is right on {accuracy:.1%} of the labels, no more than {least:.1%}"
        return None


def _together(tallies: list[Tally]) -> list[Tally]:
    """The counts of all processes under ``torchrun``, each of which has its own share of the data."""
    if rank_and_size()[1] == 1:
        return tallies
    with process_group(None):
        shares = everyone([[tally.parts, tally.samples] for tally in tallies])
    merged = [Tally(tally.answers) for tally in tallies]
    for share in shares:
        for tally, (parts, samples) in zip(merged, share, strict=True):
            other = Tally(tally.answers)
            other.parts, other.samples = parts, samples
            tally.merge(other)
    return merged


def smallest_plan(
    front: Front,
    drop: Drop,
    *,
    build: Callable[[Plan], nn.Module],
    judge: Callable[[nn.Module], Kept],
    searched_on: str | None = None,
    report: Listener = silent,
) -> Plan:
    """The smallest plan tried that loses no more than ``drop`` allows; the one that changes nothing if none does.

    ``build`` carries out a plan, and ``judge`` measures the model, on data named ``searched_on``.
    """
    start = time.perf_counter()
    low, high = front.trade(Params)[0].share, 1.0
    best: tuple[Plan, Kept] | None = None
    tried: list[list[float]] = []
    for done in range(1, drop.trials + 1):
        share = (low * high) ** 0.5
        plan = front.plan(Params(min(1.0, share * (1 + 1e-9))))
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
                size=size,
                kept=kept.share,
                measure=kept.measure,
                enough=enough,
                seconds=seconds,
            )
        )
        if high / low < 1 + 1e-3:
            break
    plan, kept = best or _unchanged(front, build, judge)
    notes = {
        "asked": drop.share,
        "measure": kept.measure,
        "kept": kept.share,
        "original": kept.original,
        "samples": kept.samples,
        "tried": tried,
        "data": searched_on,
        "answers": kept.answers,
    }
    return plan.with_notes(drop=notes)


def _unchanged(
    front: Front, build: Callable[[Plan], nn.Module], judge: Callable[[nn.Module], Kept]
) -> tuple[Plan, Kept]:
    plan = front.plan(Params(1.0))
    return plan, judge(build(plan))

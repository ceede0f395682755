"""How much of a model's answers a smaller one keeps, on data that had no part in making it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import distributed as dist
from torch import nn

from tensigma.calibration.batches import count_batches, input_of, is_one_shot, iterate
from tensigma.calibration.distributed import process_group, rank_and_size
from tensigma.calibration.guard import borrowed
from tensigma.errors import CalibrationWarning, InputError
from tensigma.planning.answers import answered, class_labels, scores_of

Kind = Literal["auto", "agreement", "accuracy"]
# Of so many batches in a row the second is set aside, so that two batches are enough.
_EVERY, _WHICH = 5, 1


class SetAside:
    """Batches without every fifth, which is kept in memory for later: the second, the seventh, the twelfth …

    One pass both gives the rest and keeps :attr:`held`, so that a loader that shuffles cannot mix the two.

    >>> batches = SetAside([torch.full((2, 3), float(n)) for n in range(8)])
    >>> [int(batch[0, 0]) for batch in batches], [int(batch[0, 0]) for batch in batches.held]
    ([0, 2, 3, 4, 5, 7], [1, 6])
    """

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._held: list[Any] = []

    @property
    def is_one_shot(self) -> bool:
        """Whether a second pass would find nothing."""
        return is_one_shot(self._batches)

    @property
    def name(self) -> str:
        """What the batches are called in results: held out or not, all of them had a part in what was made."""
        return str(getattr(self._batches, "name", "batches"))

    @property
    def held(self) -> list[Any]:
        """What the first pass kept; it is made now where nobody has made it."""
        if not self._held:
            for _ in self:
                pass
        if not self._held:
            raise InputError(
                "every fifth batch is held out, from the second on, and there was no second one; give smaller batches, "
                "or held-out data of their own"
            )
        return self._held

    def __iter__(self) -> Iterator[Any]:
        if self._held:
            # A second pass, for whoever gathers in several: what is held out stays so only where the order is the same.
            yield from (batch for index, batch in enumerate(iterate(self._batches)) if index % _EVERY != _WHICH)
            return
        for index, batch in enumerate(iterate(self._batches)):
            if index % _EVERY == _WHICH:
                self._held.append(batch)
            else:
                yield batch

    def __len__(self) -> int:
        total = count_batches(self._batches)
        if total is None:
            raise TypeError("nobody knows how many batches there will be")
        return total - (total + _EVERY - 1 - _WHICH) // _EVERY


@dataclass(frozen=True, kw_only=True)
class Kept:
    """How often a model answers as it should, and how often the original does."""

    measure: str
    samples: int
    hits: int
    #: Of the original; all of them where agreement is measured.
    original_hits: int

    @property
    def share(self) -> float:
        return self.hits / self.samples

    @property
    def lost(self) -> float:
        """The share of samples that was lost against the original; negative where something was won."""
        return (self.original_hits - self.hits) / self.samples


class Judge:
    """Compares models with the original on held-out batches, which are gone through once for every comparison.

    Args:
        measure: ``"auto"`` counts right answers where every batch has labels that the original knows, and agreement
            with the original otherwise.
        losable: The share of answers that may be lost. Where the original itself is right less often than that,
            nothing could be lost, and its accuracy measures nothing.
    """

    def __init__(
        self,
        original: nn.Module,
        data: Any,
        *,
        measure: Kind = "auto",
        losable: float = 0.0,
        input: str | int | None = None,
    ) -> None:
        if is_one_shot(data):
            raise InputError(
                f"data is a {type(data).__name__}, which can be gone through once, and every trial goes through it; "
                "give a list or a DataLoader"
            )
        self.original, self.data, self.measure, self.input = original, data, measure, input
        self.losable = losable

    def __call__(self, model: nn.Module) -> Kept:
        samples = agreed = hits = original_hits = classes = 0
        labelled, foreign = self.measure != "agreement", False
        with torch.no_grad(), borrowed(model), borrowed(self.original):
            for index, batch in enumerate(iterate(self.data)):
                x = input_of(batch, self.input, index)
                own, scores = (scores_of(each, x, index).cpu() for each in (model, self.original))
                best, reference = own.argmax(1), scores.argmax(1)
                sound, known = answered(own), answered(scores)
                samples, classes = samples + len(x), scores.shape[1]
                agreed += int((sound & known & (best == reference)).sum())
                labels = class_labels(batch) if labelled else None
                labelled = labels is not None
                if labels is not None:
                    labels = labels.cpu()
                    foreign = foreign or bool(((labels < 0) | (labels >= classes)).any())
                    hits += int((sound & (best == labels)).sum())
                    original_hits += int((known & (reference == labels)).sum())
        found = _together(labelled, foreign, samples, agreed, hits, original_hits)
        labelled, foreign, samples, agreed, hits, original_hits = found
        if not samples:
            raise InputError("no batches: the iterable given as data is empty")
        if self.measure == "accuracy" and not labelled:
            raise InputError("Drop(measure='accuracy') needs labels in every batch of data; 'agreement' needs none")
        doubt = self._doubt(foreign, original_hits / samples, classes) if labelled else None
        if doubt is not None and self.measure == "accuracy":
            raise InputError(f"Drop(measure='accuracy'): {doubt}; check the labels, or measure='agreement'")
        if doubt is not None:
            warnings.warn(f"agreement is measured instead of accuracy: {doubt}", CalibrationWarning, stacklevel=2)
        if labelled and doubt is None:
            return Kept(measure="accuracy", samples=samples, hits=hits, original_hits=original_hits)
        return Kept(measure="agreement", samples=samples, hits=agreed, original_hits=samples)

    def _doubt(self, foreign: bool, accuracy: float, classes: int) -> str | None:
        """Why what comes with the batches cannot be the labels of this model."""
        if foreign:
            return f"some labels lie outside the {classes} classes of the model"
        # A tenth of the way from guessing to perfection is too little to tell the model's labels from any others.
        guessing = 1 / classes if self.measure == "auto" else 0.0
        least = max(guessing + 0.1 * (1 - guessing) if guessing else 0.0, self.losable)
        if accuracy <= least:
            return f"the original is right on {accuracy:.1%} of the labels, no more than {least:.1%}"
        return None


def _together(labelled: bool, foreign: bool, *counts: int) -> tuple[Any, ...]:
    """What all processes under ``torchrun`` found, each of which has its own share of the data."""
    if rank_and_size()[1] == 1:
        return (labelled, foreign, *counts)
    with process_group(None):
        notes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(notes, (labelled, foreign, *counts))
    sums = map(sum, zip(*(note[2:] for note in notes), strict=True))
    return (all(note[0] for note in notes), any(note[1] for note in notes), *sums)

"""How much of a model's answers a smaller one keeps, on data that had no part in making it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import distributed as dist
from torch import nn

from tensigma.calibration.batches import count_batches, input_of, is_one_shot, iterate
from tensigma.calibration.distributed import process_group, rank_and_size
from tensigma.calibration.guard import borrowed
from tensigma.errors import InputError
from tensigma.planning.answers import class_labels, scores_of

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
    """Compares models with the original on held-out batches, which are gone through once for every comparison."""

    def __init__(
        self, original: nn.Module, data: Any, *, measure: Kind = "auto", input: str | int | None = None
    ) -> None:
        if is_one_shot(data):
            raise InputError(
                f"data is a {type(data).__name__}, which can be gone through once, and every trial goes through it; "
                "give a list or a DataLoader"
            )
        self.original, self.data, self.measure, self.input = original, data, measure, input

    def __call__(self, model: nn.Module) -> Kept:
        samples = agreed = hits = original_hits = 0
        labelled = self.measure != "agreement"
        with torch.inference_mode(), borrowed(model), borrowed(self.original):
            for index, batch in enumerate(iterate(self.data)):
                x = input_of(batch, self.input, index)
                best, reference = (scores_of(each, x, index).argmax(1).cpu() for each in (model, self.original))
                samples += len(x)
                agreed += int((best == reference).sum())
                labels = class_labels(batch) if labelled else None
                labelled = labels is not None
                if labels is not None:
                    hits += int((best == labels.cpu()).sum())
                    original_hits += int((reference == labels.cpu()).sum())
        labelled, samples, agreed, hits, original_hits = _together(labelled, samples, agreed, hits, original_hits)
        if not samples:
            raise InputError("no batches: the iterable given as data is empty")
        if self.measure == "accuracy" and not labelled:
            raise InputError("Drop(measure='accuracy') needs labels in every batch of data; 'agreement' needs none")
        if labelled:
            return Kept(measure="accuracy", samples=samples, hits=hits, original_hits=original_hits)
        return Kept(measure="agreement", samples=samples, hits=agreed, original_hits=samples)


def _together(labelled: bool, *counts: int) -> tuple[Any, ...]:
    """Counts of all processes under ``torchrun``, each of which has its own share of the data."""
    if rank_and_size()[1] == 1:
        return (labelled, *counts)
    with process_group(None):
        notes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(notes, (labelled, *counts))
    return (all(note[0] for note in notes), *map(sum, zip(*(note[1:] for note in notes), strict=True)))

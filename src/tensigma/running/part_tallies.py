"""Figures of numbers, of boxes, and of answers compared by a function; and which tally counts which kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tensigma.running.kinds import Boxes, Kind, Likened, Numbers, Scores
from tensigma.running.part_tally import PartTally
from tensigma.running.precision import Detections, average_precision, same_objects
from tensigma.running.scores_tally import ScoresTally


class NumbersTally(PartTally):
    """Plain numbers: the relative error √(Σ|Δy|² ÷ Σ|y|²), over values of the reference that are finite.

    >>> import torch
    >>> tally = NumbersTally()
    >>> tally.add(torch.tensor([3.0, 4.5]), None, torch.tensor([3.0, 4.0]))
    >>> tally.figures, tally.likeness
    ({'error': 0.1}, 0.9)
    """

    def __init__(self) -> None:
        self._difference = self._energy = 0.0
        self._compared = False

    def add(self, answer: Tensor, labels: Any = None, reference: Tensor | None = None) -> None:
        self.samples += len(answer)
        self.unanswered += int((~answer.isfinite()).reshape(len(answer), -1).any(1).sum())
        if reference is None:
            return
        self._compared = True
        expected = reference.double()
        finite = expected.isfinite()
        self._difference += float((answer.to(expected) - expected)[finite].square().sum())
        self._energy += float(expected[finite].square().sum())

    def merge(self, other: NumbersTally) -> None:
        self.samples += other.samples
        self.unanswered += other.unanswered
        self._compared = self._compared or other._compared
        self._difference += other._difference
        self._energy += other._energy

    @property
    def error(self) -> float | None:
        """The relative error; None without a reference, or if that is 0 throughout and this is not."""
        if not self._compared or (not self._energy and self._difference):
            return None
        return (self._difference / self._energy) ** 0.5 if self._energy else 0.0

    @property
    def likeness(self) -> float | None:
        """1 − the relative error, at least 0."""
        error = self.error
        if not self._compared:
            return None
        return max(0.0, 1.0 - error) if error is not None and error == error else 0.0

    @property
    def figures(self) -> dict[str, float | None]:
        return {"error": self.error}


class BoxesTally(PartTally):
    """Boxes: average precision against the reference's detections, and against labels."""

    def __init__(self, kind: Boxes) -> None:
        self.kind = kind
        self._found: list[Detections] = []
        self._reference: list[Detections] = []
        self._labels: list[Detections] = []
        self.agreed: int = 0
        #: Detections, the reference's or its own, that are certain enough to count.
        self._counted = 0

    def add(self, answer: Any, labels: Any = None, reference: Any = None) -> None:
        found = self.kind.detections(answer)
        self._found += found
        self.samples += len(found)
        if labels is not None and _are_boxes(labels, self.kind):
            self._labels += self.kind.detections(labels, labelled=True)
        if reference is not None:
            expected = [each.above(self.kind.score) for each in self.kind.detections(reference)]
            self._reference += expected
            certain = [each.above(self.kind.score) for each in found]
            self._counted += sum(map(len, (*certain, *expected)))
            pairs = zip(certain, expected, strict=True)
            self.agreed += sum(same_objects(one, other, min(self.kind.thresholds)) for one, other in pairs)

    def merge(self, other: BoxesTally) -> None:
        self.samples += other.samples
        self.agreed += other.agreed
        self._counted += other._counted
        self._found += other._found
        self._reference += other._reference
        self._labels += other._labels

    def _against(self, truths: Sequence[Detections]) -> float | None:
        if len(truths) < self.samples or not self.samples:
            return None
        return average_precision(self._found, truths, self.kind.thresholds)

    @property
    def likeness(self) -> float | None:
        return self._against(self._reference)

    @property
    def accuracy(self) -> float | None:
        return self._against(self._labels)

    @property
    def finds_nothing(self) -> str:
        """What is missing, in words, if the reference is sure of no object in any image; otherwise empty."""
        if not self._reference or any(len(each) for each in self._reference):
            return ""
        return (
            f"the original finds no object with a score of {self.kind.score:g} or more in any of {self.samples:,} "
            "images, so there is no average precision; pass other images, or count less certain objects with "
            f"answers=Boxes(score={self.kind.score / 5:g})"
        )

    @property
    def figures(self) -> dict[str, float | None]:
        # Two models that find nothing anywhere agree about nothing.
        compared = self._counted > 0 and len(self._reference) == self.samples
        return {
            "precision": self.likeness,
            "label_precision": self.accuracy,
            "agreement": self.agreed / self.samples if compared else None,
        }


def _are_boxes(labels: Any, kind: Boxes) -> bool:
    images = labels if isinstance(labels, list | tuple) else [labels]
    return all(isinstance(image, dict) and kind.boxes in image for image in images)


class LikenedTally(PartTally):
    """Answers compared by a function of the user's: the mean likeness over samples.

    If it always says yes or no for each sample, the share of samples that are alike is an agreement.
    """

    def __init__(self, kind: Likened) -> None:
        self.kind = kind
        self._sum = 0.0
        self._compared = False
        self.agreed: int | None = 0

    def add(self, answer: Any, labels: Any = None, reference: Any = None, n_samples: int = 1) -> None:
        self.samples += n_samples
        if reference is not None:
            self._compared = True
            likeness, verdicts = self.kind.likeness(answer, reference)
            self._sum += likeness * n_samples
            self._agree(None if verdicts is None or len(verdicts) != n_samples else int(verdicts.sum()))

    def _agree(self, n_samples: int | None) -> None:
        self.agreed = None if self.agreed is None or n_samples is None else self.agreed + n_samples

    def merge(self, other: LikenedTally) -> None:
        self.samples += other.samples
        self._sum += other._sum
        self._agree(other.agreed)
        self._compared = self._compared or other._compared

    @property
    def likeness(self) -> float | None:
        return self._sum / self.samples if self._compared and self.samples else None

    @property
    def figures(self) -> dict[str, float | None]:
        decided = self._compared and self.agreed is not None and self.samples
        return {"agreement": (self.agreed or 0) / self.samples if decided else None}


def tally_of(kind: Kind) -> PartTally:
    if isinstance(kind, Scores):
        return ScoresTally(kind)
    if isinstance(kind, Numbers):
        return NumbersTally()
    return BoxesTally(kind) if isinstance(kind, Boxes) else LikenedTally(kind)  # type: ignore[arg-type]

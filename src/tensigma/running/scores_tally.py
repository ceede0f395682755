"""Counting class scores: right answers, and answers like another model's, by sample and by position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tensigma.running.kinds import Scores
from tensigma.running.part_tally import PartTally


def answered(scores: Tensor) -> Tensor:
    """Where scores (batch, classes, …) are an answer: the largest score is finite. Others may be −∞, as in masks.

    >>> answered(torch.tensor([[1.0, -torch.inf], [torch.nan, 2.0], [torch.inf, 0.0]])).tolist()
    [True, False, False]
    """
    return scores.amax(1).isfinite()


def right(scores: Tensor, labels: Tensor) -> Tensor:
    """Where the largest score is that of the label.

    >>> right(torch.tensor([[1.0, 0.0], [0.0, 1.0], [torch.nan, 1.0]]), torch.tensor([0, 0, 1])).tolist()
    [True, False, False]
    """
    return answered(scores) & (scores.argmax(1) == labels.to(scores.device))


def alike(scores: Tensor, others: Tensor) -> Tensor:
    """Where two models answer the same class.

    >>> alike(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[3.0, 2.0], [3.0, 2.0]])).tolist()
    [True, False]
    """
    return right(scores, others.argmax(1)) & answered(others).to(scores.device)


class ScoresTally(PartTally):
    """Class scores. A position without a finite largest score is neither right nor like another.

    >>> tally = ScoresTally(Scores())
    >>> tally.add(torch.eye(3), torch.tensor([0, 1, 0]), torch.eye(3))
    >>> tally.likeness, round(tally.accuracy, 3), tally.agreed
    (1.0, 0.667, 3)
    """

    _COUNTS = ("samples", "hits", "hits5", "agreed", "unanswered", "foreign", "positions", "alike", "judged")

    def __init__(self, kind: Scores) -> None:
        self.kind = kind
        self.agreed: int = 0
        #: Positions, those answered like the reference, those with a label, and those that hit it.
        self.positions = self.alike = self.judged = self.hits = self.hits5 = 0
        #: Labels outside the classes of the model.
        self.foreign = self.classes = 0
        #: Whether every batch had labels, and more than five classes.
        self.labelled = self.many = True
        self.compared = self.dense = False
        #: Positions by class of the model and class of the reference, or of the labels: (classes, classes).
        self.beside: dict[str, Tensor] = {}

    def add(self, answer: Tensor, labels: Any = None, reference: Tensor | None = None) -> None:
        scores = self.kind.rows(answer)
        self.dense = self.dense or scores.shape[2] > 1
        self.samples += len(scores)
        self.positions += scores.shape[0] * scores.shape[2]
        self.classes = scores.shape[1]
        self.unanswered += int((~answered(scores)).any(1).sum())
        self.many = self.many and self.classes > 5
        target = self._target(labels, scores)
        if target is None:
            self.labelled = False
        else:
            self._judge(scores, target)
        if reference is not None:
            self.compared = True
            others = self.kind.rows(reference).to(scores.device)
            same = alike(scores, others)
            self.alike += int(same.sum())
            self.agreed += int((same.double().mean(1) >= self.kind.least).sum())
            self._count("reference", scores, torch.where(answered(others), others.argmax(1), -1))

    def _target(self, labels: Any, scores: Tensor) -> Tensor | None:
        """Class numbers as (batch, positions)."""
        if not isinstance(labels, Tensor) or labels.is_floating_point() or not labels.dim():
            return None
        target = labels.to(scores.device).flatten(1) if labels.dim() > 1 else labels.to(scores.device)[:, None]
        return target if target.shape == (scores.shape[0], scores.shape[2]) else None

    def _judge(self, scores: Tensor, target: Tensor) -> None:
        outside = (target < 0) | (target >= self.classes)
        self.foreign += int(outside.sum())
        # In a map such labels mark what is to be left out; that of a single answer is wrong.
        counted = ~outside if self.dense else torch.ones_like(outside)
        self.judged += int(counted.sum())
        self.hits += int((right(scores, target) & counted).sum())
        self._count("labels", scores, torch.where(outside, -1, target))
        if self.many and not self.dense:
            in_top5 = (scores.topk(5, 1).indices == target[:, None]).any(1)
            self.hits5 += int((in_top5 & answered(scores)).sum())

    def _count(self, what: str, scores: Tensor, target: Tensor) -> None:
        if not self.dense:
            return
        chosen = (target >= 0) & answered(scores)
        pairs = scores.argmax(1)[chosen] * self.classes + target[chosen]
        counts = torch.bincount(pairs, minlength=self.classes**2).reshape(self.classes, self.classes).cpu()
        self.beside[what] = self.beside.get(what, 0) + counts

    def merge(self, other: ScoresTally) -> None:
        for name in self._COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.classes = max(self.classes, other.classes)
        self.labelled, self.many = self.labelled and other.labelled, self.many and other.many
        self.compared, self.dense = self.compared or other.compared, self.dense or other.dense
        self.beside |= {what: self.beside.get(what, 0) + counts for what, counts in other.beside.items()}

    @property
    def top1(self) -> float | None:
        """The share of labels hit; None without labels in every batch."""
        return self.hits / self.judged if self.labelled and self.judged else None

    @property
    def top5(self) -> float | None:
        """The share of labels among the first five; None if there are no more classes than that, or many positions."""
        return self.hits5 / self.samples if self.labelled and self.many and self.samples and not self.dense else None

    @property
    def likeness(self) -> float | None:
        return self.alike / self.positions if self.compared else None

    @property
    def accuracy(self) -> float | None:
        return self.top1

    @property
    def figures(self) -> dict[str, float | None]:
        return {
            "top1": self.top1,
            "top5": self.top5,
            "agreement": self.agreed / self.samples if self.compared else None,
            "position_agreement": self.likeness if self.dense else None,
            "iou": mean_iou(self.beside["reference"]) if self.dense and self.compared else None,
            "label_iou": mean_iou(self.beside["labels"]) if self.dense and self.labelled and self.judged else None,
        }


def mean_iou(beside: Tensor) -> float | None:
    """Intersection over union, the mean over classes that occur on either side of (classes, classes) counts.

    >>> mean_iou(torch.tensor([[2, 1], [0, 1]]))
    0.5833333333333333
    """
    shared = beside.diagonal().double()
    union = beside.sum(0) + beside.sum(1) - shared
    return float((shared[union > 0] / union[union > 0]).mean()) if (union > 0).any() else None

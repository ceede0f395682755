"""Counting right answers and answers like another model's."""

from __future__ import annotations

from torch import Tensor


def answered(scores: Tensor) -> Tensor:
    """Which rows of scores are an answer: the largest score is finite. Others may be −∞, as in masks.

    >>> import torch
    >>> answered(torch.tensor([[1.0, -torch.inf], [torch.nan, 2.0], [torch.inf, 0.0]])).tolist()
    [True, False, False]
    """
    return scores.amax(1).isfinite()


def right(scores: Tensor, labels: Tensor) -> Tensor:
    """On which samples the largest score is that of the label.

    >>> import torch
    >>> right(torch.tensor([[1.0, 0.0], [0.0, 1.0], [torch.nan, 1.0]]), torch.tensor([0, 0, 1])).tolist()
    [True, False, False]
    """
    return answered(scores) & (scores.argmax(1) == labels.to(scores.device))


def alike(scores: Tensor, others: Tensor) -> Tensor:
    """On which samples two models answer the same class.

    >>> import torch
    >>> alike(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[3.0, 2.0], [3.0, 2.0]])).tolist()
    [True, False]
    """
    return right(scores, others.argmax(1)) & answered(others).to(scores.device)


class Tally:
    """Counts of one model over batches. A row of scores without a finite maximum is neither right nor like another."""

    def __init__(self) -> None:
        self.samples = self.hits = self.hits5 = self.agreed = self.unanswered = self.classes = 0
        #: Labels outside the classes of the model.
        self.foreign = 0
        #: Whether every batch had labels, and every one more than five classes.
        self.labelled = self.many = True
        self.compared = False

    def add(self, scores: Tensor, labels: Tensor | None = None, reference: Tensor | None = None) -> None:
        """Count a batch; ``reference`` holds the scores of the model that answers are compared with."""
        self.samples += len(scores)
        self.classes = scores.shape[1]
        self.unanswered += int((~answered(scores)).sum())
        self.many = self.many and self.classes > 5
        if labels is None:
            self.labelled = False
        else:
            target = labels.to(scores.device)
            self.hits += int(right(scores, target).sum())
            self.foreign += int(((target < 0) | (target >= self.classes)).sum())
            if self.many:
                in_top5 = (scores.topk(5, 1).indices == target[:, None]).any(1)
                self.hits5 += int((in_top5 & answered(scores)).sum())
        if reference is not None:
            self.compared = True
            self.agreed += int(alike(scores, reference).sum())

    @property
    def top1(self) -> float | None:
        """The share of labels hit; None without labels in every batch."""
        return self.hits / self.samples if self.labelled else None

    @property
    def top5(self) -> float | None:
        """The share of labels among the first five; None if there are no more classes than that."""
        return self.hits5 / self.samples if self.labelled and self.many else None

    @property
    def agreement(self) -> float | None:
        """The share of samples answered like the reference; None without one."""
        return self.agreed / self.samples if self.compared else None

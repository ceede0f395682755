"""Average precision of detections: how well one set of boxes with scores finds another.

Detections of a class are taken in order of their scores, over all images. Each finds the box of that class in its image
with the largest overlap among those not found before, if that is large enough; otherwise it is false. Precision is the
share of detections so far that found a box, recall the share of boxes found so far. The average precision is the area
under the highest precision reached at each recall or beyond, averaged over classes that have boxes to find.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Detections:
    """The boxes found in one image: (n, 4) corners x₁ y₁ x₂ y₂, scores (n), classes (n)."""

    boxes: Tensor
    scores: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.boxes)

    def above(self, score: float) -> Detections:
        """Those whose score is at least ``score``."""
        chosen = self.scores >= score
        return Detections(self.boxes[chosen], self.scores[chosen], self.labels[chosen])


def overlaps(one: Tensor, other: Tensor) -> Tensor:
    """Intersection over union of every box of ``one`` with every box of ``other``, (n, m).

    >>> overlaps(torch.tensor([[0.0, 0.0, 2.0, 2.0]]), torch.tensor([[1.0, 0.0, 2.0, 2.0], [5.0, 5.0, 6.0, 6.0]]))
    tensor([[0.5000, 0.0000]])
    """
    low = torch.maximum(one[:, None, :2], other[None, :, :2])
    high = torch.minimum(one[:, None, 2:], other[None, :, 2:])
    shared = (high - low).clamp_min(0).prod(-1)  # (n, m)
    areas = [(boxes[:, 2:] - boxes[:, :2]).clamp_min(0).prod(-1) for boxes in (one, other)]
    union = areas[0][:, None] + areas[1][None, :] - shared
    return torch.where(union > 0, shared / union, 0.0)


def found(detections: Detections, truth: Detections, iou: float) -> Tensor:
    """Which detections of one image find a box of the same class, the most certain first.

    >>> box = torch.tensor([[0.0, 0.0, 2.0, 2.0]])
    >>> twice = Detections(box.expand(2, 4), torch.tensor([0.6, 0.9]), torch.tensor([1, 1]))
    >>> found(twice, Detections(box, torch.ones(1), torch.tensor([1])), 0.5).tolist()
    [False, True]
    """
    hits = torch.zeros(len(detections), dtype=torch.bool)
    if not len(truth) or not len(detections):
        return hits
    overlap = overlaps(detections.boxes, truth.boxes)
    overlap = torch.where(detections.labels[:, None] == truth.labels[None, :], overlap, -1.0)
    for index in detections.scores.argsort(descending=True, stable=True).tolist():
        best = int(overlap[index].argmax())
        if overlap[index, best] >= iou:
            hits[index] = True
            overlap[:, best] = -1.0  # found once
    return hits


def average_precision(
    detections: Sequence[Detections], truths: Sequence[Detections], iou: Sequence[float] = (0.5,)
) -> float | None:
    """The mean over classes and thresholds ``iou``; None if there is no box to find.

    >>> one = Detections(torch.tensor([[0.0, 0.0, 2.0, 2.0]]), torch.tensor([0.9]), torch.tensor([1]))
    >>> average_precision([one], [one]), average_precision([one], [one.above(1.0)])
    (1.0, None)
    """
    wanted = torch.cat([truth.labels for truth in truths]) if truths else torch.empty(0)
    if not len(wanted):
        return None
    scores = torch.cat([each.scores for each in detections]).double()
    labels = torch.cat([each.labels for each in detections])
    values = []
    for threshold in iou:
        hits = torch.cat([found(each, truth, threshold) for each, truth in zip(detections, truths, strict=True)])
        for label in wanted.unique():
            chosen = labels == label
            order = scores[chosen].argsort(descending=True, stable=True)
            values.append(_area(hits[chosen][order], int((wanted == label).sum())))
    return sum(values) / len(values)


def _area(hits: Tensor, n_boxes: int) -> float:
    """The area under precision against recall, for hits in order of their scores."""
    if not len(hits):
        return 0.0
    precision = hits.double().cumsum(0) / torch.arange(1, len(hits) + 1, dtype=torch.float64)
    best_beyond = precision.flip(0).cummax(0).values.flip(0)
    # Recall grows by 1 / n_boxes at every hit.
    return float(best_beyond[hits].sum() / n_boxes)


def same_objects(one: Detections, other: Detections, iou: float) -> bool:
    """Whether two sets of detections are the same objects: each of either finds one of the other.

    >>> one = Detections(torch.tensor([[0.0, 0.0, 2.0, 2.0]]), torch.tensor([0.9]), torch.tensor([1]))
    >>> same_objects(one, one, 0.5), same_objects(one, one.above(1.0), 0.5)
    (True, False)
    """
    return len(one) == len(other) and bool(found(one, other, iou).all())

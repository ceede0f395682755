"""What text recognition networks say: texts, boxes of text, boxes of parts of a page, and how far two of them agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

#: A box: left, top, right, bottom; and its class.
Box = tuple[float, float, float, float, int]


#: The numbers that stand for a wide and a narrow space in the recogniser.
SPACES = (5710, 6624)


def texts(scores: Tensor, alphabet: Sequence[str] | None = None, *, stripped: bool = False) -> list[Any]:
    """What is read in each line: the best character at every position, repeats and blanks (0) left out.

    Characters are numbers without an ``alphabet``. ``stripped`` leaves out spaces before and after the text.
    """
    results = []
    for row in scores.argmax(-1).tolist():
        numbers = [n for index, n in enumerate(row) if n and (index == 0 or row[index - 1] != n)]
        while stripped and numbers and numbers[-1] in SPACES:
            numbers.pop()
        while stripped and numbers and numbers[0] in SPACES:
            numbers.pop(0)
        known = "" if alphabet is None else "".join(alphabet[n - 1] if n <= len(alphabet) else " " for n in numbers)
        results.append(tuple(numbers) if alphabet is None else known)
    return results


def text_boxes(probabilities: Tensor, threshold: float = 0.3, least: int = 20) -> list[list[Box]]:
    """Boxes around connected text of each page in probabilities (n, 1, h, w)."""
    pages = []
    for page in probabilities[:, 0].numpy():
        labels, _ = ndimage.label(page > threshold)
        found = [(columns, rows) for rows, columns in ndimage.find_objects(labels)]
        boxes = [(c.start, r.start, c.stop, r.stop, 0) for c, r in found]
        pages.append([box for box in boxes if (box[2] - box[0]) * (box[3] - box[1]) >= least])
    return pages


def layout_boxes(
    outputs: Mapping[str, Tensor], height: int = 800, width: int = 608, threshold: float = 0.5
) -> list[list[Box]]:
    """Boxes of the parts of each page: a class score and a distribution of distances to each side, per grid point."""
    tensors = list(outputs.values())
    pages: list[list[Box]] = []
    for index in range(len(tensors[0])):
        candidates = []
        for scores, sides in zip(tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :], strict=True):
            stride = next(s for s in (8, 16, 32, 64) if -(-height // s) * -(-width // s) == scores.shape[1])
            best, kinds = scores[index].max(-1)
            for point in (best > threshold).nonzero()[:, 0].tolist():
                x = (point % -(-width // stride) + 0.5) * stride
                y = (point // -(-width // stride) + 0.5) * stride
                bins = sides[index, point].reshape(4, -1).softmax(-1)
                left, top, right, bottom = (stride * (bins @ torch.arange(bins.shape[1]).float())).tolist()
                candidates.append((float(best[point]), (x - left, y - top, x + right, y + bottom, int(kinds[point]))))
        kept: list[Box] = []
        for _, box in sorted(candidates, key=lambda pair: -pair[0]):
            if all(box[4] != other[4] or overlap(box, other) < 0.5 for other in kept):
                kept.append(box)
        pages.append(kept)
    return pages


def overlap(one: Box, other: Box) -> float:
    """Intersection over union."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    common = max(width, 0) * max(height, 0)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return common / max(sum(areas) - common, 1e-9)


def box_agreement(expected: Sequence[Sequence[Box]], found: Sequence[Sequence[Box]]) -> float:
    """The share of all boxes, of either side, that have a partner of their class on the other with IoU ≥ 0.5."""
    paired = total = 0
    for one, other in zip(expected, found, strict=True):
        free = list(other)
        for box in one:
            match = max((b for b in free if b[4] == box[4]), key=lambda b: overlap(box, b), default=None)
            if match is not None and overlap(box, match) >= 0.5:
                free.remove(match)
                paired += 2
        total += len(one) + len(other)
    return paired / total if total else 1.0


def share_alike(expected: Sequence[Any], found: Sequence[Any]) -> float:
    """The share of equal answers."""
    return float(np.mean([one == other for one, other in zip(expected, found, strict=True)]))

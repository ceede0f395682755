"""Which tensors of an answer are one answer at several resolutions, as the heads of a detector give it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tensigma.running.kinds import Kind, Numbers


def levels(answers: Sequence[Tensor], kinds: Sequence[Kind]) -> list[int]:
    """For each tensor, the number of the first one that it belongs with; its own if it stands alone.

    Those belong together that are plain numbers, as wide as each other along the last axis, or else along the first
    after that of samples, and of different sizes along all others.

    >>> import torch
    >>> shapes = [(1, 800, 10), (1, 200, 10), (1, 800, 32), (1, 200, 32), (1, 5)]
    >>> levels([torch.ones(shape) for shape in shapes], [Numbers()] * 5)
    [0, 0, 2, 2, 4]
    >>> shapes = [(1, 255, 40, 40), (1, 255, 20, 20), (1, 3, 20, 20)]
    >>> levels([torch.ones(shape) for shape in shapes], [Numbers()] * 3)
    [0, 0, 2]
    """
    alone = list(range(len(answers)))
    usable = [index for index in alone if isinstance(kinds[index], Numbers) and answers[index].dim() > 2]
    for axis in (-1, 1):
        found = list(alone)
        for index in usable:
            same = (other for other in usable[: usable.index(index)] if _alike(answers[index], answers[other], axis))
            found[index] = found[next(same, index)]
        if found != alone:
            return found
    return alone


def _alike(one: Tensor, other: Tensor, axis: int) -> bool:
    """Whether two tensors have the same size along ``axis``, and different ones along all others but the first."""
    if one.dim() != other.dim() or one.shape[axis] != other.shape[axis]:
        return False
    rest = [index for index in range(1, one.dim()) if index != axis % one.dim()]
    return all(one.shape[index] != other.shape[index] for index in rest)

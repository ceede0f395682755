"""Helpers for error curves: grids of ranks, and errors of the ranks between those that were solved."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def rank_grid(largest: int, count: int) -> list[int]:
    """At most ``count`` ranks from 1 to ``largest``, denser where they are small.

    >>> rank_grid(5, 9), rank_grid(100, 6)
    ([1, 2, 3, 4, 5], [1, 3, 6, 16, 40, 100])
    """
    if largest <= count:
        return list(range(1, largest + 1))
    return sorted({round(largest ** (step / (count - 1))) for step in range(count)})


def power_law(rank: int, solved: Sequence[tuple[int, float]]) -> float:
    """The error at ``rank``, interpolated linearly in logarithms between the ranks that were solved.

    Below the smallest of them it rises geometrically to 1, which is the error of leaving the layer out.

    >>> solved = [(4, 0.25), (16, 0.01)]
    >>> round(power_law(8, solved), 6), round(power_law(2, solved), 6)
    (0.05, 0.5)
    """
    floor = 1e-12
    smallest, largest_error = solved[0]
    if rank < smallest:
        return max(largest_error, floor) ** (rank / smallest)
    above = next((i for i, (solved_rank, _) in enumerate(solved) if solved_rank >= rank), len(solved) - 1)
    (low, start), (high, end) = solved[max(above - 1, 0)], solved[above]
    if low == high or rank <= low:
        return start if rank <= low else end
    weight = math.log(rank / low) / math.log(high / low)
    return max(start, floor) ** (1 - weight) * max(end, floor) ** weight


def share_lost(energies: Tensor, total: Tensor) -> Tensor:
    """The share of ``total`` beyond the first 1, 2, … energies; zeros if there is no energy at all.

    >>> share_lost(torch.tensor([6.0, 3.0, 1.0]), torch.tensor(10.0)).mul(10).round().tolist()
    [4.0, 1.0, 0.0]
    """
    if not total > 0:
        return torch.zeros_like(energies)
    return (1 - energies.cumsum(0) / total).clamp_min(0)

"""Weights of few bits: a layer's weight on a grid of integers times scales, or in half precision.

A layer stays a plain layer with a floating-point weight. That its weight lies on a grid is noted on the layer, so that
files can hold the integers; copies of the layer carry the note. Whoever reads it gets the grid only if every weight
still lies on it, bit for bit: a layer that was trained or cast since then has none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tensigma.errors import InputError

_NOTE = "weight_grid"
#: Bits of a weight in half precision, which needs no scales.
HALF = 16


@dataclass(frozen=True, eq=False)
class Grid:
    """``weight = scales · integers`` with integers of ``bits`` bits, or, with 16 bits and no scales, half precision.

    Scales are one for each index of the weight's first axis, or one for each of these and each of several equal parts
    of the other axes together, flattened.

    >>> grid = Grid(4, torch.tensor([[0.5], [0.25]]))
    >>> weight = grid.values(torch.tensor([[7, -8], [1, 0]]), (2, 2))
    >>> weight.tolist(), grid.integers(weight).tolist(), grid.integers(weight + 0.1)
    ([[3.5, -4.0], [0.25, 0.0]], [[7, -8], [1, 0]], None)
    """

    bits: int
    scales: Tensor | None = None  # (t, groups), float32

    def __post_init__(self) -> None:
        if (self.scales is None) != (self.bits == HALF) or self.bits not in (*range(2, 9), HALF):
            raise InputError(f"a grid has 2 to 8 bits and scales, or {HALF} bits and none; got {self.bits!r} bits")

    def values(self, integers: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The weight, of this shape, whose integers these are."""
        assert self.scales is not None
        grouped = integers.reshape(*self.scales.shape, -1).to(self.scales)
        return (grouped * self.scales[..., None]).reshape(shape)

    def integers(self, weight: Tensor) -> Tensor | None:
        """The integers of ``weight``, int8 with a row per scale's first axis; None if it does not lie on this grid."""
        if weight.dtype != torch.float32 or self.scales is None:
            return None
        detached = weight.detach().cpu()
        scales = self.scales.cpu()
        if len(detached) != len(scales) or detached[0].numel() % scales.shape[1]:
            return None
        wanted = detached.reshape(*scales.shape, -1) / scales[..., None]
        integers = torch.nan_to_num(wanted).round().clamp(-(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1)
        integers = integers.flatten(1).to(torch.int8)
        return integers if torch.equal(self.values(integers, tuple(weight.shape)), detached) else None

    def holds(self, weight: Tensor) -> bool:
        """Whether every value of ``weight`` lies on this grid."""
        if self.scales is None:
            return weight.dtype == torch.float32 and torch.equal(weight.detach().half().float(), weight.detach())
        return self.integers(weight) is not None


def set_grid_(layer: nn.Module, grid: Grid) -> None:
    """Note on ``layer`` that its weight lies on ``grid``; a weight that does not is refused."""
    if not isinstance(layer.weight, Tensor) or not grid.holds(layer.weight):
        raise InputError(f"the weight of this {type(layer).__name__} does not lie on the grid of {grid.bits} bits")
    setattr(layer, _NOTE, grid)


def grid_of(layer: nn.Module) -> Grid | None:
    """The grid on which the weight of ``layer`` lies, if one was noted and every weight still lies on it.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> grid = Grid(4, torch.ones(2, 1))
    >>> layer.weight.data = grid.values(torch.tensor([[1, 2], [3, -4]]), (2, 2))
    >>> set_grid_(layer, grid)
    >>> grid_of(layer).bits, grid_of(nn.Linear(2, 2))
    (4, None)
    >>> layer.weight.data += 0.5
    >>> grid_of(layer) is None
    True
    """
    grid = getattr(layer, _NOTE, None)
    weight = getattr(layer, "weight", None)
    if not isinstance(grid, Grid) or not isinstance(weight, Tensor):
        return None
    return grid if grid.holds(weight) else None


def has_half_bias(layer: nn.Module) -> bool:
    """Whether a layer has a weight on a grid and beside it a bias that half precision holds, bit for bit."""
    bias = getattr(layer, "bias", None)
    return isinstance(bias, Tensor) and Grid(HALF).holds(bias) and grid_of(layer) is not None


def in_half(values: Tensor) -> Tensor:
    """The nearest numbers of half precision, in the type of ``values``; ``values`` if some are too large for it.

    >>> in_half(torch.tensor([1.0, 0.1])).tolist(), in_half(torch.tensor([1e6, 0.1]))[1] == 0.1
    ([1.0, 0.0999755859375], tensor(True))
    """
    half = values.half()
    return half.to(values) if half.isfinite().all() else values

"""Networks whose weights lie on grids of few bits, by rounding to nearest."""

from __future__ import annotations

from typing import Any

from torch import nn

from tensigma.layers import HALF, TARGETS, Grid, set_grid_


def round_(layer: Any, bits: int, groups: int = 1) -> Grid:
    """Round the weight of ``layer`` to the nearest point of a grid that covers it, and note the grid."""
    weight = layer.weight.detach()
    if bits == HALF:
        grid = Grid(HALF)
        layer.weight.data = weight.half().float()
    else:
        by_group = weight.reshape(len(weight), groups, -1)
        largest = 2 ** (bits - 1) - 1
        scales = by_group.abs().amax(2).clamp_min(1e-12) / largest
        grid = Grid(bits, scales)
        integers = (by_group / scales[..., None]).round().clamp(-largest - 1, largest)
        layer.weight.data = grid.values(integers, tuple(weight.shape))
    set_grid_(layer, grid)
    return grid


def rounded(model: nn.Module, bits: int) -> nn.Module:
    """The same model, every convolution and Linear layer rounded in place."""
    for layer in model.modules():
        if isinstance(layer, TARGETS):
            round_(layer, bits)
    return model


def integers_in_python(packed: list[int], bits: int, count: int) -> list[int]:
    """The slow twin of ``unpack``: one bit after the other."""
    values = []
    for index in range(count):
        value = 0
        for place in range(bits):
            position = index * bits + place
            value += ((packed[position // 8] >> (position % 8)) & 1) << place
        values.append(value - 2**bits if value >= 2 ** (bits - 1) else value)
    return values

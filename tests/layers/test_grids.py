"""Weights on grids: noted, checked bit for bit, and carried by copies."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tensigma.errors import InputError
from tensigma.layers import HALF, Grid, grid_of, set_grid_


def on_grid(layer: nn.Conv2d | nn.Linear, bits: int, seed: int, groups: int = 1) -> Grid:
    rng = torch.Generator().manual_seed(seed)
    n_rows, n_columns = layer.weight.flatten(1).shape
    grid = Grid(bits, torch.rand(n_rows, groups, generator=rng) + 0.01)
    integers = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (n_rows, n_columns), generator=rng)
    layer.weight.data = grid.values(integers, tuple(layer.weight.shape))
    set_grid_(layer, grid)
    found = grid.integers(layer.weight)
    assert found is not None
    assert torch.equal(found, integers.to(torch.int8))
    return grid


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "make", [lambda: nn.Conv2d(4, 6, 3), lambda: nn.Linear(8, 5), lambda: nn.Conv1d(4, 4, 3, groups=2)]
)
def test_integers_come_back_bit_for_bit(make, bits: int, groups: int, seed: int) -> None:
    layer = make()
    on_grid(layer, bits, seed, groups)
    noted = grid_of(layer)
    assert noted is not None
    assert noted.bits == bits
    integers = noted.integers(layer.weight)
    assert integers is not None
    assert torch.equal(noted.values(integers, tuple(layer.weight.shape)), layer.weight)


def test_copies_carry_the_grid_and_state_does_not() -> None:
    layer = nn.Conv2d(4, 6, 3)
    before = set(layer.state_dict())
    on_grid(layer, 4, 0)
    assert grid_of(copy.deepcopy(layer)) is not None
    assert set(layer.state_dict()) == before


@pytest.mark.parametrize("change", [lambda w: w * 1.001, lambda w: w + 1e-6, lambda w: w.clone().fill_(float("nan"))])
def test_a_weight_that_has_left_the_grid_has_none(change) -> None:
    layer = nn.Linear(8, 5)
    on_grid(layer, 4, 0)
    layer.weight.data = change(layer.weight.data)
    assert grid_of(layer) is None
    assert grid_of(layer.double()) is None


def test_half_precision_is_a_grid_without_scales() -> None:
    layer = nn.Linear(8, 5)
    with pytest.raises(InputError, match="does not lie on the grid of 16 bits"):
        set_grid_(layer, Grid(HALF))
    layer.weight.data = layer.weight.data.half().float()
    set_grid_(layer, Grid(HALF))
    assert grid_of(layer) is not None


@pytest.mark.parametrize(("bits", "scales"), [(4, None), (16, torch.ones(2, 1)), (1, torch.ones(2, 1)), (32, None)])
def test_impossible_grids_are_refused(bits: int, scales: torch.Tensor | None) -> None:
    with pytest.raises(InputError, match="a grid has 2 to 8 bits"):
        Grid(bits, scales)

"""Weights of few bits in files: integers packed tightly, with their scales beside them.

The integers of a weight on a grid follow each other without gaps, each in two's complement with its lowest bit first:
eight weights of three bits take three bytes. Half precision is stored as such.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tensigma.errors import InputError, StoreError
from tensigma.files import integer, mapping, record, sequence
from tensigma.layers import HALF, Grid, grid_of, has_half_bias, set_grid_

_SCALES = ".scales"


def _bits(value: Any, where: str) -> Any:
    return value if type(value) is int and value == HALF else integer(2, 8)(value, where)


#: What a manifest says about each packed weight.
PACKED = mapping(record({"bits": _bits, "shape": sequence(integer(1), least=1)}))


def pack(integers: Tensor, bits: int) -> Tensor:
    """Integers of ``bits`` bits as bytes, without gaps.

    >>> pack(torch.tensor([1, -2, 3, 0, -1, -4, 2, 1]), 3).tolist(), pack(torch.tensor([-1, 7, 1]), 4).tolist()
    ([241, 112, 42], [127, 1])
    """
    values = integers.flatten().to(torch.int8).numpy().view(np.uint8)
    planes = np.unpackbits(values[:, None], axis=1, count=bits, bitorder="little")  # (n, bits)
    return torch.from_numpy(np.packbits(planes, bitorder="little"))


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of :func:`pack`: ``count`` integers, as int8.

    >>> unpack(torch.tensor([241, 112, 42], dtype=torch.uint8), 3, 8).tolist()
    [1, -2, 3, 0, -1, -4, 2, 1]
    """
    planes = np.unpackbits(packed.numpy(), count=count * bits, bitorder="little").reshape(count, bits)
    values = np.packbits(planes, axis=1, bitorder="little")[:, 0]
    sign = np.uint8(1 << (bits - 1))
    return torch.from_numpy(((values ^ sign) - sign).view(np.int8))


def grids_in(model: nn.Module, state: Mapping[str, Tensor], aliases: Mapping[str, str]) -> dict[str, Grid]:
    """The grids of all weights in ``state`` that lie on one, and biases in half precision beside them.

    Each is under the first of its names.
    """
    grids: dict[str, Grid] = {}
    for name, layer in model.named_modules():
        key = f"{name}.weight" if name else "weight"
        key = aliases.get(key, key)
        if key in grids or state.get(key) is not getattr(layer, "weight", None):
            continue
        grid = grid_of(layer)
        if grid is not None and key + _SCALES not in state:
            grids[key] = grid
            bias = f"{name}.bias" if name else "bias"
            bias = aliases.get(bias, bias)
            if has_half_bias(layer) and state.get(bias) is layer.bias:
                grids[bias] = Grid(HALF)
    return grids


def packed_state(state: Mapping[str, Tensor], grids: Mapping[str, Grid]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors to store, those on ``grids`` packed, and what :data:`PACKED` accepts about them."""
    tensors, entries = dict(state), {}
    for key, grid in grids.items():
        weight = state[key]
        entries[key] = {"bits": grid.bits, "shape": list(weight.shape)}
        if grid.scales is None:
            tensors[key] = weight.half()
            continue
        integers = grid.integers(weight)
        assert integers is not None
        tensors[key] = pack(integers, grid.bits)
        tensors[key + _SCALES] = _shortened(grid.scales.cpu().contiguous())
    return tensors, entries


def unpacked_state(
    tensors: Mapping[str, Tensor], entries: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Grid]]:
    """The inverse of :func:`packed_state`: weights in single precision, and their grids.

    Sizes are compared with what is stored before any memory is taken.
    """
    state, grids = dict(tensors), {}
    for key, entry in entries.items():
        bits, shape = entry["bits"], tuple(entry["shape"])
        stored, scales = state.pop(key, None), state.pop(key + _SCALES, None)
        if bits == HALF:
            if stored is None or stored.dtype != torch.float16 or tuple(stored.shape) != shape or scales is not None:
                raise StoreError(f"{key!r} is not a weight of shape {shape} in half precision")
            state[key], grids[key] = stored.float(), Grid(HALF)
            continue
        count = math.prod(shape)
        if not _fits(stored, scales, bits, shape):
            raise StoreError(f"{key!r} does not hold {count:,} weights of {bits} bits and their scales")
        assert stored is not None
        assert scales is not None
        grid = Grid(bits, scales.float())
        state[key], grids[key] = grid.values(unpack(stored, bits, count), shape), grid
    return state, grids


def note_grids_(model: nn.Module, grids: Mapping[str, Grid], aliases: Mapping[str, str]) -> None:
    """Note the grid of every weight that has one on the layers it belongs to."""
    layers = dict(model.named_modules())
    for key in (*grids, *(alias for alias, first in aliases.items() if first in grids)):
        name, _, attribute = key.rpartition(".")
        if attribute != "weight":
            continue  # a bias, or another name of the weight of a layer
        try:
            set_grid_(layers[name], grids[aliases.get(key, key)])
        except InputError as error:
            raise StoreError(f"{key!r}: {error}") from None


def _shortened(scales: Tensor) -> Tensor:
    """In half precision if that loses nothing."""
    half = scales.half()
    return half if torch.equal(half.float(), scales) else scales


def _fits(stored: Tensor | None, scales: Tensor | None, bits: int, shape: tuple[int, ...]) -> bool:
    if stored is None or stored.dtype != torch.uint8 or tuple(stored.shape) != (-(-math.prod(shape) * bits // 8),):
        return False
    if scales is None or scales.dtype not in (torch.float16, torch.float32) or scales.ndim != 2:
        return False
    n_rows, n_groups = scales.shape
    return n_rows == shape[0] and n_groups > 0 and math.prod(shape[1:]) % n_groups == 0

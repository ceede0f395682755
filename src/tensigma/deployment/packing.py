"""Weights of few bits in files: integers packed tightly, with their scales behind them.

The integers of a weight on a grid follow each other without gaps, each in two's complement with its lowest bit first:
eight weights of three bits take three bytes. Half precision is stored as such. All of them share one tensor of bytes:
a file names and places every tensor it holds, which took an eighth of that of a ResNet-20 in factors of four bits.
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

#: The tensor that holds everything packed, in the order of the manifest. No parameter can have this name.
PLACE = ".packed"
_SCALES = {2: torch.float16, 4: torch.float32}


def _bits(value: Any, where: str) -> Any:
    return value if type(value) is int and value == HALF else integer(2, 8)(value, where)


#: What a manifest says about each packed tensor: bits, shape, and for a grid of integers the shape of its scales and
#: the bytes of each.
PACKED = mapping(
    record(
        {"bits": _bits, "shape": sequence(integer(1), least=1)},
        {"scales": sequence(integer(1), least=3)},
    )
)


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
        if grid is not None:
            grids[key] = grid
            bias = f"{name}.bias" if name else "bias"
            bias = aliases.get(bias, bias)
            if has_half_bias(layer) and state.get(bias) is layer.bias:
                grids[bias] = Grid(HALF)
    return grids


def packed_state(state: Mapping[str, Tensor], grids: Mapping[str, Grid]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors to store, those on ``grids`` packed into one, and what :data:`PACKED` accepts about them."""
    tensors = {key: tensor for key, tensor in state.items() if key not in grids}
    entries: dict[str, Any] = {}
    parts: list[Tensor] = []
    for key, grid in grids.items():
        weight = state[key]
        entries[key] = {"bits": grid.bits, "shape": list(weight.shape)}
        if grid.scales is None:
            parts.append(_as_bytes(weight.half()))
            continue
        integers = grid.integers(weight)
        assert integers is not None
        scales = _shortened(grid.scales.cpu())
        entries[key]["scales"] = [*scales.shape, scales.itemsize]
        parts += [pack(integers, grid.bits), _as_bytes(scales)]
    if parts:
        tensors[PLACE] = torch.cat(parts)
    return tensors, entries


def unpacked_state(
    tensors: Mapping[str, Tensor], entries: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Grid]]:
    """The inverse of :func:`packed_state`: weights in single precision, and their grids.

    Sizes are compared with what is stored before any memory is taken.
    """
    state: dict[str, Tensor] = {key: tensor for key, tensor in tensors.items() if key != PLACE}
    grids: dict[str, Grid] = {}
    place = tensors.get(PLACE, torch.empty(0, dtype=torch.uint8))
    sizes = [size for key, entry in entries.items() for size in _sizes(key, entry)]
    if place.dtype != torch.uint8 or place.ndim != 1 or len(place) != sum(sizes):
        raise StoreError(
            f"what is packed would take {sum(sizes):,} bytes; {PLACE!r} has shape {tuple(place.shape)} and type "
            f"{place.dtype}"
        )
    parts = iter(place.split(sizes))
    for key, entry in entries.items():
        if key in state:
            raise StoreError(f"{key!r} is stored twice, packed and not")
        bits, shape, integers = entry["bits"], tuple(entry["shape"]), next(parts)
        if bits == HALF:
            state[key], grids[key] = _from_bytes(integers, torch.float16).view(shape).float(), Grid(HALF)
            continue
        n_rows, n_groups, itemsize = entry["scales"]
        scales = _from_bytes(next(parts), _SCALES[itemsize]).view(n_rows, n_groups)
        grid = Grid(bits, scales.float())
        state[key], grids[key] = grid.values(unpack(integers, bits, math.prod(shape)), shape), grid
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


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def _from_bytes(part: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy: a part of the whole need not begin where numbers of ``dtype`` may."""
    return part.clone().view(dtype)


def _sizes(key: str, entry: Mapping[str, Any]) -> list[int]:
    """The bytes of each part of an entry: the numbers, and for a grid of integers its scales."""
    bits, shape, scales = entry["bits"], entry["shape"], entry.get("scales")
    numbers = -(-math.prod(shape) * bits // 8)
    if bits == HALF:
        if scales is not None:
            raise StoreError(f"{key!r} is in half precision, and has scales of shape {scales}")
        return [numbers]
    if scales is None or len(scales) != 3 or scales[2] not in _SCALES:
        raise StoreError(f"{key!r} has {bits} bits, and its scales are {scales}; rows, groups and 2 or 4 are needed")
    if scales[0] != shape[0] or math.prod(shape[1:]) % scales[1]:
        raise StoreError(f"{key!r} of shape {tuple(shape)} cannot have scales of shape {tuple(scales[:2])}")
    return [numbers, math.prod(scales)]

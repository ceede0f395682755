"""What a layer costs in a format, from ranks alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from torch import Tensor, nn

from tensigma.layers.format import Format
from tensigma.layers.geometry import Geometry
from tensigma.layers.grids import HALF, grid_of, has_half_bias

_BYTES_OF_FLOAT = 4
#: Scales of grids, and biases beside weights on them, are stored in half precision where that is exact.
_BYTES_OF_HALF = 2


@dataclass(frozen=True)
class Cost:
    """Parameters stored (bias included), multiply-adds for one sample, and bytes of the parameters in a file.

    >>> Cost(3, 10, 12) + Cost(1, 5, 4)
    Cost(params=4, macs=15, bytes=16)
    """

    params: int
    macs: int
    bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.params + other.params, self.macs + other.macs, self.bytes + other.bytes)


def stage_bits(geometry: Geometry, bits: int) -> int:
    """The bits that the weights of a layer take where a plan says ``bits``.

    Grids have a scale for each index of the weight's first axis. In transposed convolutions these are the inputs, by
    which outputs cannot be rounded one by one, so they take half precision.

    >>> from torch import nn
    >>> stage_bits(Geometry.of(nn.Linear(4, 4)), 3), stage_bits(Geometry.of(nn.ConvTranspose1d(4, 4, 3)), 3)
    (3, 16)
    """
    return HALF if geometry.kind == "conv_transpose" else bits


def _stage_bytes(geometry: Geometry, bits: int | None) -> int:
    """Bytes of the parameters of a layer, with weights of ``bits`` bits and its bias in half precision; None for
    float32.
    """
    weights, rest = geometry.n_weights, geometry.n_params - geometry.n_weights
    if bits is None:
        return _BYTES_OF_FLOAT * (weights + rest)
    width = stage_bits(geometry, bits)
    scales = 0 if width == HALF else _BYTES_OF_HALF * geometry.out_channels
    return -(-weights * width // 8) + scales + _BYTES_OF_HALF * rest


def packed_bytes(layer: nn.Module) -> int | None:
    """Bytes of a layer's weight on its grid: packed integers and scales; None for a weight that is on no grid.

    >>> import torch
    >>> from tensigma.layers import Grid, set_grid_
    >>> layer = nn.Linear(6, 2)
    >>> layer.weight.data.fill_(0.5)[0, 0].item()
    0.5
    >>> packed_bytes(layer), set_grid_(layer, Grid(4, torch.full((2, 1), 0.5))), packed_bytes(layer)
    (None, None, 10)
    """
    grid = grid_of(layer)
    if grid is None:
        return None
    weight = layer.weight
    assert isinstance(weight, Tensor)
    integers = -(-weight.numel() * grid.bits // 8)
    if grid.scales is None:
        return integers
    is_half = bool((grid.scales.half().to(grid.scales) == grid.scales).all())
    return integers + grid.scales.numel() * (_BYTES_OF_HALF if is_half else _BYTES_OF_FLOAT)


def packed_bias_bytes(layer: nn.Module) -> int | None:
    """Bytes of a layer's bias if files hold it in half precision; None otherwise."""
    bias = layer.bias if has_half_bias(layer) else None
    return _BYTES_OF_HALF * bias.numel() if isinstance(bias, Tensor) else None


def cost(
    format: Format | None,
    geometry: Geometry,
    input_size: Sequence[int] = (),
    *,
    bias: bool | None = None,
    bits: int | None = None,
) -> Cost:
    """The cost of a layer in ``format`` (None: dense) for one sample of spatial size ``input_size``.

    For Linear, ``input_size`` is the leading shape after the batch, usually empty. ``bias`` says whether the
    compressed layer has one, if that differs from the original; ``bits`` what its weights take, None for float32.

    >>> from torch import nn
    >>> from tensigma.layers import SVDFormat
    >>> geometry = Geometry.of(nn.Linear(100, 50))
    >>> cost(None, geometry), cost(SVDFormat(10), geometry)
    (Cost(params=5050, macs=5000, bytes=20200), Cost(params=1550, macs=1500, bytes=6200))
    >>> cost(None, geometry, bits=4).bytes
    2700
    """
    stages = _stages(format, geometry, geometry.bias if bias is None else bias, tuple(input_size))
    return sum((Cost(stage.n_params, macs, _stage_bytes(stage, bits)) for stage, macs in stages), start=Cost(0, 0, 0))


# Plans ask for one format with all numbers of bits in turn.
@lru_cache(maxsize=16)
def _stages(
    format: Format | None, geometry: Geometry, bias: bool, size: tuple[int, ...]
) -> tuple[tuple[Geometry, int], ...]:
    """The layers of a format, each with its multiply-adds."""
    geometry = replace(geometry, bias=bias)
    stages = []
    for stage in (geometry,) if format is None else format.stages(geometry).values():
        stages.append((stage, stage.macs_from(size)))
        size = stage.output_size(size)
    return tuple(stages)

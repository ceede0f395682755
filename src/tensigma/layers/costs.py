"""What a layer costs in a format, from ranks alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tensigma.layers.format import Format
from tensigma.layers.geometry import Geometry


@dataclass(frozen=True)
class Cost:
    """Parameters stored (bias included) and multiply-adds for one sample.

    >>> Cost(3, 10) + Cost(1, 5)
    Cost(params=4, macs=15)
    """

    params: int
    macs: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.params + other.params, self.macs + other.macs)


def cost(
    format: Format | None, geometry: Geometry, input_size: Sequence[int] = (), *, bias: bool | None = None
) -> Cost:
    """The cost of a layer in ``format`` (None: dense) for one sample of spatial size ``input_size``.

    For Linear, ``input_size`` is the leading shape after the batch, usually empty. ``bias`` says whether the
    compressed layer has one, if that differs from the original.

    >>> from torch import nn
    >>> from tensigma.layers import SVDFormat
    >>> geometry = Geometry.of(nn.Linear(100, 50))
    >>> cost(None, geometry), cost(SVDFormat(10), geometry)
    (Cost(params=5050, macs=5000), Cost(params=1550, macs=1500))
    """
    if bias is not None:
        geometry = replace(geometry, bias=bias)
    stages = [geometry] if format is None else list(format.stages(geometry).values())
    total, size = Cost(0, 0), tuple(input_size)
    for stage in stages:
        total += Cost(stage.n_params, stage.macs_from(size))
        size = stage.output_size(size)
    return total

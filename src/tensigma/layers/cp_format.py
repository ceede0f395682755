"""CP: pointwise, depthwise along each spatial axis or over all at once, pointwise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from tensigma.layers.format import Compressed, Format, check, register_format
from tensigma.layers.geometry import Geometry
from tensigma.layers.stages import along, axis_groups, depthwise_reason, joined, pointwise, pointwise_kernel
from tensigma.linalg import CPFactors


@register_format
@dataclass(frozen=True)
class CPFormat(Format[CPFactors]):
    """Pointwise into ``rank`` channels, depthwise along each spatial axis (``joint``: over all at once), pointwise.

    Axes on which the kernel has a single tap get no layer of their own.

    >>> from torch import nn
    >>> geometry = Geometry.of(nn.Conv2d(8, 16, 3))
    >>> [(name, stage.kernel_size) for name, stage in CPFormat(4).stages(geometry).items()]
    [('reduce', (1, 1)), ('depth0', (3, 1)), ('depth1', (1, 3)), ('expand', (1, 1))]
    >>> list(CPFormat(4, joint=True).stages(geometry))
    ['reduce', 'depth', 'expand']
    """

    name: ClassVar[str] = "cp"
    factors_type: ClassVar[type] = CPFactors
    rank: int
    joint: bool = False

    @classmethod
    def why_not(cls, geometry: Geometry) -> str | None:
        if geometry.kind == "linear":
            return "CP needs a kernel with spatial taps and Linear has none; use method='svd' for it"
        if geometry.kind == "conv_transpose":
            return "CP cannot carry a transposed convolution; use method='tucker2' or method='svd' for it"
        if geometry.is_depthwise:
            return depthwise_reason(geometry)
        if geometry.groups > 1:
            return f"CP cannot carry groups={geometry.groups}; use method='tucker2' for it"
        return None

    def stages(self, geometry: Geometry) -> dict[str, Geometry]:
        check(self, geometry)
        depthwise = replace(geometry, in_channels=self.rank, out_channels=self.rank, groups=self.rank, bias=False)
        if self.joint:
            middle = {"depth": depthwise}
        else:
            middle = {f"depth{axes[0]}": along(depthwise, axes) for axes in axis_groups(geometry.kernel_size)}
        return {
            "reduce": pointwise(geometry, geometry.in_channels, self.rank),
            **middle,
            "expand": pointwise(geometry, self.rank, geometry.out_channels, bias=geometry.bias),
        }

    @classmethod
    def kernels(cls, factors: CPFactors) -> list[Tensor]:
        n_spatial = len(factors.taps)
        if factors.joint:
            (taps,) = factors.spatial  # (k, r)
            depthwise = [taps.T.reshape(-1, 1, 1, *factors.taps)]
        else:
            depthwise = []
            for axes in axis_groups(factors.taps):
                # Axes with one tap only scale the channels; their factors go into the first layer.
                taps = math.prod((factors.spatial[axis] for axis in axes[1:]), start=factors.spatial[axes[0]])  # (k, r)
                shape = [1] * n_spatial
                shape[axes[0]] = factors.taps[axes[0]]
                depthwise.append(taps.T.reshape(-1, 1, 1, *shape))
        return [
            pointwise_kernel(factors.in_factor.T, n_spatial),
            *depthwise,
            pointwise_kernel(factors.out_factor, n_spatial),
        ]

    def factors(self, kernels: Sequence[Tensor], geometry: Geometry) -> tuple[CPFactors, ...]:
        reduce, *depthwise, expand = kernels
        if self.joint:
            spatial = [depthwise[0].flatten(1).T]
        else:
            spatial = [reduce.new_ones(1, self.rank)] * geometry.n_spatial
            for axes, kernel in zip(axis_groups(geometry.kernel_size), depthwise, strict=True):
                spatial[axes[0]] = kernel.flatten(1).T
        out_factor, in_factor = expand[0].flatten(1), reduce[0].flatten(1).T
        return (CPFactors(out_factor, in_factor, tuple(spatial), geometry.kernel_size, self.joint),)

    @classmethod
    def guesses(cls, names: Sequence[str], stages: Sequence[Geometry]) -> Iterator[Compressed]:
        axes = [axis for axis in range(stages[0].n_spatial) if f"depth{axis}" in names]
        joint = list(names) == ["reduce", "depth", "expand"]
        if joint:
            whole = stages[1]
        elif axes and list(names) == ["reduce", *(f"depth{axis}" for axis in axes), "expand"]:
            whole = joined(axes, stages[1:-1])
        else:
            return
        reduce, expand = stages[0], stages[-1]
        geometry = replace(
            whole, in_channels=reduce.in_channels, out_channels=expand.out_channels, groups=1, bias=expand.bias
        )
        yield Compressed(cls(reduce.out_channels, joint), geometry)

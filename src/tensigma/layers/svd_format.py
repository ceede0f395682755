"""SVD: two layers, the first with all taps, the second pointwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from tensigma.layers.format import Compressed, Format, check, register_format
from tensigma.layers.geometry import Geometry
from tensigma.layers.stages import depthwise_reason, pointwise, pointwise_kernel
from tensigma.linalg import SVDFactors


@register_format
@dataclass(frozen=True)
class SVDFormat(Format[SVDFactors]):
    """A full-size convolution into ``rank`` channels, then a pointwise one; for Linear, two Linear layers.

    >>> from torch import nn
    >>> stages = SVDFormat(4).stages(Geometry.of(nn.Conv2d(8, 16, 3)))
    >>> [(name, stage.kernel_size) for name, stage in stages.items()]
    [('reduce', (3, 3)), ('expand', (1, 1))]
    """

    name: ClassVar[str] = "svd"
    factors_type: ClassVar[type] = SVDFactors
    rank: int

    @classmethod
    def why_not(cls, geometry: Geometry) -> str | None:
        return depthwise_reason(geometry)

    def stages(self, geometry: Geometry) -> dict[str, Geometry]:
        check(self, geometry)
        rank = self.rank * geometry.groups
        return {
            "reduce": replace(geometry, out_channels=rank, bias=False),
            "expand": pointwise(geometry, rank, geometry.out_channels, bias=geometry.bias),
        }

    @classmethod
    def kernels(cls, factors: SVDFactors) -> list[Tensor]:
        return [factors.right[None], pointwise_kernel(factors.left, factors.right.ndim - 2)]

    def factors(self, kernels: Sequence[Tensor], geometry: Geometry) -> tuple[SVDFactors, ...]:
        reduce, expand = kernels
        return tuple(SVDFactors(left.flatten(1), right) for left, right in zip(expand, reduce, strict=True))

    @classmethod
    def guesses(cls, names: Sequence[str], stages: Sequence[Geometry]) -> Iterator[Compressed]:
        if list(names) == ["reduce", "expand"]:
            reduce, expand = stages
            geometry = replace(reduce, out_channels=expand.out_channels, bias=expand.bias)
            yield Compressed(cls(reduce.out_channels // reduce.groups), geometry)

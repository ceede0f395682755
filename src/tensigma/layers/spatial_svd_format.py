"""Spatial SVD: a convolution along the height, then one along the width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from tensigma.layers.format import Compressed, Format, check, register_format
from tensigma.layers.geometry import Geometry
from tensigma.layers.stages import along, joined, two_axes_reason
from tensigma.linalg import SpatialSVDFactors


@register_format
@dataclass(frozen=True)
class SpatialSVDFormat(Format[SpatialSVDFactors]):
    """An h×1 convolution into ``rank`` channels, then a 1×w convolution; each has the stride and padding of its axis.

    >>> from torch import nn
    >>> stages = SpatialSVDFormat(4).stages(Geometry.of(nn.Conv2d(8, 16, (3, 5), stride=(2, 1))))
    >>> [(name, stage.kernel_size, stage.stride) for name, stage in stages.items()]
    [('vertical', (3, 1), (2, 1)), ('horizontal', (1, 5), (1, 1))]
    """

    name: ClassVar[str] = "spatial-svd"
    factors_type: ClassVar[type] = SpatialSVDFactors
    rank: int

    @classmethod
    def why_not(cls, geometry: Geometry) -> str | None:
        return two_axes_reason("spatial SVD", geometry)

    def stages(self, geometry: Geometry) -> dict[str, Geometry]:
        check(self, geometry)
        rank = self.rank * geometry.groups
        return {
            "vertical": replace(along(geometry, [0]), out_channels=rank, bias=False),
            "horizontal": replace(along(geometry, [1]), in_channels=rank),
        }

    @classmethod
    def kernels(cls, factors: SpatialSVDFactors) -> list[Tensor]:
        return [factors.vertical[None, :, :, :, None], factors.horizontal[None, :, :, None, :]]

    def factors(self, kernels: Sequence[Tensor], geometry: Geometry) -> tuple[SpatialSVDFactors, ...]:
        groups = zip(*kernels, strict=True)
        return tuple(SpatialSVDFactors(vertical[..., 0], horizontal[..., 0, :]) for vertical, horizontal in groups)

    @classmethod
    def guesses(cls, names: Sequence[str], stages: Sequence[Geometry]) -> Iterator[Compressed]:
        if list(names) == ["vertical", "horizontal"]:
            vertical, horizontal = stages
            geometry = replace(joined([0, 1], stages), out_channels=horizontal.out_channels, bias=horizontal.bias)
            yield Compressed(cls(vertical.out_channels // vertical.groups), geometry)

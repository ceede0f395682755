"""Tensor train: pointwise, a convolution along the height, one along the width, pointwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from tensigma.layers.format import Compressed, Format, check, register_format
from tensigma.layers.geometry import Geometry
from tensigma.layers.stages import along, joined, pointwise, pointwise_kernel, two_axes_reason
from tensigma.linalg import TensorTrainFactors


@register_format
@dataclass(frozen=True)
class TensorTrainFormat(Format[TensorTrainFactors]):
    """Pointwise into ``rank_in`` channels, h×1 into ``rank_mid``, 1×w into ``rank_out``, pointwise again.

    >>> from torch import nn
    >>> stages = TensorTrainFormat(5, 4, 3).stages(Geometry.of(nn.Conv2d(8, 16, 3)))
    >>> [(name, stage.in_channels, stage.out_channels, stage.kernel_size) for name, stage in stages.items()]
    [('reduce', 8, 3, (1, 1)), ('vertical', 3, 4, (3, 1)), ('horizontal', 4, 5, (1, 3)), ('expand', 5, 16, (1, 1))]
    """

    name: ClassVar[str] = "tensor-train"
    factors_type: ClassVar[type] = TensorTrainFactors
    rank_out: int
    rank_mid: int
    rank_in: int

    @classmethod
    def why_not(cls, geometry: Geometry) -> str | None:
        return two_axes_reason("tensor train", geometry)

    def stages(self, geometry: Geometry) -> dict[str, Geometry]:
        check(self, geometry)
        rank_out, rank_mid, rank_in = (rank * geometry.groups for rank in self.ranks)
        return {
            "reduce": pointwise(geometry, geometry.in_channels, rank_in),
            "vertical": replace(along(geometry, [0]), in_channels=rank_in, out_channels=rank_mid, bias=False),
            "horizontal": replace(along(geometry, [1]), in_channels=rank_mid, out_channels=rank_out, bias=False),
            "expand": pointwise(geometry, rank_out, geometry.out_channels, bias=geometry.bias),
        }

    @classmethod
    def kernels(cls, factors: TensorTrainFactors) -> list[Tensor]:
        return [
            pointwise_kernel(factors.in_basis.T, 2),
            factors.vertical[None, :, :, :, None],
            factors.horizontal[None, :, :, None, :],
            pointwise_kernel(factors.out_basis, 2),
        ]

    def factors(self, kernels: Sequence[Tensor], geometry: Geometry) -> tuple[TensorTrainFactors, ...]:
        return tuple(
            TensorTrainFactors(expand.flatten(1), horizontal[..., 0, :], vertical[..., 0], reduce.flatten(1).T)
            for reduce, vertical, horizontal, expand in zip(*kernels, strict=True)
        )

    @classmethod
    def guesses(cls, names: Sequence[str], stages: Sequence[Geometry]) -> Iterator[Compressed]:
        if list(names) == ["reduce", "vertical", "horizontal", "expand"]:
            reduce, vertical, horizontal, expand = stages
            ranks = (stage.out_channels // reduce.groups for stage in (horizontal, vertical, reduce))
            geometry = replace(
                joined([0, 1], [vertical, horizontal]),
                in_channels=reduce.in_channels,
                out_channels=expand.out_channels,
                bias=expand.bias,
            )
            yield Compressed(cls(*ranks), geometry)

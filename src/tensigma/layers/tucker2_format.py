"""Tucker-2: pointwise, a small core convolution, pointwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from tensigma.layers.format import Compressed, Format, check, register_format
from tensigma.layers.geometry import Geometry
from tensigma.layers.stages import depthwise_reason, pointwise, pointwise_kernel
from tensigma.linalg import Tucker2Factors


@register_format
@dataclass(frozen=True)
class Tucker2Format(Format[Tucker2Factors]):
    """Pointwise into ``rank_in`` channels, a small core convolution into ``rank_out``, pointwise again.

    >>> from torch import nn
    >>> stages = Tucker2Format(4, 2).stages(Geometry.of(nn.Conv2d(8, 16, 3)))
    >>> [(name, stage.in_channels, stage.out_channels) for name, stage in stages.items()]
    [('reduce', 8, 2), ('core', 2, 4), ('expand', 4, 16)]
    """

    name: ClassVar[str] = "tucker2"
    factors_type: ClassVar[type] = Tucker2Factors
    rank_out: int
    rank_in: int

    @classmethod
    def why_not(cls, geometry: Geometry) -> str | None:
        if geometry.kind == "linear":
            return "Tucker-2 needs a kernel with spatial taps and Linear has none; use method='svd' for it"
        return depthwise_reason(geometry)

    def stages(self, geometry: Geometry) -> dict[str, Geometry]:
        check(self, geometry)
        rank_out, rank_in = self.rank_out * geometry.groups, self.rank_in * geometry.groups
        # No layer before the core has a bias, so padding the mixed channels equals mixing the padded channels.
        return {
            "reduce": pointwise(geometry, geometry.in_channels, rank_in),
            "core": replace(geometry, in_channels=rank_in, out_channels=rank_out, bias=False),
            "expand": pointwise(geometry, rank_out, geometry.out_channels, bias=geometry.bias),
        }

    @classmethod
    def kernels(cls, factors: Tucker2Factors) -> list[Tensor]:
        n_spatial = factors.core.ndim - 2
        return [
            pointwise_kernel(factors.in_basis.T, n_spatial),
            factors.core[None],
            pointwise_kernel(factors.out_basis, n_spatial),
        ]

    def factors(self, kernels: Sequence[Tensor], geometry: Geometry) -> tuple[Tucker2Factors, ...]:
        groups = zip(*kernels, strict=True)
        return tuple(Tucker2Factors(expand.flatten(1), core, reduce.flatten(1).T) for reduce, core, expand in groups)

    @classmethod
    def guesses(cls, names: Sequence[str], stages: Sequence[Geometry]) -> Iterator[Compressed]:
        if list(names) == ["reduce", "core", "expand"]:
            reduce, core, expand = stages
            geometry = replace(core, in_channels=reduce.in_channels, out_channels=expand.out_channels, bias=expand.bias)
            yield Compressed(cls(core.out_channels // core.groups, core.in_channels // core.groups), geometry)

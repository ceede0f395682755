"""A layer that keeps its kernel, which is only rounded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tensigma.layers.format import Compressed, Format, register_format
from tensigma.layers.geometry import Geometry
from tensigma.linalg import DenseFactors


@register_format
@dataclass(frozen=True)
class DenseFormat(Format[DenseFactors]):
    """One layer like the original, except for a bias that it may gain. Any layer can take it.

    >>> from torch import nn
    >>> list(DenseFormat().stages(Geometry.of(nn.Conv2d(8, 16, 3))))
    ['rounded']
    """

    name: ClassVar[str] = "dense"
    factors_type: ClassVar[type] = DenseFactors
    # One layer in a container is nothing special.
    is_noted: ClassVar[bool] = True

    @classmethod
    def why_not(cls, geometry: Geometry) -> str | None:
        return None

    def stages(self, geometry: Geometry) -> dict[str, Geometry]:
        return {"rounded": geometry}

    @classmethod
    def kernels(cls, factors: DenseFactors) -> list[Tensor]:
        return [factors.kernel[None]]

    def factors(self, kernels: Sequence[Tensor], geometry: Geometry) -> tuple[DenseFactors, ...]:
        return tuple(map(DenseFactors, kernels[0]))

    @classmethod
    def guesses(cls, names: Sequence[str], stages: Sequence[Geometry]) -> Iterator[Compressed]:
        if list(names) == ["rounded"]:
            yield Compressed(cls(), stages[0])

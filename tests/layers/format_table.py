"""All formats in one table, and every layer of the shared cases with every format. A new format is one row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import DEPTHWISE, GEOMETRIES, LayerCase
from tensigma.layers import (
    CPFormat,
    DenseFormat,
    Format,
    Geometry,
    SpatialSVDFormat,
    SVDFormat,
    TensorTrainFormat,
    Tucker2Format,
    axis_groups,
)
from tensigma.linalg import (
    CPFactors,
    DenseFactors,
    Factors,
    SpatialSVDFactors,
    SVDFactors,
    TensorTrainFactors,
    Tucker2Factors,
)

Draw = Callable[..., Tensor]


@dataclass(frozen=True)
class FormatRow:
    """A format, random factors of it for one group of a layer, and the layers it accepts."""

    id: str
    format: Format
    #: Takes a function that draws a random tensor of some shape, and the shape of the kernel.
    draw_factors: Callable[[Draw, int, int, tuple[int, ...]], Factors]
    #: Written here a second time, apart from ``why_not``.
    accepts: Callable[[Geometry], bool]
    #: Depthwise convolutions are refused by all decompositions.
    accepts_depthwise: bool = False

    def factors(self, geometry: Geometry, seed: int = 0) -> tuple[Factors, ...]:
        """Random factors in float64, one set for each group."""
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        t, s, *taps = geometry.kernel_shape
        return tuple(self.draw_factors(draw, t, s, tuple(taps)) for _ in range(geometry.groups))


def _cp_factors(draw: Draw, t: int, s: int, taps: tuple[int, ...]) -> CPFactors:
    # Factors of axes that get no layer are ones, so that the layers hold all there is to know.
    leading = {axes[0] for axes in axis_groups(taps)}
    spatial = [draw(k, 4) if axis in leading else torch.ones(k, 4).double() for axis, k in enumerate(taps)]
    return CPFactors(draw(t, 4), draw(s, 4), tuple(spatial), taps)


def _joint_factors(draw: Draw, t: int, s: int, taps: tuple[int, ...]) -> CPFactors:
    return CPFactors(draw(t, 4), draw(s, 4), (draw(torch.Size(taps).numel(), 4),), taps, joint=True)


def _two_axes(geometry: Geometry) -> bool:
    return geometry.kind == "conv" and geometry.n_spatial == 2 and min(geometry.kernel_size) > 1


TABLE = [
    FormatRow(
        "svd",
        SVDFormat(2),
        lambda draw, t, s, taps: SVDFactors(draw(t, 2), draw(2, s, *taps)),
        accepts=lambda geometry: True,
    ),
    FormatRow(
        "tucker2",
        Tucker2Format(3, 2),
        lambda draw, t, s, taps: Tucker2Factors(draw(t, 3), draw(3, 2, *taps), draw(s, 2)),
        accepts=lambda geometry: geometry.kind != "linear",
    ),
    FormatRow(
        "cp",
        CPFormat(4),
        _cp_factors,
        accepts=lambda geometry: geometry.kind == "conv" and geometry.groups == 1,
    ),
    FormatRow(
        "cp-joint",
        CPFormat(4, joint=True),
        _joint_factors,
        accepts=lambda geometry: geometry.kind == "conv" and geometry.groups == 1,
    ),
    FormatRow(
        "spatial-svd",
        SpatialSVDFormat(3),
        lambda draw, t, s, taps: SpatialSVDFactors(draw(3, s, taps[0]), draw(t, 3, taps[1])),
        accepts=_two_axes,
    ),
    FormatRow(
        "tensor-train",
        TensorTrainFormat(4, 3, 2),
        lambda draw, t, s, taps: TensorTrainFactors(draw(t, 4), draw(4, 3, taps[1]), draw(3, 2, taps[0]), draw(s, 2)),
        accepts=_two_axes,
    ),
    FormatRow(
        "dense",
        DenseFormat(),
        lambda draw, t, s, taps: DenseFactors(draw(t, s, *taps)),
        accepts=lambda geometry: True,
        accepts_depthwise=True,
    ),
]
ROWS = [pytest.param(row, id=row.id) for row in TABLE]


def _pairs(cases: Iterable[Any], keep: Callable[[FormatRow, Geometry], bool]) -> list[Any]:
    return [
        pytest.param(case.values[0], row, id=f"{case.id}-{row.id}")
        for case, row in itertools.product(cases, TABLE)
        if keep(row, Geometry.of(case.values[0].layer()))
    ]


#: Every layer with every format that accepts it, and with every format that refuses it, as (case, row).
ACCEPTED = [
    *_pairs(GEOMETRIES, lambda row, geometry: row.accepts(geometry)),
    *_pairs(DEPTHWISE, lambda row, _: row.accepts_depthwise),
]
REFUSED = [
    *_pairs(GEOMETRIES, lambda row, geometry: not row.accepts(geometry)),
    *_pairs(DEPTHWISE, lambda row, _: not row.accepts_depthwise),
]


def case_of(id: str) -> LayerCase:
    """The layer of this id in the shared cases."""
    (case,) = (case.values[0] for case in [*GEOMETRIES, *DEPTHWISE] if case.id == id)
    assert isinstance(case, LayerCase)
    return case


def tensors_of(factors: Factors) -> list[Tensor]:
    """All tensors that factors store, in the order of their fields."""
    values = [getattr(factors, field.name) for field in fields(factors)]  # type: ignore[arg-type]
    flat = itertools.chain.from_iterable(value if isinstance(value, tuple) else [value] for value in values)
    return [value for value in flat if isinstance(value, Tensor)]

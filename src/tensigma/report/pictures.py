"""Layers as columns and as small curves: positions of the marks, which the templates draw."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tensigma.compression import LayerReport, Report
from tensigma.report import numbers
from tensigma.report.charts import Tick

#: Size of one small curve, in the units of its SVG.
WIDTH, HEIGHT = 120, 60
# The first rank of these limits the output directions, which is what a spectrum counts. That of spatial SVD does not.
_LIMITS_OUTPUTS = ("svd", "tucker2", "cp", "cp-joint", "deflation", "tensor-train")


@dataclass(frozen=True, kw_only=True)
class Column:
    """One layer among others; heights in percent of the panel, None if there is nothing to draw."""

    layer: LayerReport
    before: float
    after: float
    error: float | None
    weight_error: float | None


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Parameters and errors of all layers, each panel with its own ticks (in percent of its height)."""

    columns: tuple[Column, ...]
    size_ticks: tuple[Tick, ...]
    error_ticks: tuple[Tick, ...]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """How the error of one layer falls with its rank, and where the compressed layer is."""

    layer: LayerReport
    #: Corners of the area below the curve, in SVG notation.
    area: str
    line: str
    #: The compressed layer; None if it has no point in this picture.
    dot: tuple[float, float] | None
    #: Drawn at the right edge instead of a dot, in SVG notation, if the rank is larger than all that are shown.
    arrow: str | None
    #: The same in words.
    beyond: str | None
    #: The whole curve in words.
    label: str


def columns(report: Report) -> Columns:
    """Every layer's parameters before and after, and its errors."""
    sizes = ticks(max((layer.before.params for layer in report.layers), default=0))
    errors = [value for layer in report.layers for value in (layer.error, layer.frobenius_error) if value is not None]
    scale = ticks(max(errors, default=0.0))

    def share(value: float | None) -> float | None:
        return None if value is None else 100 * value / scale[-1]

    return Columns(
        columns=tuple(
            Column(
                layer=layer,
                before=100 * layer.before.params / sizes[-1],
                after=100 * layer.after.params / sizes[-1],
                error=share(layer.error),
                weight_error=share(layer.frobenius_error),
            )
            for layer in report.layers
        ),
        size_ticks=_places(sizes, numbers.short),
        error_ticks=_places(scale, lambda value: f"{value:g}"),
    )


def curves(report: Report) -> list[Curve]:
    """The spectrum of every layer that has one."""
    return [_curve(layer, report.spectra[layer.name]) for layer in report.layers if layer.name in report.spectra]


def ticks(largest: float, most: int = 4) -> list[float]:
    """Round numbers from 0 to the first that is at least ``largest``, few of them.

    >>> ticks(36_864), ticks(0.43), ticks(0)
    ([0.0, 10000.0, 20000.0, 30000.0, 40000.0], [0.0, 0.2, 0.4, 0.6], [0.0, 1.0])
    """
    if largest <= 0:
        return [0.0, 1.0]
    magnitude = 10.0 ** math.floor(math.log10(largest))
    step = next(
        factor * magnitude
        for factor in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 2.5, 5.0)
        if largest <= most * factor * magnitude
    )
    return [round(step * index, 10) for index in range(math.ceil(largest / step - 1e-9) + 1)]


def _places(values: list[float], words: Callable[[float], str]) -> tuple[Tick, ...]:
    return tuple(Tick(100 * value / values[-1], words(value)) for value in values)


def _curve(layer: LayerReport, spectrum: dict[str, list[float]]) -> Curve:
    ranks, errors = spectrum["rank"], spectrum["error"]
    full = max(ranks[-1], 1)

    def place(rank: float, error: float) -> tuple[float, float]:
        return round(WIDTH * rank / full, 1), round(HEIGHT * (1 - min(error, 1.0)), 1)

    points = " ".join("{},{}".format(*place(*point)) for point in zip(ranks, errors, strict=True))
    rank, error = (layer.ranks or (0,))[0], _spectrum_error(layer)
    # CP may have more terms than there are output directions.
    comparable = bool(layer.ranks) and layer.method in _LIMITS_OUTPUTS
    outside = comparable and rank > full
    spot = None if not comparable or error is None else place(min(rank, full), error)
    enough = next((rank for rank, error in zip(ranks, errors, strict=True) if error <= 0.1), full)
    label = f"{layer.name}: {enough:g} of {full:g} directions leave an error of 0.1 or less"
    if layer.ranks and error is not None:
        label += f"; {layer.method} {' × '.join(map(str, layer.ranks))} has {error:.3f}"
    if outside:
        label += f"; rank {rank} lies beyond the {full:g} shown"
    return Curve(
        layer=layer,
        area=f"0,{HEIGHT} {points} {WIDTH},{HEIGHT}",
        line=points,
        dot=None if outside else spot,
        arrow=_arrow(*spot) if outside and spot else None,
        beyond=f"beyond the {full:g} shown" if outside else None,
        label=label,
    )


def _arrow(x: float, y: float) -> str:
    """A triangle that points to the right, its tip a little past ``x``."""
    return f"M{x - 5:g} {y - 4.5:g}L{x + 4:g} {y:g}L{x - 5:g} {y + 4.5:g}Z"


def _spectrum_error(layer: LayerReport) -> float | None:
    """The error under the norm of the spectrum, if the report has it."""
    if layer.norm in ("centred", "sigma"):
        return layer.error
    return layer.frobenius_error if layer.norm == "frobenius" else None

"""Positions of the marks of a chart, which the templates draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tensigma.report.comparison import Run


@dataclass(frozen=True)
class Tick:
    """A tick of an axis: its place and its label."""

    place: float
    label: str


@dataclass(frozen=True)
class Mark:
    """One run in the chart."""

    x: float
    y: float
    label: str


@dataclass(frozen=True)
class Series:
    """The runs of one series, from left to right."""

    name: str
    marks: tuple[Mark, ...]

    @property
    def points(self) -> str:
        """The line through the marks, in SVG notation."""
        return " ".join(f"{mark.x:.1f},{mark.y:.1f}" for mark in self.marks)


@dataclass(frozen=True)
class LineChart:
    """Accuracy (or agreement) against compression rate, in the units of an SVG of this size."""

    what: str
    series: tuple[Series, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    #: Height of the line for the original, if known.
    reference: float | None
    width: int = 560
    height: int = 320
    left: int = 66
    right: int = 14
    top: int = 14
    bottom: int = 44


def line_chart(runs: Sequence[Run], original: float | None) -> LineChart | None:
    """The chart of several runs; None if there are fewer than two to draw."""
    what = "top1" if all(run.top1 is not None for run in runs) else "agreement"
    values = [(run, getattr(run, what)) for run in runs if getattr(run, what) is not None]
    if len(values) < 2:
        return None
    size = LineChart(what=what, series=(), x_ticks=(), y_ticks=(), reference=None)
    reference = (original if what == "top1" else 1.0) or None
    low_x, high_x = min(run.rate for run, _ in values), max(run.rate for run, _ in values)
    low_x, high_x = low_x / 1.12, high_x * 1.12
    # A whole number of steps below 1, so that the lowest line of the grid is the edge of the frame.
    lowest = min(value for _, value in values)
    low_y = min(0.9, math.floor(10 * lowest) / 10 if lowest > 0.5 else math.floor(5 * lowest) / 5)

    def x(rate: float) -> float:
        share = math.log(rate / low_x) / math.log(high_x / low_x)
        return size.left + share * (size.width - size.left - size.right)

    def y(value: float) -> float:
        share = (value - low_y) / (1.0 - low_y)
        return size.height - size.bottom - share * (size.height - size.top - size.bottom)

    series = []
    for name in dict.fromkeys(run.series for run, _ in values):
        in_series = sorted(((run, value) for run, value in values if run.series == name), key=lambda pair: pair[0].rate)
        marks = tuple(
            Mark(x(run.rate), y(value), f"{name}: {value:.1%} at {run.rate:.2f}×") for run, value in in_series
        )
        series.append(Series(name, marks))
    return LineChart(
        what=what,
        series=tuple(series),
        x_ticks=tuple(Tick(x(rate), f"{rate:g}×") for rate in _rates(low_x, high_x)),
        y_ticks=tuple(Tick(y(value), f"{100 * value:.0f} %") for value in _shares(low_y)),
        reference=None if reference is None else y(reference),
    )


def _rates(low: float, high: float) -> list[float]:
    """Round rates within the range, at most seven of them.

    >>> _rates(1.8, 11)
    [2, 3, 4, 5, 7, 10]
    """
    round_rates = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200]
    inside = [rate for rate in round_rates if low <= rate <= high]
    if high / low > 2.5:
        inside = [rate for rate in inside if rate not in (1.2, 2.5)]
    return inside[:: max(1, math.ceil(len(inside) / 7))]


def _shares(low: float) -> list[float]:
    """Round shares from ``low`` to 1, five or so.

    >>> _shares(0.9), _shares(0.0)
    ([0.9, 0.92, 0.94, 0.96, 0.98, 1.0], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    """
    step = next(step for step in (0.02, 0.05, 0.1, 0.2) if (1 - low) / step < 6.5 or step == 0.2)
    count = math.floor((1 - low) / step + 1e-9)
    return [round(1 - step * index, 4) for index in range(count, -1, -1)]

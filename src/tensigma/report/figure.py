"""Lines over one or several pairs of axes, as SVG or PNG."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tensigma.errors import InputError, MissingExtra
from tensigma.files import whole_file

SUFFIXES = (".svg", ".png")
# Distinguishable with every common kind of colour blindness, and by shape.
_COLOURS = ("#777777", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_MARKERS = "osD^vPX*"
_COLUMNS = 2
_WIDTH, _HEIGHT = 5.2, 3.6


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a figure, point by point."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    #: A level to compare with, such as the accuracy of the original.
    reference: float | None = None
    log_x: bool = False


def draw(panels: Sequence[Panel], path: Path, *, title: str) -> None:
    """Draw ``panels`` side by side into one file; the same input gives the same bytes."""
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path}: a figure ends in {' or '.join(SUFFIXES)}")
    drawn = picture(panels, path.suffix[1:], title=title)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        partial.write_bytes(drawn)


def picture(panels: Sequence[Panel], kind: str, *, title: str) -> bytes:
    """The content of the file that :func:`draw` writes: ``"svg"`` or ``"png"``."""
    matplotlib = _matplotlib()
    options = {"svg.hashsalt": "tensigma", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(options):
        figure_type = matplotlib.figure.Figure
        n_columns = min(len(panels), _COLUMNS)
        n_rows = math.ceil(len(panels) / n_columns)
        figure = figure_type(figsize=(_WIDTH * n_columns, _HEIGHT * n_rows + 0.4), layout="constrained")
        axes = figure.subplots(n_rows, n_columns, squeeze=False).ravel()
        for axis, panel in zip(axes, panels, strict=False):
            _fill(axis, panel)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        figure.suptitle(title, fontsize=10)
        drawn = io.BytesIO()
        figure.savefig(drawn, format=kind, metadata={"Date": None} if kind == "svg" else None, dpi=150)
    return drawn.getvalue()


def _fill(axis: Any, panel: Panel) -> None:
    for index, line in enumerate(panel.lines):
        points = sorted(line.points)
        axis.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=line.name,
            color=_COLOURS[index % len(_COLOURS)],
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=4,
            linewidth=1.3,
            linestyle="--" if line.dashed else "-",
        )
    if panel.reference is not None:
        axis.axhline(panel.reference, color="black", linewidth=0.8, linestyle=":", label="original")
    if panel.log_x:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda value, position: f"{value:g}")
    axis.set_title(panel.title, fontsize=9)
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(panel.y_label)
    axis.grid(visible=True, linewidth=0.4, alpha=0.5)
    axis.legend(fontsize=7)


def _matplotlib() -> ModuleType:
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise MissingExtra("figures need matplotlib; run: pip install 'tensigma[report]'") from error
    return matplotlib

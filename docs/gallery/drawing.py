"""How the pictures of the gallery look, and where they go. What they show is in the scripts beside this file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import PercentFormatter
from torch import Tensor

# The colours of the report page.
INK, MUTED, LINES, PALE = "#1b1d22", "#5b606c", "#e1e2e6", "#d9dce3"
GREY, ORANGE, BLUE, GREEN = "#6b7280", "#c2570c", "#2a66c8", "#0b7f5b"
FORMATS = {
    "dense": "#878e9b",
    "svd": "#0d8b7c",
    "tucker2": "#2a66c8",
    "cp": "#c8590b",
    "cp-joint": "#a1459c",
    "spatial-svd": "#4f8214",
    "tensor-train": "#c0334f",
}
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "grid.color": LINES,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.markersize": 4.5,
    "legend.fontsize": 8,
}


def panels(n_rows: int, n_columns: int, *, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """A figure and its axes."""
    plt.rcParams.update(STYLE)
    return plt.subplots(n_rows, n_columns, figsize=(width, height), layout="constrained", **options)


def in_percent(*axes: Any) -> None:
    """Label an x- or y-axis from 0 to 1 as 0 to 100 %; on a logarithmic one only the ticks that were set."""
    for axis in axes:
        axis.set(major_formatter=PercentFormatter(1, decimals=0), minor_formatter="")


def draw_maps(image: Tensor, rows: Sequence[tuple[str, Tensor]], channels: Sequence[int]) -> Any:
    """Feature maps, (channel, height, width) in each row, on the scale that each channel has in the first row."""
    ramp = LinearSegmentedColormap.from_list("", [ORANGE, "#ffffff", BLUE])
    figure, grid = panels(len(rows), len(channels) + 1, width=8, height=0.86 * len(rows))
    limits = rows[0][1].abs().amax((1, 2)).tolist()
    for line, (label, maps) in zip(grid, rows, strict=True):
        line[0].set_axis_off()
        line[1].set_ylabel(label, rotation=0, ha="right", va="center")
        for axis, channel in zip(line[1:], channels, strict=True):
            axis.imshow(maps[channel].numpy(), cmap=ramp, vmin=-limits[channel], vmax=limits[channel])
            axis.set(xticks=[], yticks=[])
    grid[0, 0].imshow(image.numpy(), cmap="Greys")
    for axis, title in zip(grid[0], ["image", *(f"channel {channel}" for channel in channels)], strict=True):
        axis.set_title(title, fontsize=8)
    return figure


def keep(figure: Any, name: str) -> None:
    """Write a picture into the folder given to the script; a notebook shows it by itself and writes nothing."""
    if "ipykernel" not in sys.modules:
        folder = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parents[1] / "images" / "gallery"
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / name, dpi=110)

"""Top-1 against size and time, as pictures for the page."""

from __future__ import annotations

from collections import Counter

from peers.catalogue import PEERS
from peers.records import Record, failed
from tensigma.report import Line, Panel

_MEASURES = {"params": "parameters", "macs": "multiply-adds", "bytes": "bytes", "time_ratio": "time in ONNX Runtime"}
# There are eight colours; further lines are dashed.
_COLOURS = 8


def picture(name: str, track: str) -> str:
    """The file of a picture, as seen from the page."""
    return f"peers/{name}-{track}.svg"


def drawable(rows: list[Record]) -> bool:
    """Whether there is a line to draw: some tool at two rates."""
    counts = Counter(record["peer"] for record in rows if not failed(record))
    return any(count > 1 for count in counts.values())


def panels(rows: list[Record], original: Record) -> list[Panel]:
    """One pair of axes for each measure, one line for each tool."""
    return [
        Panel(
            title=f"top-1 against {words}",
            x_label=f"share of the original's {words}",
            y_label="top-1, %",
            reference=original["top1"],
            lines=lines(rows, original, measure),
        )
        for measure, words in _MEASURES.items()
    ]


def lines(rows: list[Record], original: Record, measure: str) -> list[Line]:
    points: dict[str, list[tuple[float, float]]] = {}
    for record in rows:
        if not failed(record):
            # The original's own ratio of times is 1.
            point = record[measure] / original[measure], record["top1"]
            points.setdefault(record["peer"], []).append(point)
    found = [peer for peer in PEERS if peer in points]
    return [
        Line(name=PEERS[peer].title, points=points[peer], dashed=index >= _COLOURS) for index, peer in enumerate(found)
    ]

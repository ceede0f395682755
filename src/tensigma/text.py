"""Plain text tables with aligned columns."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> str:
    """Columns as wide as needed; those in ``left`` are left-aligned, all others right-aligned. No trailing spaces.

    >>> print(table(["layer", "params"], [["conv1", "432"], ["fc", "10,250"]]))
    layer  params
    conv1     432
    fc     10,250
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in [header, *rows]:
        cells = [
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def count(number: int | None) -> str:
    """A whole number with thousands separators; a dash if unknown."""
    return "–" if number is None else f"{number:,}"


def share(number: float | None) -> str:
    """An error with three decimals; a dash if unknown."""
    return "–" if number is None else f"{number:.3f}"

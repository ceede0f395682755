"""Results of the experiment past the paper as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensigma.experiments.kinds import Cells
from tensigma.experiments.variants import Target, Variant
from tensigma.report import Table

_MEASURES = {"params": "parameters", "macs": "multiply-adds"}


def table_by_rate(title: str, variants: Sequence[Variant], targets: Sequence[Target], cells: Cells) -> Table:
    """Variants below each other, rates beside each other, accuracy and agreement in every cell."""
    ordered = sorted(targets, key=lambda target: target.rate)
    rows = []
    for variant in variants:
        found = [cells.get(f"{title} | {variant.name} | {target}") for target in ordered]
        if any(found):
            rows.append([variant.name, *(_shown(cell, target) for cell, target in zip(found, ordered, strict=True))])
    return Table(title=_head(title, cells), columns=["", *(f"rate {target}" for target in ordered)], rows=rows)


def tables_by_measure(title: str, variants: Sequence[Variant], targets: Sequence[Target], cells: Cells) -> list[Table]:
    """One table for rates in parameters, one for multiply-adds: a row for every model, its figures in columns."""
    tables = []
    for measure, word in _MEASURES.items():
        rows = []
        for target in sorted((each for each in targets if each.measure == measure), key=lambda each: each.rate):
            for variant in variants:
                cell = cells.get(f"{title} | {variant.name} | {target}")
                if cell is not None:
                    rows.append([f"{target.rate:g}", variant.name, *_figures(cell)])
        if rows:
            columns = ["rate", "", "top-1", "agreement", "parameters", "multiply-adds", "time"]
            tables.append(Table(title=f"{_head(title, cells)}, rates in {word}", columns=columns, rows=rows))
    return tables


def _head(title: str, cells: Cells) -> str:
    return f"{title}: {100 * cells[f'{title} | original']['top1']:.1f} % before compression"


def _figures(cell: Mapping[str, Any]) -> list[str]:
    milliseconds, before = (1000 * seconds for seconds in cell["seconds"])
    return [
        f"{100 * cell['top1']:.1f}",
        f"{100 * cell['agreement']:.1f}",
        f"{cell['params'] / 1e6:.1f} M (÷ {cell['rate']:.2f})",
        f"{cell['macs'] / 1e9:.2f} G (÷ {cell['macs_rate']:.2f})",
        f"{milliseconds:.0f} ms (÷ {before / milliseconds:.2f})",
    ]


def _shown(cell: Mapping[str, Any] | None, target: Target) -> str:
    if cell is None:
        return "–"
    own = "" if abs(cell["rate"] / target.rate - 1) < 0.01 else f" at {cell['rate']:.2f}"
    agreement = f" ({100 * cell['agreement']:.1f})" if "agreement" in cell else ""
    return f"{100 * cell['top1']:.1f}{agreement}{own}"

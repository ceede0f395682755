"""Results as tables for a reader."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from tensigma.cli.columns import GAP, arrange
from tensigma.compression import Report
from tensigma.evaluation import Evaluation, Size
from tensigma.planning import Plan
from tensigma.report import error, milliseconds, number, percent, short, speed, times
from tensigma.text import table as plain_table


class Columns:
    """A table with a line under its head on a terminal, and plain columns elsewhere.

    Columns whose name begins with ``>`` hold numbers and are aligned right. Rows are set apart before each index in
    ``sections``; the last ``n_totals`` rows are totals. Names in the first column are never cut; on a narrow terminal
    what the column ``remarks`` holds goes below the table, with marks in the column ``marked``.
    """

    def __init__(
        self,
        header: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        n_totals: int = 0,
        sections: Sequence[int] = (),
        remarks: int | None = None,
        marked: int | None = None,
    ) -> None:
        self.header, self.rows, self.n_totals = header, rows, n_totals
        self.remarks, self.marked = remarks, marked
        self.sections = {*sections, *([len(rows) - n_totals] if n_totals else [])}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        right = [index for index, name in enumerate(self.header) if name.startswith(">")]
        names = [name.removeprefix(">") for name in self.header]
        if not console.is_terminal:
            left = [index for index in range(len(names)) if index not in right]
            yield Text(plain_table(names, self.rows, left=left))
            return
        layout = arrange(
            names, self.rows, right=right, room=options.max_width, remarks=self.remarks, marked=self.marked
        )
        table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, GAP - 1, 0, 0), pad_edge=False, header_style="bold")
        for index, (name, width) in enumerate(zip(layout.header, layout.widths, strict=True)):
            table.add_column(name, justify="right" if index in layout.right else "left", overflow="fold", width=width)
        for index, row in enumerate(layout.rows):
            total = index >= len(self.rows) - self.n_totals
            if index in self.sections:
                table.add_section()
            table.add_row(*map(Text, row), style="bold" if total else None)
        yield Text()
        yield table
        for note in layout.notes:
            yield Text(note, style="dim")
        yield Text()


def change(before: str, after: str, changed: bool = True) -> str:
    """What was and what is."""
    return f"{before} → {after}" if changed and before != "–" else before


def plan_table(plan: Plan) -> Columns:
    """What becomes of every layer."""
    rows = []
    for entry in plan.values():
        known, sized, changed = entry.geometry is not None, entry.input_size is not None, entry.format is not None
        rows.append(
            [
                entry.name,
                entry.label,
                change(number(entry.before.params), number(entry.after.params), changed) if known else "–",
                change(short(entry.before.macs), short(entry.after.macs), changed) if sized else "–",
                error(entry.error),
                entry.reason or "",
            ]
        )
    before, after = plan.before, plan.after
    macs = change(short(before.macs), short(after.macs)) if before.macs else "–"
    params = change(number(before.params), number(after.params))
    rows.append(["whole model", times(before.params, after.params, "fewer"), params, macs, "", ""])
    header = ["layer", "format", ">parameters", ">MACs", ">expected error", "why dense"]
    return Columns(header, rows, n_totals=1, remarks=5, marked=1)


def report_table(report: Report, *, dense: bool = True) -> Columns:
    """What became of every layer, or without ``dense`` of those that were compressed."""
    rows = []
    for layer in report.layers if dense else report.compressed:
        changed = layer.ranks is not None
        rows.append(
            [
                layer.name,
                " ".join([layer.method, *map(str, layer.ranks or ())]),
                change(number(layer.before.params), number(layer.after.params), changed),
                change(short(layer.before.macs), short(layer.after.macs), changed),
                error(layer.error),
                "cached" if layer.cached else f"{layer.seconds:.2f}" if changed else "",
                *([layer.reason or ""] if dense else []),
            ]
        )
    header = ["layer", "format", ">parameters", ">MACs", ">error", ">seconds", *(["why dense"] if dense else [])]
    return Columns(header, rows, remarks=6 if dense else None, marked=1)


def summary_table(report: Report, evaluation: Evaluation | None) -> Columns:
    """The figures that matter, before and after."""
    before, after = report.before, report.after
    rows = [
        ["parameters", number(before.params), number(after.params), times(before.params, after.params)],
        ["MACs", short(before.macs), short(after.macs), times(before.macs, after.macs)],
        ["bytes", short(before.bytes, "B"), short(after.bytes, "B"), times(before.bytes, after.bytes)],
    ]
    if evaluation is not None:
        rows += [row for row in _quality(evaluation) if row[2] != "–"]
    return Columns(["", ">before", ">after", ">"], rows)


def evaluation_table(evaluation: Evaluation) -> Columns:
    """Figures of a model, beside those of the original where that was measured too."""
    first = evaluation.original
    own = evaluation.size
    if first is None:
        rows = [[name, own_value] for name, _, own_value, _ in [*_sizes(None, own), *_quality(evaluation)]]
        return Columns(["", ">model"], [row for row in rows if row[1] != "–"])
    rows = [*_sizes(first.size, own), *_quality(evaluation)]
    return Columns(["", ">original", ">compressed", ">"], [row for row in rows if row[2] != "–"])


def _sizes(before: Size | None, after: Size) -> list[list[str]]:
    def row(name: str, old: int | None, new: int | None, text: Sequence[str]) -> list[str]:
        return [name, *text, times(old, new)]

    old = before or Size(params=0, macs=None, bytes=0)
    return [
        row("parameters", old.params, after.params, [number(old.params), number(after.params)]),
        row("MACs", old.macs, after.macs, [short(old.macs), short(after.macs)]),
        row("bytes", old.bytes, after.bytes, [short(old.bytes, "B"), short(after.bytes, "B")]),
    ]


def _quality(evaluation: Evaluation) -> list[list[str]]:
    first = evaluation.original
    rows = []
    for name, key in (("top-1", "top1"), ("top-5", "top5")):
        own = getattr(evaluation, key)
        old = None if first is None else getattr(first, key)
        step = "" if own is None or old is None else f"{100 * (own - old):+.2f} points"
        rows.append([name, percent(old), percent(own), step])
    rows.append(["agreement", "", percent(evaluation.agreement), ""])
    certified = evaluation.certificate
    if certified is not None:
        # Rounded down, or the words would claim more than the bound.
        bound = math.floor(10_000 * certified.bound) / 10_000
        rows.append(["at least", "", percent(bound), f"with {100 * certified.confidence:g} % confidence"])
    old_time = None if first is None else first.latency
    change_of_time = speed(evaluation.speedup)
    rows.append(["latency", milliseconds(old_time), milliseconds(evaluation.latency), change_of_time])
    return rows

"""Results as tables for a reader."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

import tensigma as ts
from tensigma.cli.columns import GAP, arrange
from tensigma.text import table as plain_table


class Columns:
    """A table, with a line under its header on a terminal and plain columns elsewhere.

    Columns whose header begins with ``>`` hold numbers and are aligned right. A gap is left before each row whose index
    is in ``sections``; the last ``n_totals`` rows are totals. Names in the first column are never cut; on a narrow
    terminal the texts of the column ``remarks`` are moved below the table, with marks in the column ``marked``.
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


def _change(before: str, after: str, changed: bool = True) -> str:
    return f"{before} → {after}" if changed and before != "–" else before


def _points(before: float | None, after: float | None) -> str:
    return "" if before is None or after is None else f"{100 * (after - before):+.2f} points"


def plan_table(plan: ts.Plan) -> Columns:
    """What a plan does with every layer."""
    number, short = ts.report.number, ts.report.short
    rounds = plan.has_bits
    rows = []
    for entry in plan.values():
        known, sized, changed = entry.geometry is not None, entry.input_size is not None, entry.format is not None
        rows.append(
            [
                entry.name,
                entry.label,
                _change(number(entry.before.params), number(entry.after.params), changed) if known else "–",
                _change(short(entry.before.macs), short(entry.after.macs), changed) if sized else "–",
                *([_change(number(entry.before.bytes), number(entry.after.bytes), changed)] if rounds else []),
                ts.report.error(entry.error),
                entry.reason or "",
            ]
        )
    before, after = plan.before, plan.after
    macs = _change(short(before.macs), short(after.macs)) if before.macs else "–"
    params = _change(number(before.params), number(after.params))
    sizes = [_change(number(before.bytes), number(after.bytes))] if rounds else []
    fewer = ts.report.times(before.params, after.params, "fewer")
    if rounds:
        fewer = f"{before.bytes / max(after.bytes, 1):.2f} times fewer bytes"
    rows.append(["whole model", fewer, params, macs, *sizes, "", ""])
    header = [
        "layer",
        "format",
        ">parameters",
        ">MACs",
        *([">bytes"] if rounds else []),
        ">expected error",
        "why dense",
    ]
    return Columns(header, rows, n_totals=1, remarks=len(header) - 1, marked=1)


def report_table(report: ts.Report, *, dense: bool = True) -> Columns:
    """What a compression did with every layer, or without ``dense`` with the compressed ones only."""
    number, short = ts.report.number, ts.report.short
    rounds = any(layer.bits is not None for layer in report.layers)
    rows = []
    for layer in report.layers if dense else report.compressed:
        changed = layer.ranks is not None
        rows.append(
            [
                layer.name,
                ts.solving.label_of(layer.method, layer.ranks, layer.bits),
                _change(number(layer.before.params), number(layer.after.params), changed),
                _change(short(layer.before.macs), short(layer.after.macs), changed),
                *([_change(number(layer.before.bytes), number(layer.after.bytes), changed)] if rounds else []),
                ts.report.error(layer.error),
                "cached" if layer.cached else f"{layer.seconds:.2f}" if changed else "",
                *([layer.reason or ""] if dense else []),
            ]
        )
    sizes = [">parameters", ">MACs", *([">bytes"] if rounds else [])]
    header = ["layer", "format", *sizes, ">error", ">seconds", *(["why dense"] if dense else [])]
    return Columns(header, rows, remarks=len(header) - 1 if dense else None, marked=1)


def summary_table(report: ts.Report, evaluation: ts.Evaluation | None) -> Columns:
    """The main figures before and after a compression."""
    rows = _sizes(report.before, report.after)
    files = report.notes.get("file_bytes")
    if files is not None:
        before, after = files["before"], files["after"]
        short = ts.report.short
        rows.append(["bytes on disk", short(before, "B"), short(after, "B"), ts.report.times(before, after)])
    if evaluation is not None:
        rows += [row for row in _quality(evaluation) if row[2] != "–"]
    speed = report.notes.get("speed")
    if speed is not None and (evaluation is None or evaluation.latency is None):
        times = [f"{1000 * speed[key]:.3g} ms" for key in ("before", "after")]
        rows.append([f"time, batch {speed['batch']}", *times, ts.report.speed(ts.evaluation.speedup_of(speed))])
    return Columns(["", ">before", ">after", ">"], rows)


def evaluation_table(evaluation: ts.Evaluation) -> Columns:
    """Figures of a model, beside those of the original if that was measured too."""
    original = evaluation.original
    rows = [*_sizes(None if original is None else original.size, evaluation.size), *_quality(evaluation)]
    rows = [row for row in rows if row[2] != "–"]
    if original is None:
        return Columns(["", ">model"], [[name, value] for name, _, value, _ in rows])
    return Columns(["", ">original", ">compressed", ">"], rows)


def _sizes(before: Any, after: Any) -> list[list[str]]:
    """Rows of what has ``params``, ``macs`` and ``bytes``."""
    rows = []
    for name, key, text in (
        ("parameters", "params", ts.report.number),
        ("MACs", "macs", ts.report.short),
        ("bytes", "bytes", lambda value: ts.report.short(value, "B")),
    ):
        old, new = getattr(before, key, None), getattr(after, key)
        rows.append([name, text(old), text(new), ts.report.times(old, new)])
    return rows


def _quality(evaluation: ts.Evaluation) -> list[list[str]]:
    original = evaluation.original
    percent, milliseconds = ts.report.percent, ts.report.milliseconds
    rows = []
    certificate = evaluation.certificate
    for key, name in ts.evaluation.SHARES.items():
        old, new = getattr(original, key, None), getattr(evaluation, key)
        # Of what is measured by the original, the original has all.
        by_labels = key in ("top1", "top5", "label_iou", "label_precision")
        rows.append([name, percent(old) if by_labels else "", percent(new), _points(old, new) if by_labels else ""])
        if key != "agreement" or certificate is None:
            continue
        # Rounded down, or the table would claim more than the bound.
        bound = math.floor(10_000 * certificate.bound) / 10_000
        rows.append(["at least", "", percent(bound), f"with {100 * certificate.confidence:g} % confidence"])
    rows += [[other.title, "", percent(other.likeness), ""] for other in evaluation.others]
    old_latency = None if original is None else original.latency
    rows.append(
        ["latency", milliseconds(old_latency), milliseconds(evaluation.latency), ts.report.speed(evaluation.speedup)]
    )
    return rows


def quantization_table(quantized: ts.Quantized, name: str) -> Columns:
    """Figures before and after quantization, and of the original if there is one."""
    original, before, after = quantized.original, quantized.before, quantized.after
    stages = [before, after] if original is None else [original, before, after]
    faster = ""
    if before.latency is not None and after.latency is not None:
        faster = ts.report.speed(before.latency.minimum / after.latency.minimum)
    rows = [
        [
            "bytes",
            *(ts.report.short(stage.size.bytes, "B") for stage in stages),
            ts.report.times(before.size.bytes, after.size.bytes),
        ]
    ]
    for key, title in ts.evaluation.SHARES.items():
        values = [getattr(stage, key) for stage in stages]
        rows.append([title, *map(ts.report.percent, values), _points(values[-2], values[-1])])
    for figures in zip(*(stage.others for stage in stages), strict=True):
        values = [figure.likeness for figure in figures]
        rows.append([figures[0].title, *map(ts.report.percent, values), _points(values[-2], values[-1])])
    rows.append(["latency", *(ts.report.milliseconds(stage.latency) for stage in stages), faster])
    header = ["", *([] if original is None else [">original"]), ">FP32", f">{name}", ">"]
    return Columns(header, [row for row in rows if row[-2] != "–"])

"""One HTML file about a compression, with everything it needs inside."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensigma.errors import MissingExtra
from tensigma.files import whole_file
from tensigma.pipeline import Evaluation, LayerReport, Report
from tensigma.report import numbers
from tensigma.report.charts import line_chart
from tensigma.report.comparison import Run


@dataclass(frozen=True, kw_only=True)
class Card:
    """One headline number, before and after."""

    name: str
    before: str
    after: str
    change: str
    #: What is left of what was there, for a small bar; None where that means nothing.
    share: float | None = None


@dataclass(frozen=True, kw_only=True)
class Bars:
    """One layer as bars, in percent of the longest."""

    layer: LayerReport
    before: float
    after: float
    #: The same for errors, in percent of the largest error; None for a dense layer.
    error: float | None
    weight_error: float | None


def write_report(
    report: Report,
    path: str | os.PathLike[str],
    *,
    evaluation: Evaluation | None = None,
    comparison: Sequence[Run] = (),
    title: str | None = None,
) -> None:
    """Write a page about a compression to the file ``path``; a file that is there is replaced in one step.

    The page needs no network and no other file. It follows the reader's choice of light or dark, sorts its table and
    can be printed.

    Args:
        report: What :func:`tensigma.compress` returned.
        path: The file.
        evaluation: What :func:`tensigma.evaluate` found, for accuracy, agreement and latency.
        comparison: Other compressions of the same model to show beside this one.
        title: The headline; by default the name of the model, where the report notes one.
    """
    page = render_report(report, evaluation=evaluation, comparison=comparison, title=title)
    with whole_file(Path(path)) as partial:
        partial.write_text(page, encoding="utf-8")


def render_report(
    report: Report,
    *,
    evaluation: Evaluation | None = None,
    comparison: Sequence[Run] = (),
    title: str | None = None,
) -> str:
    """The page of :func:`write_report` as text."""
    environment = _environment()
    original = None if evaluation is None or evaluation.original is None else evaluation.original.top1
    return environment.get_template("page.html.j2").render(
        title=title or report.notes.get("title") or report.notes.get("model") or "Compression report",
        report=report,
        evaluation=evaluation,
        cards=cards(report, evaluation),
        bars=bars(report),
        runs=comparison,
        chart=line_chart(comparison, original) if comparison else None,
        facts=facts(report, evaluation),
        **{name: getattr(numbers, name) for name in ("number", "short", "percent", "error", "times")},
    )


def check_renderer() -> None:
    """Raise :class:`~tensigma.errors.MissingExtra` where pages cannot be made."""
    _environment()


def _environment() -> Any:
    try:
        import jinja2
    except ModuleNotFoundError:
        raise MissingExtra(
            "a report page needs jinja2, which is not installed; run: pip install 'tensigma[report]'"
        ) from None
    return jinja2.Environment(
        loader=jinja2.PackageLoader("tensigma.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def cards(report: Report, evaluation: Evaluation | None) -> list[Card]:
    """The headline: size always, quality and time where they were measured."""
    before, after = report.before, report.after
    found = [_size("Parameters", before.params, after.params)]
    if before.macs is not None and after.macs is not None:
        found.append(_size("Multiply-adds", before.macs, after.macs))
    found.append(_size("Bytes", before.bytes, after.bytes, "B"))
    if evaluation is None:
        return found
    first = evaluation.original
    for name, old, new in (
        ("Top-1 accuracy", None if first is None else first.top1, evaluation.top1),
        ("Top-5 accuracy", None if first is None else first.top5, evaluation.top5),
    ):
        if new is not None:
            step = "" if old is None else f"{100 * (new - old):+.2f} points"
            found.append(Card(name=name, before=numbers.percent(old), after=numbers.percent(new), change=step))
    if evaluation.agreement is not None:
        words = "of answers are those of the original"
        found.append(Card(name="Agreement", before="", after=numbers.percent(evaluation.agreement), change=words))
    if evaluation.latency is not None:
        old_time = None if first is None else first.latency
        ratio = ", ".join(filter(None, [numbers.speed(evaluation.speedup), "one thread"]))
        new_text = numbers.milliseconds(evaluation.latency)
        found.append(Card(name="Latency", before=numbers.milliseconds(old_time), after=new_text, change=ratio))
    return found


def _size(name: str, before: int, after: int, unit: str = "") -> Card:
    return Card(
        name=name,
        before=numbers.short(before, unit),
        after=numbers.short(after, unit),
        change=numbers.times(before, after, "fewer" if not unit else "smaller"),
        share=after / before if before else None,
    )


def bars(report: Report) -> list[Bars]:
    """Every layer's parameters and errors, in percent of the largest."""
    longest = max((layer.before.params for layer in report.layers), default=0) or 1
    errors = [value for layer in report.layers for value in (layer.error, layer.frobenius_error) if value is not None]
    largest = max(errors, default=0.0) or 1.0

    def share(value: float | None) -> float | None:
        return None if value is None else 100 * value / largest

    return [
        Bars(
            layer=layer,
            before=100 * layer.before.params / longest,
            after=100 * layer.after.params / longest,
            error=share(layer.error),
            weight_error=share(layer.frobenius_error),
        )
        for layer in report.layers
    ]


def facts(report: Report, evaluation: Evaluation | None) -> list[tuple[str, str]]:
    """How it was made."""
    notes = report.notes
    norms = sorted({layer.norm for layer in report.compressed if layer.norm})
    found = [
        ("Model", notes.get("model")),
        ("Weights", "random" if notes.get("untrained") else notes.get("weights")),
        ("Calibrated with", notes.get("data")),
        ("Calibration samples", numbers.number(notes["samples"]) if notes.get("samples") else None),
        ("Evaluated on", notes.get("evaluated_on")),
        ("Evaluation samples", None if evaluation is None else numbers.number(evaluation.samples)),
        ("Norm", ", ".join(norms)),
        ("Layers compressed", f"{len(report.compressed)} of {len(report.layers)}"),
        ("Time to compress", f"{report.seconds:.1f} s"),
        ("Tensigma", report.library),
    ]
    return [(name, str(value)) for name, value in found if value]

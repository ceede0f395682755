"""One HTML file about a compression, with everything it needs inside."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensigma.compression import Report
from tensigma.evaluation import Evaluation
from tensigma.files import whole_file
from tensigma.report import numbers, pictures
from tensigma.report.cards import facts, headline, savings
from tensigma.report.charts import line_chart
from tensigma.report.comparison import Run
from tensigma.report.explorer import NO_FRONT, explorer
from tensigma.report.render import templates


def write_report(
    report: Report,
    path: str | os.PathLike[str],
    *,
    evaluation: Evaluation | None = None,
    comparison: Sequence[Run] = (),
    title: str | None = None,
) -> None:
    """Write a page about a compression to the file ``path``; an existing file is replaced in one step.

    The page needs no network and no other file. If the report carries the front of its plan, a slider moves the
    budget, shows the effect on every layer, and gives the command or the plan for it. The page follows the
    reader's choice of light or dark, sorts its tables and can be printed.

    Args:
        report: What :func:`tensigma.compress` returned.
        path: The file.
        evaluation: What :func:`tensigma.evaluate` found, for accuracy, agreement and latency.
        comparison: Other compressions of the same model to show with this one.
        title: The headline; by default the name of the model, if the report notes one.

    >>> import tempfile
    >>> import torch
    >>> import tensigma as ts
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    >>> _, report = ts.compress(model, ts.plan(model, ranks=ts.Ranks({"0": 8}), norm="frobenius"))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     ts.write_report(report, f"{place}/report.html", title="A small network")
    ...     "A small network" in Path(f"{place}/report.html").read_text(encoding="utf-8")
    True
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
    original = None if evaluation is None or evaluation.original is None else evaluation.original.top1
    return (
        templates()
        .get_template("page.html.j2")
        .render(
            title=title or report.notes.get("title") or report.notes.get("model") or "Compression report",
            report=report,
            evaluation=evaluation,
            cards=headline(report, evaluation),
            savings=savings(report),
            explorer=explorer(report),
            no_front=NO_FRONT,
            methods=sorted({layer.method for layer in report.layers}),
            columns=pictures.columns(report),
            curves=pictures.curves(report),
            breakable=_breakable,
            width=pictures.WIDTH,
            height=pictures.HEIGHT,
            runs=comparison,
            chart=line_chart(comparison, original) if comparison else None,
            facts=facts(report, evaluation),
            **{name: getattr(numbers, name) for name in ("number", "short", "percent", "error", "times")},
        )
    )


def _breakable(name: str) -> Any:
    """A layer's name that may break after each dot."""
    from markupsafe import Markup

    return Markup(".<wbr>").join(name.split("."))

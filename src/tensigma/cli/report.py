"""``tensigma report``: the page about a compression, written again from its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tensigma.cli.command import command
from tensigma.cli.options import Force
from tensigma.cli.outputs import check_file
from tensigma.cli.screen import Screen
from tensigma.cli.tables import report_table, summary_table
from tensigma.compression import Report
from tensigma.errors import StoreError
from tensigma.evaluation import Evaluation
from tensigma.report import Run, check_renderer, write_report

Source = Annotated[
    Path,
    typer.Argument(
        metavar="FILE|DIR", show_default=False, help="A report.json, or the folder that 'tensigma compress' wrote."
    ),
]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the page here, as one HTML file.")]


@command
def report(screen: Screen, source: Source, out: Out = None, force: Force = False) -> None:
    """Show what a compression did, and write it as a page of one self-contained file.

    [bold]Examples[/bold]

      tensigma report small/
      tensigma report small/report.json --out report.html
    """
    if out is not None:
        check_renderer()
        check_file(out, force=force)
    found, evaluation, runs = read_report(source / "report.json" if source.is_dir() else source)
    if out is not None and screen.speaks:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_report(found, out, evaluation=evaluation, comparison=runs)
        screen.note(f"written to {out}")
    data = {"source": str(source), "out": None if out is None else str(out), "report": found.to_json()}
    screen.result("report", data, report_table(found), summary_table(found, evaluation))


def read_report(file: Path) -> tuple[Report, Evaluation | None, list[Run]]:
    """A report and what was noted with it."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{file} cannot be read as a report: {error}") from error
    if not isinstance(data, dict):
        raise StoreError(f"{file} is not a report; give a report.json that 'tensigma compress' wrote")
    try:
        found = Report.from_json(data)
    except StoreError as error:
        raise StoreError(f"{file}: {error}") from None
    noted = found.notes.get("evaluation")
    evaluation = Evaluation.from_json(noted) if noted else None
    return found, evaluation, [Run.from_json(run) for run in found.notes.get("comparison", ())]

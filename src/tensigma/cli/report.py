"""``tensigma report``: the figures of a compression again, from its JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import tensigma as ts
from tensigma.cli.command import command
from tensigma.cli.options import Force
from tensigma.cli.outputs import claim_file
from tensigma.cli.screen import Screen
from tensigma.cli.tables import report_table, summary_table
from tensigma.errors import StoreError
from tensigma.files import anything, read_json, recover, sequence

Source = Annotated[
    Path,
    typer.Argument(metavar="FILE|DIR", show_default=False, help="A report.json, or a folder from 'tensigma compress'."),
]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the report as one HTML file.")]


@command
def report(screen: Screen, source: Source, out: Out = None, force: Force = False) -> None:
    """Show what a compression did, and write it as one HTML file that needs no other files.

    [bold]Examples[/bold]

      tensigma report small/
      tensigma report small/report.json --out report.html
    """
    if out is not None:
        ts.report.check_renderer()
        claim_file(screen, out, force=force)
    recover(source)
    stored, evaluation, runs = read_report(source / "report.json" if source.is_dir() else source)
    if out is not None and screen.speaks:
        out.parent.mkdir(parents=True, exist_ok=True)
        ts.write_report(stored, out, evaluation=evaluation, comparison=runs)
        screen.note(f"written to {out}")
    data = {"source": str(source), "out": None if out is None else str(out), "report": stored.to_json()}
    screen.result("report", data, report_table(stored), summary_table(stored, evaluation))


def read_report(file: Path) -> tuple[ts.Report, ts.Evaluation | None, list[ts.report.Run]]:
    """A report, and the evaluation and comparison that were noted with it."""
    try:
        data = read_json(file)
    except StoreError as error:
        raise StoreError(f"{file} is not a report: {error}") from error
    if not isinstance(data, dict):
        raise StoreError(f"{file} is not a report; give a report.json from 'tensigma compress'")
    try:
        report = ts.Report.from_json(data)
        noted = report.notes.get("evaluation")
        evaluation = ts.Evaluation.from_json(noted) if noted else None
        runs = sequence(anything)(report.notes.get("comparison", []), "the report is damaged: comparison")
        return report, evaluation, [ts.report.Run.from_json(run) for run in runs]
    except StoreError as error:
        raise error.prefixed(f"{file}: ") from None

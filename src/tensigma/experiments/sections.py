"""Results as a section of a page: what was found, what the paper prints, and why they differ."""

from __future__ import annotations

from tensigma.experiments.catalogue import printed_of
from tensigma.experiments.kinds import Cells, Kind
from tensigma.experiments.reproduction import current_cells, kind_of
from tensigma.experiments.results import Results
from tensigma.experiments.settings import Config, Printed
from tensigma.report import Panel, Section, Table


def section_of(results: Results) -> Section:
    """One experiment as far as it has been run with the config as it is now."""
    config, cells = results.config, current_cells(results)
    kind = kind_of(config)
    quick = " Quick form: its numbers mean nothing." if config.quick else ""
    return Section(
        name=config.name,
        title=config.title,
        origin=(config.substitute or f"Config `{config.config}`.") + quick,
        substitute=config.substitute is not None,
        tables=kind.tables(config, cells) if cells else (),
        panels=_panels(kind, config, cells) if config.shown == "figure" else (),
        figure_title=_figure_title(config),
        printed=_printed(printed_of(config.name)),
        missing="" if cells else _missing(config),
        remark=config.remark if cells else "",
        circumstances=_circumstances(results) if cells else "",
    )


def _panels(kind: Kind, config: Config, cells: Cells) -> list[Panel]:
    """Those that have something to show."""
    panels = kind.panels(config, cells) if cells else []
    return [panel for panel in panels if any(line.points for line in panel.lines)]


def _figure_title(config: Config) -> str:
    quick = ", quick form" if config.quick else ""
    return config.title + (quick if config.substitute is None else f" (substitute{quick})")


def _missing(config: Config) -> str:
    needs = " and ".join(config.needs.values())
    return f"Not run: it needs {needs}, which is not part of this project." if needs else "Not run yet."


def _printed(printed: Printed) -> Table | None:
    if not printed.rows and not printed.note:
        return None
    rows = [[value if isinstance(value, str) else f"{value:g}" for value in row] for row in printed.rows]
    return Table(columns=printed.columns, rows=rows, notes=[printed.note] if printed.note else ())


def _circumstances(results: Results) -> str:
    images = {cell["images"] for cell in results.cells.values() if "images" in cell}
    evaluated = f", {' and '.join(f'{n:,}' for n in sorted(images))} test images" if images else ""
    cells = len(results.cells)
    return f"{cells} cells{evaluated}, seed {results.seed}, {results.seconds / 60:.1f} minutes of computing."

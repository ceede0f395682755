"""Results as Markdown, the paper's own numbers beside them."""

from __future__ import annotations

from collections.abc import Sequence

from tensigma.experiments.kinds import Block
from tensigma.experiments.reproduction import current_cells, kind_of
from tensigma.experiments.results import Results
from tensigma.experiments.settings import Config, Printed


def markdown(results: Results, printed: Printed, *, level: int = 2, figure: str | None = None) -> str:
    """One experiment: what was found, what the paper prints, and why they differ.

    ``figure`` is the name of a picture to show before the numbers.
    """
    config, cells = results.config, current_cells(results)
    head = "#" * level
    parts = [f"{head} {config.name}: {config.title}", *_origin(config)]
    if figure is not None:
        parts.append(f"![{config.title}]({figure})")
    if cells:
        for block in kind_of(config).blocks(config, cells):
            parts += _block(block)
    else:
        needs = " and ".join(config.needs.values())
        reason = f": it needs {needs}, which is not part of this project" if needs else " yet"
        parts.append(f"Not run{reason}.")
    parts += _printed(printed)
    if cells:
        parts += [config.remark] if config.remark else []
        parts.append(f"<small>{_circumstances(results)}</small>")
    return "\n\n".join(parts) + "\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under columns.

    >>> print(table(["α", "rate"], [["0.5", "2.0"]]))
    | α | rate |
    |---|---|
    | 0.5 | 2.0 |
    """
    lines = [columns, *rows]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([text[0], "|" + "---|" * len(columns), *text[1:]])


def _origin(config: Config) -> list[str]:
    quick = " Quick form: its numbers mean nothing." if config.quick else ""
    if config.substitute is None:
        return [f"Config `{config.config}`.{quick}"]
    return [f"**Substitute.** {config.substitute}{quick}"]


def _block(block: Block) -> list[str]:
    return [f"**{block.title}**", table(block.columns, block.rows), *block.notes]


def _printed(printed: Printed) -> list[str]:
    parts = []
    if printed.rows:
        rows = [[value if isinstance(value, str) else f"{value:g}" for value in row] for row in printed.rows]
        parts += ["In the paper:", table(printed.columns, rows)]
    if printed.note:
        parts.append(printed.note if printed.rows else f"In the paper: {printed.note[0].lower()}{printed.note[1:]}")
    return parts


def _circumstances(results: Results) -> str:
    images = {cell["images"] for cell in results.cells.values() if "images" in cell}
    evaluated = f", {' and '.join(f'{n:,}' for n in sorted(images))} test images" if images else ""
    cells = len(results.cells)
    return f"{cells} cells{evaluated}, seed {results.seed}, {results.seconds / 60:.1f} minutes of computing."

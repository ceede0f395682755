"""Results as Markdown, the paper's own numbers beside them."""

from __future__ import annotations

from collections.abc import Sequence

from tensigma.report import Section, Table


def markdown(section: Section, *, figure: str | None = None, alone: bool = False) -> str:
    """One experiment; ``figure`` is the name of a picture to show before the numbers.

    A section that is a page of its own (``alone``) is headed by its title only.
    """
    parts = [
        f"# {section.title}" if alone else f"## {section.name}: {section.title}",
        ("**Substitute.** " if section.substitute else "") + section.origin,
    ]
    if figure is not None:
        parts.append(f"![{section.title}]({figure})")
    for each in section.tables:
        parts += [f"**{each.title}**", table(each.columns, each.rows), *each.notes]
    if section.missing:
        parts.append(section.missing)
    if section.printed is not None:
        parts += _printed(section.printed)
    if section.remark:
        parts.append(section.remark)
    if section.circumstances:
        parts.append(f"<small>{section.circumstances}</small>")
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


def _printed(printed: Table) -> list[str]:
    if not printed.rows:
        return [f"In the paper: {note[0].lower()}{note[1:]}" for note in printed.notes]
    return ["In the paper:", table(printed.columns, printed.rows), *printed.notes]

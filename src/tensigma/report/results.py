"""One HTML file about experiments: tables and figures, next to published numbers."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensigma.files import whole_file
from tensigma.report.figure import Panel, picture
from tensigma.report.render import templates


@dataclass(frozen=True, kw_only=True)
class Table:
    """A header, rows and notes. Texts may hold `code` and **bold**."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    notes: Sequence[str] = field(default=())


@dataclass(frozen=True, kw_only=True)
class Section:
    """One experiment."""

    name: str
    title: str
    #: Where models and data come from, and whether they are substitutes.
    origin: str
    substitute: bool = False
    tables: Sequence[Table] = ()
    #: The same figures as lines, under this headline.
    panels: Sequence[Panel] = ()
    figure_title: str = ""
    #: Numbers that were published, to compare with.
    printed: Table | None = None
    #: Why there are no tables.
    missing: str = ""
    remark: str = ""
    circumstances: str = ""


def write_results(sections: Sequence[Section], path: Path, *, title: str, lead: str) -> None:
    """Write a page about experiments to the file ``path``; it needs no network and no other file."""
    page = templates().get_template("results.html.j2")
    text = page.render(title=title, lead=lead, sections=sections, inline=_inline, picture=_picture)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _picture(section: Section) -> str:
    drawn = picture(section.panels, "svg", title=section.figure_title)
    return "data:image/svg+xml;base64," + base64.b64encode(drawn).decode()


def _inline(text: str) -> Any:
    """Text in which `code` and **bold** are marked as in Markdown."""
    from markupsafe import Markup, escape

    safe = str(escape(text))
    safe = re.sub(r"`([^`]+)`", r"<code>\1</code>", safe)
    return Markup(re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", safe))

"""The templates of this package."""

from __future__ import annotations

from typing import Any

from tensigma.errors import MissingExtra


def templates() -> Any:
    """The templates; raises :class:`~tensigma.errors.MissingExtra` if jinja2 is not installed."""
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


def check_renderer() -> None:
    """Raise :class:`~tensigma.errors.MissingExtra` if pages cannot be rendered."""
    templates()

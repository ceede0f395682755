"""Formats on the report page: each has a colour, and a dot stands only where ranks and spectrum count the same."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from tensigma.compression import LayerReport, PageData, Report
from tensigma.evaluation import Size
from tensigma.report import render_report
from tensigma.report.pictures import curves
from tensigma.solving import METHODS

STYLE = resources.files("tensigma.report") / "templates" / "style.css"


def report(method: str, ranks: tuple[int, ...]) -> Report:
    size = Size(params=1000, macs=None, bytes=4000)
    layer = LayerReport(
        name="conv", method=method, ranks=ranks, norm="centred", before=size, after=size, error=0.1, frobenius_error=0.3
    )
    spectrum = {"rank": [0, 4, 8], "error": [1.0, 0.2, 0.0]}
    page = PageData(spectra={"conv": spectrum})
    return Report(layers=(layer,), before=size, after=size, seconds=1.0, page_data=page)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_colour_of_its_own(method: str) -> None:
    style = STYLE.read_text(encoding="utf-8")
    assert re.findall(rf"\.f-{method} {{ --format: var\(--([\w-]+)\); }}", style) == [method]
    colours = re.findall(r"--(?:other|" + "|".join(METHODS) + r"): (light-dark\([^)]*\))", style)
    assert len(set(colours)) == len(colours) == len(METHODS) + 1


def test_a_method_of_another_package_does_not_look_dense() -> None:
    style = STYLE.read_text(encoding="utf-8")
    assert style.index('[class^="f-"] { --format: var(--other); }') < style.index(".f-dense {")


@pytest.mark.parametrize("method", [*(name for name in METHODS if name != "dense"), "unknown"])
def test_a_dot_stands_where_the_first_rank_limits_the_output_directions(method: str) -> None:
    found = report(method, (6, 5, 4)[: len(METHODS[method].rank_names) if method in METHODS else 1])
    (curve,) = curves(found)
    has_dot = method not in ("spatial-svd", "unknown")
    assert (curve.dot is not None) == has_dot
    assert f"{method} " in curve.label
    assert "has 0.100" in curve.label
    assert ("A compressed layer without a dot" in render_report(found)) != has_dot

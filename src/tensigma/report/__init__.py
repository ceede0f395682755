"""HTML pages about compressions and experiments."""

from tensigma.report.cards import Card, facts, headline
from tensigma.report.comparison import Run
from tensigma.report.figure import SUFFIXES, Line, Panel, draw
from tensigma.report.numbers import error, milliseconds, number, percent, short, speed, times
from tensigma.report.page import render_report, write_report
from tensigma.report.render import check_renderer
from tensigma.report.results import Section, Table, write_results

__all__ = [
    "SUFFIXES",
    "Card",
    "Line",
    "Panel",
    "Run",
    "Section",
    "Table",
    "check_renderer",
    "draw",
    "error",
    "facts",
    "headline",
    "milliseconds",
    "number",
    "percent",
    "render_report",
    "short",
    "speed",
    "times",
    "write_report",
    "write_results",
]

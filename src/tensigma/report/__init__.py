"""What a compression did, and what experiments found, as pages to look at."""

from tensigma.report.comparison import Run
from tensigma.report.page import render_report, write_report
from tensigma.report.render import check_renderer

__all__ = ["Run", "check_renderer", "render_report", "write_report"]

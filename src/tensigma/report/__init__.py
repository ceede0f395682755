"""What a compression did, as a page to look at."""

from tensigma.report.comparison import Run
from tensigma.report.page import check_renderer, render_report, write_report

__all__ = ["Run", "check_renderer", "render_report", "write_report"]

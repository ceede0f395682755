"""The page of the benchmarks is what their results give."""

from __future__ import annotations

import page


def test_the_page_follows_the_results() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.render(), "run python benchmarks/page.py"

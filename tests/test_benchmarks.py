"""The pages of the benchmarks are what their results give."""

from __future__ import annotations

import json

import bytes as bytes_benchmark
import machine
import page


def test_the_page_follows_the_results() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.render(), "run python benchmarks/page.py"


def test_the_table_of_bytes_follows_the_results() -> None:
    results = json.loads((machine.RESULTS / f"{bytes_benchmark.NAME}.json").read_text(encoding="utf-8"))
    document = (page.PAGE.parent / "bytes.md").read_text(encoding="utf-8")
    assert bytes_benchmark.table(results) in document, "run python benchmarks/bytes.py --table"

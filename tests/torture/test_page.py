"""docs/reliability.md says what results/torture.json and results/benchmark_digests.json say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
RESULTS: dict[str, Any] = json.loads((ROOT / "results" / "torture.json").read_text(encoding="utf-8"))["results"]
_DAMAGED = "damaged files: "
_ROW = re.compile(r"^\| (.+?) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", re.MULTILINE)


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def test_the_table_of_damaged_files_is_that_of_the_run() -> None:
    shown = {name: tuple(map(_number, numbers)) for name, *numbers in _ROW.findall(PAGE)}
    expected = {}
    for name, result in RESULTS.items():
        if name.startswith(_DAMAGED):
            as_it_was = result.get("unchanged", 0) + result.get("solved again", 0)
            counts = (result["cases"], result.get("refused", 0), as_it_was, result.get("edited", 0))
            expected[name.removeprefix(_DAMAGED)] = (*counts, len(result["faults"]))
    assert shown == expected
    total = sum(counts[0] for counts in expected.values())
    assert f"{total:,} cases in all" in PAGE


def test_the_other_figures_are_those_of_the_run() -> None:
    networks, kills, memory, places = (RESULTS[name] for name in ("random networks", "kills", "memory", "places"))
    text = " ".join(PAGE.split())
    assert f"Of {networks['cases']} networks {networks['held']} held all of them" in text
    assert f"{kills['kills']} kills in {kills['cases']} cases: all resumed" in text
    assert kills["resumed"] == kills["cases"]
    assert f"All {memory['cases']} stayed within 5 %" in text
    assert f"the most was {memory['largest share of the limit']} times the limit" in text
    assert memory["held"] == memory["cases"]
    assert f"All {places['cases']} cases held" in text
    assert places["held"] + places["refused"] == places["cases"]
    assert RESULTS["the command of the README"]["held"] == 1


def test_no_part_is_left_unfinished() -> None:
    assert not [name for name, result in RESULTS.items() if result.get("unfinished")]


def test_the_figures_of_digests_are_those_of_the_benchmark() -> None:
    result = json.loads((ROOT / "results" / "benchmark_digests.json").read_text(encoding="utf-8"))
    text = " ".join(PAGE.partition("## Digests")[2].split())
    wall, processor = result["ratios"]["wall"], result["ratios"]["processor"]
    seconds, speed = result["seconds"]["load"]["wall"], result["gb_per_s"]["wall"]
    assert f"an archive of {result['bytes'] / 1e8:.0f}00 MB" in text
    assert f"takes {seconds:.2f} s, {speed:.2f} GB/s" in text
    assert f"{wall['load / read']:.2f} times as long as reading" in text
    assert f"{wall['load / load without digests']:.2f} times as long as loading it without" in text
    pair = f"{processor['load / read']:.1f} and {processor['load / load without digests']:.1f} times as much"
    assert pair in text

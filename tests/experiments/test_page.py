"""The page in the documentation says what the committed results say."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tensigma.experiments import NAMES, PAPER, Results, load_config, markdown, section_of, write_page
from tensigma.experiments.reproduction import kind_of

ROOT = Path(__file__).parents[2]
#: Experiments of which some cells have not been computed yet, and what these are called.
UNFINISHED = {"beyond": "ResNet-50*"}


@pytest.mark.slow
def test_the_page_is_up_to_date(tmp_path: Path):
    page, results = ROOT / "docs" / "paper.md", ROOT / "results" / "paper"
    write_page([Results.open(results, load_config(name)) for name in PAPER], tmp_path / "paper.md")
    advice = "run: tensigma reproduce --table all --to docs/paper.md"
    assert page.read_text() == (tmp_path / "paper.md").read_text(), advice
    for figure in (tmp_path / "paper").glob("*.svg"):
        assert (page.parent / "paper" / figure.name).is_file(), advice


@pytest.mark.parametrize(("name", "page"), [("beyond", "beyond.md"), ("norms", "results.md")])
def test_pages_of_our_own_experiments_are_up_to_date(name: str, page: str):
    results = ROOT / "results" / "paper"
    made = markdown(section_of(Results.open(results, load_config(name))), alone=True)
    assert (ROOT / "docs" / page).read_text() == made, f"run: tensigma reproduce --table {name} --to docs/{page}"


@pytest.mark.parametrize("name", NAMES)
def test_no_committed_cell_is_stale(name: str):
    """A cell counts only while its stamp, a digest of its settings, is what this library computes."""
    config = load_config(name)
    results, cells = Results.open(ROOT / "results" / "paper", config), kind_of(config).cells(config, 0)
    current = [cell.key for cell in cells if results.has(cell)]
    assert sorted(current) == sorted(results.cells)
    missing = [cell.key for cell in cells if not results.has(cell)]
    assert [key for key in missing if not fnmatchcase(key, UNFINISHED.get(name, ""))] == []

"""Every substitute in its quick form on the real models and images."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tensigma.experiments import PAPER, load_config, markdown, quick_form, reproduce, section_of
from tensigma.experiments.reproduction import kind_of

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The data, and a folder for what experiments share."""
    real = os.environ.get("TENSIGMA_DATA")
    if not real or not Path(real).is_dir():
        pytest.skip("TENSIGMA_DATA does not name a folder with the real models and images")
    folder = tmp_path_factory.mktemp("substitutes")
    return Path(real), folder / "cache"


@pytest.mark.parametrize("name", PAPER)
def test_the_quick_form_runs(name: str, place: tuple[Path, Path], tmp_path: Path):
    data, cache = place
    config = quick_form(load_config(name))
    (found,) = reproduce([config], data=data, out=tmp_path, cache=cache)
    assert list(found.cells) == [cell.key for cell in kind_of(config).cells(config, 0)]
    for cell in found.cells.values():
        assert 0 <= cell.get("top1", 0.0) <= 1
        assert 0 <= cell.get("error", 0.0) < 1
    assert "**Substitute.**" in markdown(section_of(found))
    assert json.loads((tmp_path / f"{name}.quick.json").read_text())["substitute"]
    panels = kind_of(config).panels(config, found.cells)
    assert bool(panels) or config.shown == "table"

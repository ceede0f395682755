"""The scripts of the gallery run, show what their page says, and write the pictures that it shows."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib import pyplot as plt
from torch import nn

from tensigma.experiments import demo
from tensigma.layers import find_compressed
from tensigma.zoo import load_data

DOCS = Path(__file__).parent.parent / "docs"
_LARGEST = 120_000
Run = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def network() -> nn.Module:
    """Half as wide as the network of the gallery."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "MODEL", "zoo:digits-cnn?width=16")
        return demo.train(load_data(demo.TRAIN), epochs=4)


@pytest.fixture
def run(network: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run a script as a person would, but for the training; what it leaves behind are its variables."""

    def script(name: str) -> dict[str, Any]:
        monkeypatch.setattr(demo, "train", lambda data: network)
        monkeypatch.setattr(sys, "argv", [name, str(tmp_path / "pictures")])
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        monkeypatch.syspath_prepend(DOCS / "gallery")
        plt.switch_backend("agg")
        with matplotlib.rc_context():
            return runpy.run_path(str(DOCS / "gallery" / name), run_name="__main__")

    yield script
    plt.close("all")
    sys.modules.pop("drawing", None)


def check_pictures(folder: Path, prefix: str) -> None:
    """Those that the page shows, no others, and small ones; the committed ones too."""
    page = (DOCS / "gallery.md").read_text(encoding="utf-8")
    shown = set(re.findall(rf"\(images/gallery/({prefix}-[\w.-]+)\)", page))
    assert shown
    assert {path.name for path in folder.iterdir()} == shown
    for path in [*folder.iterdir(), *(DOCS / "images" / "gallery" / name for name in shown)]:
        assert path.read_bytes().startswith(b"\x89PNG"), path
        assert path.stat().st_size < _LARGEST, path


@pytest.mark.slow
def test_what_a_layer_does(run: Run, tmp_path: Path) -> None:
    left = run("what_a_layer_does.py")
    for format in left["solvers"]:
        frobenius, sigma = left["trials"][format, "Frobenius"], left["trials"][format, "Σ"]
        for plain, aware in zip(frobenius, sigma, strict=True):
            assert plain["size"] == aware["size"]
            # Each norm wins at what it minimises; what a layer does is the same on images that nobody has seen.
            assert plain["Frobenius"] < aware["Frobenius"]
            assert aware["Σ"] < plain["Σ"]
            assert aware["outputs"] < 0.8 * plain["outputs"]
        for trials in (frobenius, sigma):
            assert all(smaller["Σ"] > larger["Σ"] for smaller, larger in pairwise(trials))
        assert sum(trial["answers"] for trial in sigma) > sum(trial["answers"] for trial in frobenius)
    few = left["enough"]
    assert few < left["stats"].d / 4
    assert left["shares"]["weights"][few - 1] < 0.5
    check_pictures(tmp_path / "pictures", "layer")


@pytest.mark.slow
def test_one_budget(run: Run, tmp_path: Path) -> None:
    left = run("one_budget.py")
    trade, plans, found = left["trade"], left["plans"], left["found"]
    assert all(a.share < b.share and a.error > b.error for a, b in pairwise(trade))
    assert (trade[-1].share, trade[-1].error) == (1, 0)
    for share, plan in plans.items():
        assert plan.after.params <= share * plan.n_params
    alone, sequence = left["WAYS"]
    for share, plan in plans.items():
        for way in (alone, sequence):
            assert found[way, share].size.params == plan.after.params
    assert all(found[sequence, share].agreement > found[alone, share].agreement - 0.01 for share in plans)
    assert found[sequence, 0.03].agreement > found[alone, 0.03].agreement + 0.1
    assert found[sequence, 0.1].agreement > 0.95
    # The first compressed layer meets the same inputs either way; in the end the sequence has made up for something.
    for share in (0.03, 0.05):
        assert left["drift"][alone, share][:2] == pytest.approx(left["drift"][sequence, share][:2], abs=0.02)
        assert left["drift"][sequence, share][-1] < 0.9 * left["drift"][alone, share][-1]
    check_pictures(tmp_path / "pictures", "budget")


@pytest.mark.slow
# What the package warns about is its own.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["accelerate", "lightning"])
def test_the_training_loop_of_another_library(run: Run, library: str) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install -c constraints.txt {library}")
    left = run(f"with_{library}.py")
    tuned, report = left["tuned"], left["report"]
    assert find_compressed(tuned).keys() == {layer.name for layer in report.compressed}
    assert left["after"].size.params == left["before"].size.params == report.after.params
    assert left["after"].top1 > left["before"].top1

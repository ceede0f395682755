"""Experiments end to end: on tiny stand-ins for the paper's configs, and cell by cell."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support_experiments import stand_ins
from tensigma.errors import InputError, StoreError
from tensigma.experiments import (
    PAPER,
    Config,
    Overrides,
    ReproductionProgress,
    Results,
    accuracy,
    current_cells,
    load_config,
    markdown,
    quick_form,
    reproduce,
    section_of,
    state_of,
    workshop,
    write_page,
)
from tensigma.experiments.kinds import Cell
from tensigma.experiments.reproduction import kind_of
from tensigma.experiments.settings import parse_config
from tensigma.experiments.workshop import Workshop
from tensigma.planning import plan

DIGITS: dict[str, Any] = {
    "kind": "accuracy",
    "title": "Digits",
    "substitute": "digits stand in for everything",
    "models": {"net": {"spec": "zoo:digits-cnn?width=6", "title": "a net"}},
    "sources": {"test": "digits:?split=val&samples=60", "train": "digits:?split=train&samples=40&seed={seed}"},
    "series": [
        {"name": "classical", "method": "cp", "norm": "frobenius"},
        {"name": "Σ", "method": "cp", "norm": "sigma", "source": "train"},
    ],
    "study": [{"model": "net", "evaluation": "test", "alphas": [1.0, 1.1], "seeds": [0, 1]}],
}


def digits(**changes: Any) -> Config:
    return parse_config({**DIGITS, **changes}, name="fisher", config="mine")


def go(config: Config, folder: Path, **options: Any) -> Results:
    (found,) = reproduce([config], data=None, out=folder / "out", cache=folder / "cache", **options)
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Overrides, Path]:
    folder = tmp_path_factory.mktemp("stand-ins")
    return stand_ins(folder), folder


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPER)
def test_the_papers_own_settings_run_on_stand_ins(name: str, tiny: tuple[Overrides, Path], tmp_path: Path):
    overrides, folder = tiny
    config = quick_form(load_config(name, "paper"))
    (found,) = reproduce([config], data=None, out=tmp_path, cache=folder / "cache", overrides=overrides)
    expected = kind_of(config).cells(config, 0)
    assert list(found.cells) == [cell.key for cell in expected]
    assert state_of(config, tmp_path, tmp_path).text == "done"
    stored = json.loads((tmp_path / f"{name}.paper.quick.json").read_text())
    assert {"seed", "versions", "machine", "seconds", "settings"} <= set(stored)
    assert stored["substitute"] is None
    text = markdown(section_of(found))
    assert name in text
    assert "Quick form" in text
    assert "Substitute" not in text


@pytest.mark.slow
def test_a_run_that_stopped_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = digits()
    kind = accuracy.Accuracy
    original = kind.run
    ran: list[str] = []

    def run(self: Any, config: Config, cell: Cell, room: Workshop) -> dict[str, Any]:
        if len(ran) == 3:
            raise KeyboardInterrupt
        ran.append(cell.key)
        return original(self, config, cell, room)

    monkeypatch.setattr(kind, "run", run)
    with pytest.raises(KeyboardInterrupt):
        go(config, tmp_path)
    assert state_of(config, tmp_path / "out").text == "3 of 7 cells"
    before = Results.open(tmp_path / "out", config).cells
    assert list(before) == ran
    monkeypatch.setattr(kind, "run", original)
    seen: list[ReproductionProgress] = []
    found = go(config, tmp_path, progress=seen.append)
    assert {key: found.cells[key] for key in before} == before
    assert (seen[0].done, seen[-1].done, seen[-1].total, seen[-1].computed) == (3, 7, 7, 4)
    assert seen[0].remaining is None
    assert seen[-1].remaining == 0
    # All there: nothing is computed again.
    monkeypatch.setattr(kind, "run", None)
    assert go(config, tmp_path).cells == found.cells


@pytest.mark.slow
def test_some_cells_may_be_computed_before_others(tmp_path: Path):
    config = digits()
    some = go(config, tmp_path, only="*α=1.1 | classical*")
    assert list(some.cells) == ["a net | α=1.1 | classical | seed 0"]
    (table,) = section_of(some).tables
    assert [row[0] for row in table.rows] == ["1.1"]
    assert state_of(config, tmp_path / "out").text == "1 of 7 cells"
    with pytest.raises(InputError, match=r"only='nothing' matches no cell; they have names such as 'a net"):
        go(config, tmp_path, only="nothing")
    whole = go(config, tmp_path)
    assert len(whole.cells) == 7
    assert whole.cells.items() >= some.cells.items()


@pytest.mark.slow
def test_only_what_a_change_concerns_is_computed_again(tmp_path: Path):
    first = go(digits(), tmp_path).cells
    series = [DIGITS["series"][0], {**DIGITS["series"][1], "norm": "centred"}]
    changed = digits(series=series)
    assert state_of(changed, tmp_path / "out").done == 3
    assert len(current_cells(Results.open(tmp_path / "out", changed))) == 3
    second = go(changed, tmp_path).cells
    same = {key for key in first if first[key]["stamp"] == second[key]["stamp"]}
    assert same == {key for key in first if "Σ" not in key}
    # A smaller grid leaves no stale cell behind.
    fewer = digits(study=[{**DIGITS["study"][0], "alphas": [1.1]}])
    assert len(go(fewer, tmp_path).cells) == 4


@pytest.mark.slow
def test_experiments_share_statistics_solutions_and_accuracies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = go(digits(), tmp_path)
    for name in ("calibrate", "pack_hits"):
        monkeypatch.setattr(workshop, name, None)
    monkeypatch.setattr("tensigma.solving.solution_store.solve", None)
    (second,) = reproduce([digits()], data=None, out=tmp_path / "again", cache=tmp_path / "cache")
    plain = ("top1", "rate", "seconds", "hits")
    for key, cell in first.cells.items():
        assert all(cell.get(name) == second.cells[key].get(name) for name in plain)


def test_series_without_images_of_their_own_take_the_studys_and_are_compared_image_by_image(tmp_path: Path):
    series = [DIGITS["series"][0], {"name": "Σ", "method": "cp", "norm": "sigma"}]
    study = {"model": "net", "evaluation": "test", "alphas": [1.1], "source": "train"}
    config = digits(series=series, study=[study], beside="sigma")
    found = go(config, tmp_path)
    cells = {cell["series"]: cell for cell in found.cells.values()}
    points = 100 * (cells["Σ"]["top1"] - cells["classical"]["top1"])
    (row,) = section_of(found).tables[0].rows
    classical, sigma = row[2:]
    assert sigma == f"{100 * cells['Σ']['top1']:.1f}"
    assert classical.startswith(f"{100 * cells['classical']['top1']:.1f} ({points:+.1f}: ")
    with pytest.raises(InputError, match="needs a source"):
        digits(series=series)


@pytest.mark.slow
def test_seeds_change_images_or_starts_and_become_a_spread(tmp_path: Path):
    images = go(digits(), tmp_path / "images")
    assert sum("classical" in key for key in images.cells) == 2
    assert sum("| Σ |" in key for key in images.cells) == 4
    starts = go(digits(seeds_of="solver"), tmp_path / "starts")
    assert sum("classical" in key for key in starts.cells) == 4
    text = markdown(section_of(starts))
    assert text.count("±") == 4
    assert "**Substitute.** digits stand in for everything" in text
    assert "In the paper:" in text
    assert "Beside classical" in text


@pytest.mark.slow
def test_seeds_of_the_solver_are_those_of_random_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plans = []

    def spy(*arguments: Any, **keywords: Any) -> Any:
        plans.append(keywords["options"])
        return plan(*arguments, **keywords)

    monkeypatch.setattr(accuracy, "plan", spy)
    go(digits(seeds_of="solver", study=[{**DIGITS["study"][0], "alphas": [1.1]}]), tmp_path / "starts")
    assert plans == [{"seed": seed, "init": "random"} for _ in range(2) for seed in (0, 1)]
    plans.clear()
    go(digits(study=[{**DIGITS["study"][0], "alphas": [1.1]}]), tmp_path / "images")
    assert plans == [{"seed": 0}] * 3


def test_a_network_is_trained_once_and_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    training = {"source": "train", "epochs": 2, "learning_rate": 0.01}
    config = digits(models={"net": {**DIGITS["models"]["net"], "train": training}})
    settings = config.models["net"]
    first = Workshop(None, tmp_path / "one").model("net", settings, config.sources)
    other = Workshop(None, tmp_path / "other").model("net", settings, config.sources)
    assert workshop.state_hash(first) == workshop.state_hash(other)
    monkeypatch.setattr(workshop, "train", None)
    again = Workshop(None, tmp_path / "one").model("net", settings, config.sources)
    assert workshop.state_hash(first) == workshop.state_hash(again)


@pytest.mark.slow
def test_results_of_something_else_are_kept(tmp_path: Path):
    config = digits()
    go(config, tmp_path)
    with pytest.raises(StoreError, match="seed 0, not 1"):
        go(config, tmp_path, seed=1)
    (tmp_path / "out" / "fisher.mine.json").write_text("[]")
    with pytest.raises(StoreError, match="no results"):
        state_of(config, tmp_path / "out")
    assert state_of(quick_form(config), tmp_path / "out").text == "not run"


def test_what_is_missing_is_named(tmp_path: Path):
    config = load_config("fisher")
    with pytest.raises(InputError, match="--data DIR"):
        reproduce([config], data=None, out=tmp_path, cache=tmp_path)
    with pytest.raises(InputError, match="--weights squeezenet=FILE"):
        reproduce([config], data=tmp_path, out=tmp_path, cache=tmp_path)
    assert state_of(load_config("cpsigma-c100"), tmp_path, tmp_path).text == "needs CIFAR-100"
    (tmp_path / "cifar100").mkdir()
    assert state_of(load_config("cpsigma-c100"), tmp_path, tmp_path).text == "not run"


@pytest.mark.slow
def test_the_page_has_every_experiment_and_its_figures(tmp_path: Path):
    figure = replace(go(digits(shown="figure"), tmp_path), seconds=90.0)
    unrun = Results.open(tmp_path, load_config("cpsigma-c100"))
    page = tmp_path / "docs" / "paper.md"
    write_page([figure, unrun], page)
    text = page.read_text()
    assert "![Digits](paper/fisher.svg)" in text
    assert "1.5 minutes" in text
    assert "Not run: it needs CIFAR-100" in text
    drawing = (tmp_path / "docs" / "paper" / "fisher.svg").read_text()
    assert "Digits (substitute)" in drawing
    write_page([figure, unrun], page)
    assert drawing == (tmp_path / "docs" / "paper" / "fisher.svg").read_text()

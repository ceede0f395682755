"""Configs: all there, strict, and as the paper has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensigma.errors import InputError
from tensigma.experiments import CONFIGS, PAPER, load_config, quick_form
from tensigma.experiments.catalogue import plain, printed_of
from tensigma.experiments.reproduction import kind_of
from tensigma.experiments.settings import parse_config

MINIMAL: dict[str, Any] = {
    "kind": "accuracy",
    "title": "A title",
    "models": {"net": {"spec": "zoo:digits-cnn", "title": "a net"}},
    "sources": {"test": "digits:?split=val", "train": "digits:?split=train"},
    "series": [{"name": "Σ", "method": "tucker2", "norm": "sigma", "source": "train"}],
    "study": [{"model": "net", "evaluation": "test", "alphas": [0.5, 1]}],
}


def changed(**changes: Any) -> dict[str, Any]:
    return {**MINIMAL, **changes}


def test_there_are_as_many_experiments_as_the_paper_has_tables_and_figures():
    assert len(PAPER) == len(set(PAPER)) == 23


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("config", CONFIGS)
def test_every_experiment_has_every_config(name: str, config: str):
    found = load_config(name, config)
    cells = kind_of(found).cells(found, 0)
    assert len({cell.key for cell in cells}) == len(cells) > 0
    assert len(kind_of(found).cells(quick_form(found), 0)) < max(len(cells), 9)
    # Whoever reads results of a substitute is told so; the paper's own settings are never called one.
    assert (found.substitute is not None) == (config == "substitute")
    if found.substitute is not None:
        assert "stand" in found.substitute


def test_the_quick_form_leaves_large_networks_out_if_there_are_others():
    quick = quick_form(load_config("t2sigma-pardata"))
    assert [study.model for study in quick.study] == ["squeezenet"]
    models = {"net": {**MINIMAL["models"]["net"], "runtime": "onnxruntime"}}
    alone = quick_form(parse_config(changed(models=models), name="fisher", config="mine"))
    assert [study.model for study in alone.study] == ["net"]


@pytest.mark.parametrize("name", PAPER)
def test_both_configs_ask_the_same_question(name: str):
    substitute, paper = (load_config(name, config) for config in CONFIGS)
    assert substitute.kind == paper.kind
    assert substitute.shown == paper.shown
    assert substitute.seeds_of == paper.seeds_of
    assert {series.method for series in paper.series} <= {series.method for series in substitute.series}
    assert {series.precision for series in paper.series} == {series.precision for series in substitute.series}
    assert any(series.finetune for series in paper.series) == any(series.finetune for series in substitute.series)


@pytest.mark.parametrize("name", PAPER)
def test_printed_numbers_fill_their_columns(name: str):
    printed = printed_of(name)
    assert printed.note or printed.rows
    assert all(len(row) == len(printed.columns) for row in printed.rows)
    config = load_config(name, "paper")
    if printed.rows and config.kind == "accuracy":
        assert set(printed.columns) - {"α", "rate"} == {series.name for series in config.series}
        assert len(printed.rows) == len(config.study[0].alphas)
        if "α" in printed.columns:
            assert [row[0] for row in printed.rows] == list(config.study[0].alphas)


@pytest.mark.parametrize(
    ("name", "model", "alphas"),
    [
        ("t2sigma-pardata", "resnet50", (0.8, 0.9, 0.95, 1.0)),
        ("t2sigma-tl", "resnet50", (0.9, 1.0, 1.1, 1.2, 1.3, 1.4)),
        ("t2sigma-c100", "resnet18", (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)),
        ("cpsigma-c10", "googlenet", (0.9, 0.95, 1.0)),
        ("gnetc100-randomseeds", "googlenet", (0.85, 0.9, 0.95, 1.0)),
    ],
)
def test_the_grids_of_the_paper(name: str, model: str, alphas: tuple[float, ...]):
    study = next(study for study in load_config(name, "paper").study if study.model == model)
    assert study.alphas == alphas


def test_the_fine_tuning_of_the_paper():
    imagenet, cifar, substitute = (
        load_config(*names).finetune
        for names in (("t2sigma-pardata", "paper"), ("cpsigma-c100", "paper"), ("t2sigma-tl", "substitute"))
    )
    assert imagenet is not None
    assert cifar is not None
    assert substitute is not None
    assert imagenet.learning_rates == (1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10)
    assert cifar.learning_rates == (1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
    assert imagenet.epochs == cifar.epochs == 30
    assert (substitute.epochs, len(substitute.learning_rates), substitute.eliminate) == (3, 3, True)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (changed(titel="x"), "'titel' is not known; did you mean 'title'"),
        (changed(quick=True), "not for the file to say"),
        ({key: value for key, value in MINIMAL.items() if key != "sources"}, "'sources' is missing"),
        (changed(title=3), "title: expected str, got 3"),
        (changed(shown="poster"), "choose one of 'table', 'figure'"),
        (changed(series={}), "expected a list"),
        (changed(study=[{"model": "net", "alphas": 0.5}]), "alphas: expected a list, got 0.5"),
        (changed(study=[{"model": "net", "alphas": [True]}]), "expected float"),
        (changed(study=[{"model": "other"}]), "there is no model 'other'; there are 'net'"),
        (changed(study=[{"model": "net", "evaluation": "val"}]), "there is no source 'val'"),
        (changed(study=[{"model": "net", "series": ["S"]}]), "there is no series 'S'"),
        (changed(study=[{"model": "net"}, {"model": "net"}]), "titles that tell them apart"),
        (changed(series=[{"name": "a", "method": "cp", "norm": "sigma"}]), "needs a source"),
        (changed(series=[{"name": "a", "method": "cp", "norm": "frobenius", "finetune": True}]), "no \\[finetune\\]"),
        (changed(models=[1]), "expected a table"),
    ],
)
def test_what_a_config_must_not_say(table: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        parse_config(table, name="fisher", config="mine")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (changed(kind="poem"), "kind 'poem' is unknown"),
        (changed(study=[{"model": "net", "alphas": [1.0]}]), "evaluation and alphas"),
        (changed(kind="layers"), "layers and one alpha"),
        (changed(kind="reconstruction"), "one layer, ranks, source and evaluation"),
    ],
)
def test_what_a_kind_needs(table: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        kind_of(parse_config(table, name="fisher", config="mine"))


def test_names_that_are_not_there(tmp_path: Path):
    with pytest.raises(InputError, match="no experiment 'fishr'"):
        load_config("fishr")
    with pytest.raises(InputError, match="give substitute, paper, or a TOML file"):
        load_config("fisher", "papr")
    (tmp_path / "bad.toml").write_text("kind = ")
    with pytest.raises(InputError, match="not readable as TOML"):
        load_config("fisher", str(tmp_path / "bad.toml"))


def test_settings_as_plain_data_say_what_is_not_usual():
    found = plain(parse_config(MINIMAL, name="fisher", config="mine"))
    assert found["study"] == [{"model": "net", "evaluation": "test", "alphas": [0.5, 1.0]}]
    assert "remark" not in found


def test_only_seeds_that_matter_are_run():
    config = load_config("r18-samplesize")
    keys = [cell.key for cell in kind_of(config).cells(config, 0)]
    assert sum("Σ of 100 images" in key for key in keys) == 5 * len(config.study[0].alphas)
    assert sum("Σ of 10000 images" in key for key in keys) == len(config.study[0].alphas)

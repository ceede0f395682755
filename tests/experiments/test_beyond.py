"""The experiment past the paper: rules at the rate of a budget, ingredients, agreement on held-out images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tensigma.experiments.beyond as beyond
from tensigma.errors import InputError
from tensigma.experiments import Config, load_config, markdown, reproduce, section_of
from tensigma.experiments.beyond import Beyond, _Moved
from tensigma.experiments.reproduction import kind_of
from tensigma.experiments.settings import parse_config
from tensigma.experiments.variants import Variant

RULE = {"ranks": "vbmf", "method": "tucker2", "norm": "sigma", "layers": "spatial"}
BUDGET = {"ranks": "budget", "method": "auto", "norm": "centred", "layers": "all"}


def digits(variants: list[dict[str, Any]]) -> Config:
    table: dict[str, Any] = {
        "kind": "beyond",
        "title": "Digits",
        "substitute": "digits stand in",
        "models": {"net": {"spec": "zoo:digits-cnn?width=6", "title": "a net"}},
        "sources": {
            "test": "digits:?split=val&samples=60",
            "train": "digits:?split=train&samples=60",
            "held": "digits:?split=val&samples=30&seed=5",
        },
        "study": [{"model": "net", "evaluation": "test", "source": "train"}],
        "options": {
            "rates": {"net": [2.0, 3.0]},
            "held_out": {"net": "held"},
            "augment": {"net": {"shift": 1}},
            "variants": variants,
        },
    }
    return parse_config(table, name="beyond", config="mine")


@pytest.mark.slow
def test_every_ingredient_runs_and_reaches_its_rate(tmp_path: Path) -> None:
    config = digits(
        [
            {"name": "rule", **RULE},
            {"name": "budget", **BUDGET},
            {"name": "sequence", **BUDGET, "sequential": True},
            {"name": "refined", **BUDGET, "sequential": True, "refine": {"net": 100}, "rates": {"net": [3.0]}},
            {"name": "statistics", **BUDGET, "reestimate_bn": True, "weigh": 0.5, "rates": {"net": [2.0]}},
        ]
    )
    (found,) = reproduce([config], data=None, out=tmp_path / "out", cache=tmp_path / "cache")
    cells = found.cells
    assert len(cells) == 1 + 2 + 2 + 2 + 1 + 1
    assert cells["a net | original"]["agreement"] == 1.0
    for rate in (2.0, 3.0):
        assert cells[f"a net | budget | {rate:g}"]["rate"] >= rate
        # From below, to the advantage of the rule.
        assert cells[f"a net | rule | {rate:g}"]["rate"] <= rate
    assert cells["a net | sequence | 3"]["sequential"] is True
    assert cells["a net | budget | 3"]["sequential"] is False
    assert cells["a net | refined | 3"]["refinement"]["passes"] == 100
    assert 0 <= cells["a net | statistics | 2"]["agreement"] <= 1
    text = markdown(section_of(found))
    assert "| rate 2 | rate 3 |" in text
    assert text.count("| – |") == 2


@pytest.mark.slow
def test_what_is_trained_further_is_compressed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    compress = beyond.compress

    def counted(*args: Any, **options: Any) -> Any:
        made.append(options["sequential"])
        return compress(*args, **options)

    monkeypatch.setattr(beyond, "compress", counted)
    plain = {"name": "plain", **BUDGET, "rates": {"net": [2.0]}}
    refined = {**plain, "name": "refined", "refine": {"net": 100}}
    found = []
    for out, variants in (("one", [plain]), ("two", [plain, refined]), ("three", [{**plain, "sequential": True}])):
        config = digits(variants)
        found += reproduce([config], data=None, out=tmp_path / out, cache=tmp_path / "cache")
        assert len(made) == (2 if out == "three" else 1)
    first, second = (each.cells["a net | plain | 2"] for each in found[:2])
    timeless = [{key: value for key, value in each.items() if key != "took"} for each in (first, second)]
    assert timeless[0] == timeless[1]
    assert found[1].cells["a net | refined | 2"]["params"] == first["params"]


def test_what_is_stored_depends_on_settings_and_not_on_names() -> None:
    one, other = (digits([{"name": name, **BUDGET}]) for name in ("one", "other"))
    stamps = [[cell.stamp for cell in Beyond().cells(config, 0)] for config in (one, other)]
    assert stamps[0] == stamps[1]
    weighed = digits([{"name": "one", **BUDGET, "weigh": 0.5}])
    assert [cell.stamp for cell in Beyond().cells(weighed, 0)][1:] != stamps[0][1:]


def test_the_own_config_is_sound() -> None:
    config = load_config("beyond")
    cells = kind_of(config).cells(config, 0)
    assert len({cell.key for cell in cells}) == len(cells)
    assert {config.study[cell.study].model for cell in cells} == {"resnet20", "resnet56", "squeezenet", "resnet50"}


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ({**RULE, "ranks": "guess"}, "there are vbmf, sigma-vbmf, balf and budget"),
        ({**RULE, "speed": 3}, "a variant has 'speed'"),
        ({"ranks": "vbmf"}, "incomplete"),
    ],
)
def test_strange_variants_are_refused(variant: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Variant.of({"name": "x", **variant}, "here")


def test_configs_without_what_it_needs_are_refused() -> None:
    with pytest.raises(InputError, match=r"options\.variants is missing"):
        kind_of(digits([]))


def test_images_are_moved_by_whole_pixels_and_mirrored() -> None:
    image = torch.arange(16.0).reshape(1, 1, 4, 4) + 1
    moved = _Moved(shift=1, seed=0)
    results = [moved(image) for _ in range(40)]
    assert all(result.shape == image.shape for result in results)
    mirrored = image.flip(-1)
    assert any(torch.equal(result, image) for result in results) or any(torch.equal(r, mirrored) for r in results)
    allowed = {0.0, *image.flatten().tolist()}
    assert all(set(result.flatten().tolist()) <= allowed for result in results)
    assert len({tuple(result.flatten().tolist()) for result in results}) > 6

"""Recipes: one object for everything that decides a plan, checked as a whole, and the same in every call."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch
from torch import nn

import tensigma as ts
from support_nets import batches, small_net
from tensigma.errors import InputError, RankError
from tensigma.layers import find_layers
from tensigma.planning import first_convolution


@pytest.fixture(scope="module")
def stats() -> ts.Calibration:
    return ts.calibrate(small_net(), batches())


def test_a_recipe_says_what_single_keywords_say(stats: ts.Calibration) -> None:
    words: dict[str, Any] = {
        "ranks": ts.Energy(0.9),
        "method": "tucker2",
        "norm": "sigma",
        "layers": ["block.0", "up", "h*"],
        "skip": "head",
        "overrides": {"up": {"ranks": 2}},
        "options": {"max_sweeps": 3},
        "saving": "none",
    }
    net = small_net()
    plan = ts.plan(net, stats, **words)
    assert [entry.name for entry in plan.compressed] == ["block.0", "up", "hidden"]
    assert ts.plan(net, stats, recipe=ts.Recipe(**words)) == plan
    assert ts.plan(net, recipe=ts.Recipe(**words), data=batches()) == plan
    _, report = ts.compress(net, batches(), recipe=ts.Recipe(**words), sequential=False)
    assert [(row.name, row.ranks) for row in report.compressed] == [(e.name, e.ranks) for e in plan.compressed]


def test_a_budget_alone_is_a_recipe() -> None:
    net = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 5))
    data = [torch.randn(50, 20)]
    reports = [
        ts.compress(net, data, sequential=False, **wish)[1]
        for wish in ({"budget": ts.Params(0.5)}, {"recipe": ts.Recipe(budget=ts.Params(0.5))})
    ]
    assert reports[0].compressed
    assert [row.ranks for row in reports[0].layers] == [row.ranks for row in reports[1].layers]
    assert reports[0].after == reports[1].after


@pytest.mark.slow
def test_an_override_that_needs_fisher_is_calibrated_for_in_every_call() -> None:
    """What some layer needs is asked of the data, whichever call makes the plan."""
    net, data = small_net(), batches()
    recipe = ts.Recipe(ranks=ts.Ranks({"*": 2}), layers="spatial", overrides={"block.0": {"norm": "fisher"}})
    assert recipe.fisher == "model"
    plan = ts.plan(net, recipe=recipe, data=data)
    assert {entry.name: entry.norm.name for entry in plan.compressed} == {
        "block.0": "fisher",
        "grouped": "centred",
        "up": "centred",
    }
    small, report = ts.compress(net, data, recipe=recipe)
    assert {row.name: row.norm for row in report.compressed} == {e.name: e.norm.name for e in plan.compressed}
    assert small(data[0]).isfinite().all()
    # A plan of that kind gathers it by itself too.
    carried, _ = ts.compress(net, plan, data=data)
    torch.testing.assert_close(carried.state_dict(), small.state_dict())
    with pytest.raises(InputError, match=r"norm='fisher', layer 'block\.0': .*calibrate with fisher='model'"):
        ts.plan(net, ts.calibrate(net, data), recipe=recipe)


def test_norms_and_what_they_need() -> None:
    plain = ts.Recipe(budget=ts.Params(0.5), norm="frobenius")
    assert (plain.needs_stats, plain.fisher) == (None, None)
    other = replace(plain, overrides={"a": {"norm": "sigma"}, "b": {"norm": "fisher"}})
    assert [norm.name for norm in other.norms] == ["frobenius", "sigma", "fisher"]
    assert other.needs_stats is not None
    assert (other.needs_stats.name, other.fisher) == ("sigma", "model")


WISHES: list[Any] = [
    pytest.param({}, "neither was", id="nothing"),
    pytest.param({"budget": ts.Params(0.5), "ranks": ts.VBMF(1)}, "both were given", id="both"),
    pytest.param({"budget": 0.5}, r"budget= takes Params\(share\)", id="budget"),
    pytest.param({"ranks": 8}, r"ranks= takes VBMF\(alpha\).*got 8", id="ranks"),
    pytest.param({"budget": ts.Params(0.5), "saving": "macs"}, "saving='macs' has no effect", id="idle-saving"),
    pytest.param({"ranks": ts.VBMF(1), "saving": "bytes"}, "saving='bytes' is unknown", id="saving"),
    pytest.param({"ranks": ts.VBMF(1), "weights": {"a": 2.0}}, "weights= has no effect", id="idle-weights"),
    pytest.param({"budget": ts.Params(0.5), "weights": {"a": 0}}, r"weights\['a'\] is a number above 0", id="weight"),
    pytest.param({"budget": ts.Params(0.5), "weights": "all"}, "weights= takes 'auto', None, or a dict", id="weights"),
    pytest.param({"budget": ts.Params(0.5), "method": "magic"}, "method 'magic' is unknown", id="method"),
    pytest.param({"budget": ts.Params(0.5), "norm": "l1"}, "norm 'l1' is unknown", id="norm"),
    pytest.param({"budget": ts.Params(0.5), "options": {"sweeps": 1}}, "no solver has an option 'sweeps'", id="option"),
    pytest.param(
        {"budget": ts.Params(0.5), "overrides": {"a": {"rank": 1}}}, r"overrides\['a'\] has 'rank'", id="override"
    ),
    pytest.param(
        {"budget": ts.Params(0.5), "overrides": {"a": {"method": "magic"}}}, "'magic' is unknown", id="o-method"
    ),
    pytest.param({"budget": ts.Params(0.5), "overrides": {"a": {"norm": "l1"}}}, "'l1' is unknown", id="o-norm"),
    pytest.param({"budget": ts.Params(0.5), "overrides": {"a": {"ranks": 0}}}, "at least 1", id="o-ranks"),
    pytest.param({"budget": ts.Params(0.5), "overrides": {"a": {"options": {"x": 1}}}}, "option 'x'", id="o-option"),
]


@pytest.mark.parametrize(("wish", "message"), WISHES)
def test_wrong_wishes_are_refused_before_anything_is_done(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ts.Recipe(**wish)
    # A model is not even looked at.
    with pytest.raises(InputError, match=message):
        ts.plan(nn.Identity(), **wish)


def test_ranks_for_some_layers_make_saving_decide_something() -> None:
    recipe = ts.Recipe(
        budget=ts.Params(0.6), overrides={"block.0": {"ranks": (16, 12)}}, norm="frobenius", saving="none"
    )
    assert ts.plan(small_net(), recipe=recipe)["block.0"].ranks == (16, 12)
    usual = ts.plan(small_net(), recipe=replace(recipe, saving=None))["block.0"]
    assert usual.reason == "tucker2 16 12 would save no parameters"


def test_a_plan_decides_all_that_a_recipe_would(stats: ts.Calibration) -> None:
    net = small_net()
    plan = ts.plan(net, stats, ranks=ts.Ranks({"*": 2}))
    for wish in ({"budget": ts.Params(0.5)}, {"recipe": ts.Recipe(ranks=ts.VBMF(1))}):
        with pytest.raises(InputError, match="a plan decides all that budget= and recipe= would"):
            ts.compress(net, plan, stats, **wish)
    both: dict[str, Any] = {"budget": ts.Params(0.5), "recipe": ts.Recipe(budget=ts.Params(0.5))}
    for wrong in ({}, both):
        with pytest.raises(InputError, match=r"budget= .*or recipe= .*is needed, and only one of them"):
            ts.compress(net, batches(), **wrong)


@pytest.mark.parametrize(
    "word",
    [
        {"budget": ts.Params(0.5)},
        {"ranks": ts.VBMF(1)},
        {"method": "cp"},
        {"norm": "sigma"},
        {"layers": "spatial"},
        {"skip": ()},
        {"overrides": {"head": {"ranks": 1}}},
        {"options": {"tol": 1e-3}},
        {"saving": "none"},
        {"weights": None},
        {"weights": {"head": 2.0}},
    ],
    ids=lambda word: "-".join(f"{key}={value}" for key, value in word.items()),
)
def test_a_recipe_goes_with_no_other_keyword(stats: ts.Calibration, word: dict[str, Any]) -> None:
    recipe = ts.Recipe(budget=ts.Params(0.6))
    with pytest.raises(InputError, match=f"recipe= decides {next(iter(word))}= too"):
        ts.plan(small_net(), stats, recipe=recipe, **word)


def test_every_field_has_a_keyword_of_the_same_default() -> None:
    import inspect

    keywords = inspect.signature(ts.plan).parameters
    for field in fields(ts.Recipe):
        assert keywords[field.name].default in (field.default, None)
    assert {"recipe", "data", "input", "check", "progress", "cache"} == set(keywords) - {
        f.name for f in fields(ts.Recipe)
    } - {
        "model",
        "stats",
    }


def test_recipes_do_not_change() -> None:
    recipe = ts.Recipe(budget=ts.Params(0.5))
    with pytest.raises(FrozenInstanceError):
        recipe.norm = "sigma"  # type: ignore[misc]
    assert replace(recipe, norm="sigma").norm == "sigma"
    assert recipe == ts.Recipe(budget=ts.Params(0.5)) != replace(recipe, norm="sigma")
    # Checked anew.
    with pytest.raises(InputError, match="norm 'l1' is unknown"):
        replace(recipe, norm="l1")
    with pytest.raises(TypeError):
        ts.Recipe(ts.Params(0.5))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"layers": ["stem", "stm"]}, r"no layer is called 'stm' \(from layers=\); similar names: stem"),
        ({"skip": "conv9"}, r"no layer is called 'conv9' \(from skip=\)"),
        ({"overrides": {"layer9.*": {"norm": "sigma"}}}, r"no layer is called 'layer9\.\*' \(from overrides=\)"),
        ({"weights": {"stm": 1.0}}, "weights= names 'stm', which is no layer of the model: stem, block.0"),
    ],
)
def test_names_that_no_layer_has_are_refused(wish: dict[str, Any], message: str) -> None:
    recipe = ts.Recipe(budget=ts.Params(0.6), **wish)
    names = [layer.name for layer in find_layers(small_net())]
    with pytest.raises(InputError, match=message):
        recipe.check_names(names)
    seen: list[Any] = []
    for call in (
        lambda: ts.plan(small_net(), recipe=recipe, data=batches(), progress=seen.append),
        lambda: ts.compress(small_net(), batches(), recipe=recipe, progress=seen.append),
    ):
        with pytest.raises(InputError, match=message):
            call()
    # Before the data is read.
    assert not seen


def test_the_last_override_that_matches_decides() -> None:
    recipe = ts.Recipe(
        budget=ts.Params(0.5),
        overrides={"*": {"norm": "sigma", "ranks": 4}, "h*": {"ranks": [2]}, "head": {"ranks": ts.Energy(0.5)}},
    )
    assert recipe.wish_for("stem").ranks == ts.Ranks({"*": 4})
    assert recipe.wish_for("hidden").ranks == ts.Ranks({"h*": (2,)})
    assert recipe.wish_for("head").ranks == ts.Energy(0.5)
    assert recipe.wish_for("head").norm.name == "sigma"


def test_ranks_of_overrides_check_themselves() -> None:
    with pytest.raises(RankError, match=r"overrides\['a'\]: a rank is a whole number"):
        ts.Recipe(budget=ts.Params(0.5), overrides={"a": {"ranks": (2, 0)}})


def test_the_first_convolution_is_the_first_that_data_reaches() -> None:
    layers = find_layers(nn.Sequential(nn.Linear(3, 3), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 3)))
    assert first_convolution(layers) == {"1"}
    assert first_convolution(layers, {"0": None, "2": None}) == {"2"}
    assert first_convolution(layers, {"0": None}) == set()

"""The front as plain data: every point is the plan that the budget gives, and can be put together again from it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import nn

import tensigma as ts
from tensigma.planning import Plan, front_data

BUDGETS = {"params": ts.Params, "macs": ts.Macs}


@pytest.fixture(scope="module")
def plan() -> Plan:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(),
        nn.Linear(64, 10),
    )  # fmt: skip
    stats = ts.calibrate(model, [torch.randn(48, 3, 8, 8)])
    return ts.plan(model, stats, budget=ts.Params(0.4), options={"seed": 3})


@pytest.fixture(scope="module")
def data(plan: Plan) -> dict[str, Any]:
    found = front_data(plan, n_budgets=9)
    assert found is not None
    return found


def put_together(data: dict[str, Any], measure: str, index: int) -> Plan:
    """A plan made from the data alone, as the page makes it."""
    whole = copy.deepcopy(data["plan"])
    for layer, place in zip(data["layers"], data["measures"][measure]["choices"][index], strict=True):
        method, ranks, params, macs, error = layer["options"][place]
        own = whole["layers"][layer["name"]]
        own.update(ranks=ranks, error=error if ranks else None, reason=None if ranks else "dense")
        own.update(method=method or own["method"], options=layer["settings"].get(method, {}))
        own["params"][1], own["macs"][1] = params, macs
    return Plan.from_json(whole)


@pytest.mark.parametrize("measure", BUDGETS)
def test_every_point_is_the_plan_of_its_budget(plan: Plan, data: dict[str, Any], measure: str):
    columns = data["measures"][measure]
    for index, share in enumerate(columns["share"]):
        made = put_together(data, measure, index)
        if index != columns["chosen"]:
            expected = plan.front().plan(BUDGETS[measure](share))
            assert {name: (e.label, e.options) for name, e in made.items() if e.ranks} == {
                name: (e.label, e.options) for name, e in expected.items() if e.ranks
            }
        assert (made.after.params, made.after.macs) == (columns["params"][index], columns["macs"][index])
        assert getattr(made.after, measure) <= share * getattr(made.before, measure)


@pytest.mark.parametrize("measure", BUDGETS)
def test_columns_run_along_the_front(data: dict[str, Any], measure: str):
    columns = data["measures"][measure]
    assert columns["share"] == sorted(set(columns["share"]))
    assert columns["share"][-1] == 1.0
    assert columns["error"][-1] == 0.0
    n_points = len(columns["share"])
    assert all(len(columns[name]) == n_points for name in ("error", "params", "macs", "choices"))
    # The chosen plan may come from the front of another measure; all others lie on this one.
    others = [error for index, error in enumerate(columns["error"]) if index != columns["chosen"]]
    assert others == sorted(others, reverse=True)


def test_the_plan_itself_is_one_of_the_points(plan: Plan, data: dict[str, Any]):
    for measure in BUDGETS:
        made = put_together(data, measure, data["measures"][measure]["chosen"])
        assert {name: entry.label for name, entry in made.items()} == {name: e.label for name, e in plan.items()}
        assert made.after == plan.after


def test_options_are_written_once_and_only_where_taken(data: dict[str, Any]):
    for position, layer in enumerate(data["layers"]):
        rows = [json.dumps(row[:2]) for row in layer["options"]]
        assert len(rows) == len(set(rows))
        taken = {row[position] for columns in data["measures"].values() for row in columns["choices"]}
        assert taken == set(range(len(rows)))


def test_is_plain_and_small(data: dict[str, Any]):
    text = json.dumps(data, allow_nan=False)
    assert json.loads(text) == data
    assert len(text) < 12_000


def test_without_input_sizes_there_is_one_measure():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 3))
    found = front_data(ts.plan(model, budget=ts.Params(0.5), norm="frobenius"), n_budgets=5)
    assert found is not None
    assert list(found["measures"]) == ["params"]
    assert found["measures"]["params"]["macs"] is None


def test_a_plan_without_budget_has_none(plan: Plan):
    assert front_data(Plan.from_json(plan.to_json())) is None

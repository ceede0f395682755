"""What a page needs, as plain data: every point of the front is a plan, and spectra are lower bounds of errors."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import nn

import tensigma as ts
from tensigma.planning import Plan, front_data, spectra_data
from tensigma.planning.page_data import N_POINTS

pytestmark = pytest.mark.slow

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
        method, ranks, params, macs, error, bits, stored = layer["options"][place]
        own = whole["layers"][layer["name"]]
        compressed = ranks is not None
        own.update(ranks=ranks, bits=bits, error=error if compressed else None, reason=None if compressed else "dense")
        own.update(method=method or own["method"], options=layer["settings"].get(method, {}))
        own["params"][1], own["macs"][1], own["bytes"][1] = params, macs, stored
    return Plan.from_json(whole)


@pytest.mark.parametrize("measure", BUDGETS)
def test_every_point_is_the_plan_of_its_budget(plan: Plan, data: dict[str, Any], measure: str) -> None:
    columns = data["measures"][measure]
    for index, share in enumerate(columns["share"]):
        made = put_together(data, measure, index)
        if index != columns["chosen"]:
            expected = plan.front().plan(BUDGETS[measure](share))
            assert [(e.name, e.label, e.options) for e in made.compressed] == [
                (e.name, e.label, e.options) for e in expected.compressed
            ]
        assert (made.after.params, made.after.macs) == (columns["params"][index], columns["macs"][index])
        assert getattr(made.after, measure) <= share * getattr(made.before, measure)


@pytest.mark.parametrize("measure", BUDGETS)
def test_columns_run_along_the_front(data: dict[str, Any], measure: str) -> None:
    columns = data["measures"][measure]
    assert columns["share"] == sorted(set(columns["share"]))
    assert columns["share"][-1] == 1.0
    assert columns["error"][-1] == 0.0
    n_points = len(columns["share"])
    assert all(len(columns[name]) == n_points for name in ("error", "params", "macs", "choices"))
    # The chosen plan may come from the front of another measure; all others lie on this one.
    others = [error for index, error in enumerate(columns["error"]) if index != columns["chosen"]]
    assert others == sorted(others, reverse=True)


def test_the_plan_itself_is_one_of_the_points(plan: Plan, data: dict[str, Any]) -> None:
    for measure in BUDGETS:
        made = put_together(data, measure, data["measures"][measure]["chosen"])
        assert {name: entry.label for name, entry in made.items()} == {name: e.label for name, e in plan.items()}
        assert made.after == plan.after


def test_options_are_written_once_and_only_where_taken(data: dict[str, Any]) -> None:
    for position, layer in enumerate(data["layers"]):
        rows = [json.dumps([*row[:2], row[5]]) for row in layer["options"]]
        assert len(rows) == len(set(rows))
        taken = {row[position] for columns in data["measures"].values() for row in columns["choices"]}
        assert taken == set(range(len(rows)))


def test_a_plan_with_bits_has_a_slider_of_bytes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 10))
    stats = ts.calibrate(model, [torch.randn(48, 3, 6, 6)])
    plan = ts.plan(model, stats, budget=ts.Bytes(0.3, bits=(4, 8)), method="svd")
    found = front_data(plan, n_budgets=4)
    assert found is not None
    assert (list(found["measures"]), found["bits"]) == (["params", "macs", "bytes"], [4, 8])
    columns = found["measures"]["bytes"]
    for index, share in enumerate(columns["share"]):
        made = put_together(found, "bytes", index)
        assert made.after.bytes == columns["bytes"][index] <= share * made.before.bytes
    made = put_together(found, "bytes", columns["chosen"])
    assert {name: entry.label for name, entry in made.items()} == {name: e.label for name, e in plan.items()}


def test_is_plain_and_small(data: dict[str, Any]) -> None:
    text = json.dumps(data, allow_nan=False)
    assert json.loads(text) == data
    assert len(text) < 12_000


def test_without_input_sizes_there_is_one_measure() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 3))
    found = front_data(ts.plan(model, budget=ts.Params(0.5), norm="frobenius"), n_budgets=5)
    assert found is not None
    assert list(found["measures"]) == ["params"]
    assert found["measures"]["params"]["macs"] is None


def test_a_plan_without_budget_has_none(plan: Plan) -> None:
    assert front_data(Plan.from_json(plan.to_json())) is None


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 12, 3), nn.Conv2d(12, 12, 3, groups=12), nn.Conv2d(12, 80, 1), nn.Flatten(),
        nn.Linear(80 * 4, 6),
    )  # fmt: skip


@pytest.fixture(scope="module", params=["tucker2", "cp", "auto"])
def report(request: pytest.FixtureRequest) -> ts.Report:
    images = [torch.randn(40, 3, 8, 8)]
    recipe = ts.Recipe(budget=ts.Params(0.5), method=request.param)
    # In sequence a layer is fitted to other inputs than those of the spectrum, and may go below it.
    return ts.compress(network(0), images, recipe=recipe, sequential=False)[1]


def test_no_format_beats_the_spectrum(report: ts.Report) -> None:
    assert report.compressed
    for layer in report.compressed:
        curve = report.spectra[layer.name]
        assert layer.ranks is not None
        assert layer.error is not None
        points = dict(zip(curve["rank"], curve["error"], strict=True))
        # The next rank that is among the points is at least as good as the own one.
        reached = min((rank for rank in points if rank >= layer.ranks[0]), default=max(points))
        assert layer.error >= points[reached] - 1e-3


def test_spectra_fall_from_everything_to_nothing(report: ts.Report) -> None:
    assert set(report.spectra) == {"0", "1", "3", "5"}  # the depthwise layer has no channels to reduce
    for curve in report.spectra.values():
        assert (curve["rank"][0], curve["error"][0], curve["error"][-1]) == (0, 1.0, 0.0)
        assert curve["error"] == sorted(curve["error"], reverse=True)
        assert len(curve["rank"]) == len(curve["error"]) <= N_POINTS


def test_svd_lies_on_its_spectrum() -> None:
    model = nn.Sequential(nn.Linear(20, 16), nn.Linear(16, 10))
    plan = ts.plan(model, ranks=ts.Ranks({"*": 4}), norm="frobenius", skip=[])
    _, report = ts.compress(model, plan)
    for layer in report.compressed:
        curve = report.spectra[layer.name]
        assert layer.frobenius_error == pytest.approx(curve["error"][curve["rank"].index(4)], abs=1e-4)


def test_layers_without_statistics_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(20, 16), nn.Linear(16, 10))
    stats = ts.calibrate(model, [torch.randn(64, 20)])
    plan = ts.plan(model, stats, budget=ts.Params(0.6), skip=[])
    assert spectra_data(plan, dict(model.named_modules()), None) == {}


def test_reports_carry_the_front(report: ts.Report) -> None:
    assert report.front is not None
    again = ts.Report.from_json(json.loads(json.dumps(report.to_json(), allow_nan=False)))
    assert again == report
    assert (again.front, again.spectra) == (report.front, report.spectra)


def test_older_reports_load(report: ts.Report) -> None:
    old = report.to_json()
    del old["front"], old["spectra"]
    loaded = ts.Report.from_json(old)
    assert loaded.front is None
    assert loaded.spectra == {}
    assert loaded.layers == report.layers

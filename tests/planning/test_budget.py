"""Budgets: kept, used up as far as ranks allow, and refused where nothing can keep them."""

from __future__ import annotations

import itertools
import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensigma as ts
from support_nets import batches, reusing_net, small_net
from tensigma.errors import InputError
from tensigma.evaluation.size import count_macs
from tensigma.layers import Cost, Geometry
from tensigma.linalg import CPJoint, Metric
from tensigma.planning import Allocation
from tensigma.planning.curves import Option
from tensigma.solving import METHODS, choices_of, norm_of


@pytest.fixture(scope="module")
def stats() -> ts.Calibration:
    return ts.calibrate(small_net(), batches())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "share"),
    # Weighted norms leave pointwise layers dense, so they reach less.
    [*itertools.product(["centred", "sigma", "frobenius"], [0.35, 0.6, 0.9]), ("activation", 0.6), ("activation", 0.9)],
)
def test_parameters_stay_within_the_budget(stats: ts.Calibration, share: float, norm: str) -> None:
    net = small_net()
    layers = "spatial" if norm == "activation" else "all"
    plan = ts.plan(net, stats, budget=ts.Params(share), norm=norm, layers=layers)
    assert plan.after.params <= share * plan.before.params
    assert plan.after.params >= 0.75 * share * plan.before.params
    assert all(entry.after.params < entry.before.params for entry in plan.compressed)
    small, report = ts.compress(net, plan, stats)
    assert report.after.params == sum(p.numel() for p in small.parameters()) == plan.after.params


@pytest.mark.parametrize("method", ["tucker2", "cp", "cp-joint", "svd", "spatial-svd", "tensor-train"])
def test_macs_stay_within_the_budget(stats: ts.Calibration, method: str) -> None:
    plan = ts.plan(small_net(), stats, budget=ts.Macs(0.6), method=method, skip=())
    assert 0.4 * plan.before.macs <= plan.after.macs <= 0.6 * plan.before.macs
    assert all(entry.after.macs < entry.before.macs for entry in plan.compressed)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["svd", "tucker2"])
def test_layers_count_as_often_as_they_are_called(method: str, tmp_path: Path) -> None:
    net, data = reusing_net(), batches(2, pixels=8)
    stats = ts.calibrate(net, data)
    plan = ts.plan(net, stats, budget=ts.Macs(0.6), method=method)
    small, report = ts.compress(net, plan, stats, sequential=False)
    before, after = (count_macs(model, data[0][:1]) for model in (net, small))
    assert (report.before.macs, report.after.macs) == (before, after)
    assert 0.4 * before <= after <= 0.6 * before
    plan.save(tmp_path / "plan.json")
    assert ts.Plan.load(tmp_path / "plan.json").after == plan.after
    # Sizes of a sample that was not calibrated with are mixed by what they cost.
    mixed = ts.plan(net, stats.merge(ts.calibrate(net, batches(2, pixels=4))), budget=ts.Macs(1.0))
    assert mixed.before.macs == pytest.approx((before + count_macs(net, batches(1, pixels=4)[0][:1])) / 2)


@pytest.mark.slow
def test_more_budget_never_means_more_loss(stats: ts.Calibration) -> None:
    front = ts.plan(small_net(), stats, budget=ts.Params(0.5)).front()
    plans = [front.plan(ts.Params(share)) for share in (0.3, 0.4, 0.5, 0.7, 0.9, 1.0)]
    losses = [sum((entry.error or 0) ** 2 for entry in plan.values()) for plan in plans]
    assert all(less >= more for less, more in pairwise(losses))
    assert losses[0] > 0 == losses[-1]


@pytest.mark.slow
def test_the_front_gives_the_plan_of_any_budget(stats: ts.Calibration) -> None:
    front = ts.plan(small_net(), stats, budget=ts.Params(0.9)).front()
    assert front.plan(ts.Params(0.4)) == ts.plan(small_net(), stats, budget=ts.Params(0.4))
    assert front.plan(ts.Macs(0.4)).after.macs <= 0.4 * front.plan(ts.Macs(0.4)).before.macs
    for unit in (ts.Params, ts.Macs):
        trade = front.trade(unit)
        assert all(a.share < b.share and a.error > b.error for a, b in pairwise(trade))
        assert (trade[-1].share, trade[-1].error) == (1.0, 0.0)


def test_a_plan_without_a_budget_knows_no_front(stats: ts.Calibration) -> None:
    with pytest.raises(InputError, match="budget="):
        ts.plan(small_net(), stats, ranks=ts.VBMF(0.5)).front()


@pytest.mark.slow
def test_auto_takes_the_best_format_for_each_layer(stats: ts.Calibration) -> None:
    """At the same size no single format is expected to lose less than the best of all."""
    losses = {}
    for method in ("auto", *(name for name, method in METHODS.items() if method.in_auto)):
        plan = ts.plan(small_net(), stats, budget=ts.Params(0.6), method=method)
        losses[method] = sum((entry.error or 0) ** 2 for entry in plan.values())
    # What is left over at the end of a budget is spent greedily, hence the tolerance.
    assert losses["auto"] <= 1.02 * min(losses.values())


def _options(seed: int, count: int) -> list[Option]:
    generator = random.Random(seed)
    costs = sorted(generator.sample(range(1, 60), count))
    errors = sorted((generator.random() for _ in range(count - 1)), reverse=True)
    dense = Option(None, None, Cost(costs[-1], 0), 0.0)
    return [dense, *(Option(None, (1,), Cost(c, 0), e) for c, e in zip(costs, errors, strict=False))]


@pytest.mark.parametrize("share", [0.2, 0.45, 0.7])
@pytest.mark.parametrize("weights", [{}, {"0": 5.0, "3": 0.1}], ids=["alike", "weighted"])
def test_choices_are_the_best_of_all_combinations(seed: int, share: float, weights: dict[str, float]) -> None:
    """The twin tries every combination of options."""
    curves = {str(layer): _options(10 * seed + layer, 6) for layer in range(5)}

    def loss(name: str, option: Option) -> float:
        return -weights.get(name, 1.0) * math.log(1 - option.error2)

    allocation = Allocation(curves, "params", weights)
    most = sum(options[0].cost.params for options in curves.values())
    limit = allocation.cheapest + share * (most - allocation.cheapest)
    chosen = allocation.choose(limit)
    assert sum(option.cost.params for option in chosen.values()) <= limit
    exact = min(
        sum(map(loss, curves, combination))
        for combination in itertools.product(*curves.values())
        if sum(option.cost.params for option in combination) <= limit
    )
    found = sum(loss(name, option) for name, option in chosen.items())
    # Budgets have more cells than these costs have steps, so nothing is lost to rounding.
    assert found == pytest.approx(exact)


def test_a_step_that_is_most_of_the_budget_is_weighed_against_many_small_ones() -> None:
    """A layer that saves nothing before it loses much would be taken along the hulls, and the others hardly touched."""
    wide = [
        Option(None, None, Cost(500, 0), 0.0),
        Option(None, (2,), Cost(340, 0), 0.2),
        Option(None, (1,), Cost(0, 0), 1.0),
    ]
    small = [
        Option(None, None, Cost(100, 0), 0.0),
        *(Option(None, (rank,), Cost(rank, 0), 0.14 * (1 - rank / 100) ** 1.5) for rank in range(10, 100)),
    ]
    curves = {"wide": wide, **{str(layer): small for layer in range(6)}}
    chosen = Allocation(curves, "params").choose(1100 - 290)
    assert chosen["wide"] is wide[0]
    assert sum(option.cost.params for option in chosen.values()) <= 1100 - 290


def test_overridden_ranks_are_kept_and_paid_for(stats: ts.Calibration) -> None:
    plan = ts.plan(small_net(), stats, budget=ts.Params(0.5), overrides={"block.0": {"ranks": (8, 6)}})
    assert plan["block.0"].ranks == (8, 6)
    assert plan.after.params <= 0.5 * plan.before.params


@pytest.mark.slow
@pytest.mark.parametrize("budget", [ts.Params(0.01), ts.Macs(0.01)])
def test_an_impossible_budget_names_what_can_be_reached(stats: ts.Calibration, budget: Any) -> None:
    with pytest.raises(InputError, match=r"no plan leaves 0.01 of the .* a share of 0\.\d+; ask for more") as caught:
        ts.plan(small_net(), stats, budget=budget)
    reachable = float(str(caught.value).split("a share of ")[1].split(";")[0])
    plan = ts.plan(small_net(), stats, budget=type(budget)(reachable + 1e-3))
    before, after = (getattr(cost, budget.field) for cost in (plan.before, plan.after))
    assert after <= (reachable + 1e-3) * before
    assert sum(set(entry.ranks or ()) == {1} for entry in plan.compressed) >= len(plan.compressed) / 2


@pytest.mark.parametrize("share", [0, -1, 1.5, True, "half"])
def test_budgets_check_themselves(share: Any) -> None:
    with pytest.raises(InputError, match="may remain lies in"):
        ts.Params(share)


@pytest.mark.slow
def test_planning_tells_how_far_it_is(stats: ts.Calibration) -> None:
    seen: list[Any] = []
    plan = ts.plan(small_net(), stats, budget=ts.Params(0.5), progress=seen.append)
    candidates = [name for name, entry in plan.items() if entry.reason in (None, "the budget is best kept without it")]
    assert [state.layer for state in seen] == candidates
    assert [state.done for state in seen] == list(range(1, len(seen) + 1))
    assert seen[-1].work == pytest.approx(1.0)
    assert seen[-1].remaining == pytest.approx(0.0, abs=1e-6)


def test_the_quick_curve_of_large_layers_falls_and_promises_no_more_than_a_solution(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensigma.linalg.cp._SMALL", 1)
    kernel = torch.randn(12, 10, 3, 3, generator=torch.Generator().manual_seed(seed))
    metric = Metric.identity(90)
    points = METHODS["cp-joint"].errors(kernel, metric)
    assert all(a[1] > b[1] for a, b in pairwise(points))
    for (rank,), error2 in points[5::8]:
        assert error2 >= 0.95 * CPJoint(rank).fit(kernel, metric).error ** 2


def test_taps_apart_are_left_out_where_together_they_cost_hardly_more() -> None:
    def names(channels: int) -> list[str]:
        geometry = Geometry.of(nn.Conv2d(channels, channels, 3))
        return [method.name for method in choices_of("auto", geometry, norm_of("sigma"))]

    assert "cp" in names(64)
    assert "cp" not in names(128)
    assert "cp-joint" in names(128)

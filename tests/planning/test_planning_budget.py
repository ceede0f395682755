"""Budgets: kept, used up as far as ranks allow, and refused where nothing can keep them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

import tensigma as ts
from support_nets import batches, small_net
from tensigma.errors import InputError


@pytest.fixture(scope="module")
def stats() -> ts.Calibration:
    return ts.calibrate(small_net(), batches())


@pytest.mark.parametrize("norm", ["centred", "sigma", "frobenius", "activation"])
@pytest.mark.parametrize("share", [0.35, 0.6, 0.9])
def test_parameters_stay_within_the_budget(stats: ts.Calibration, share: float, norm: str) -> None:
    net = small_net()
    # Weighted norms leave pointwise layers dense, so they reach less.
    layers = "spatial" if norm == "activation" else "all"
    if norm == "activation" and share < 0.5:
        pytest.skip("out of reach")
    plan = ts.plan(net, stats, budget=ts.Params(share), norm=norm, layers=layers)
    assert plan.after.params <= share * plan.before.params
    assert plan.after.params >= 0.75 * share * plan.before.params
    assert all(entry.after.params < entry.before.params for entry in plan.compressed)
    small, report = ts.compress(net, plan, stats)
    assert report.after.params == sum(p.numel() for p in small.parameters()) == plan.after.params


@pytest.mark.parametrize("method", ["tucker2", "cp", "cp-joint", "svd"])
def test_macs_stay_within_the_budget(stats: ts.Calibration, method: str) -> None:
    plan = ts.plan(small_net(), stats, budget=ts.Macs(0.6), method=method, skip=())
    assert 0.4 * plan.before.macs <= plan.after.macs <= 0.6 * plan.before.macs
    assert all(entry.after.macs < entry.before.macs for entry in plan.compressed)


def test_more_budget_never_means_smaller_ranks(stats: ts.Calibration) -> None:
    plans = [ts.plan(small_net(), stats, budget=ts.Params(share)) for share in (0.3, 0.5, 0.7, 0.9)]
    sizes = [[entry.after.params for entry in plan.values()] for plan in plans]
    assert all(a <= b for low, high in pairwise(sizes) for a, b in zip(low, high, strict=True))


def test_overridden_ranks_are_kept_and_paid_for(stats: ts.Calibration) -> None:
    plan = ts.plan(small_net(), stats, budget=ts.Params(0.5), overrides={"block.0": {"ranks": (8, 6)}})
    assert plan["block.0"].ranks == (8, 6)
    assert plan.after.params <= 0.5 * plan.before.params


@pytest.mark.parametrize("budget", [ts.Params(0.01), ts.Macs(0.01)])
def test_an_impossible_budget_names_what_can_be_reached(stats: ts.Calibration, budget: Any) -> None:
    with pytest.raises(InputError, match=r"no plan leaves 0.01 of the .* a share of 0\.\d+; ask for more") as caught:
        ts.plan(small_net(), stats, budget=budget)
    reachable = float(str(caught.value).split("a share of ")[1].split(";")[0])
    plan = ts.plan(small_net(), stats, budget=type(budget)(reachable + 1e-3))
    assert all(set(entry.ranks or ()) == {1} for entry in plan.compressed)


@pytest.mark.parametrize("share", [0, -1, 1.5, True, "half"])
def test_budgets_check_themselves(share: Any) -> None:
    with pytest.raises(InputError, match="may remain lies in"):
        ts.Params(share)

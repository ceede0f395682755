"""A budget of parameters does not cost multiply-adds in silence, and one out of reach is refused from shapes alone."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import tensigma as ts
from tensigma.errors import InputError, PlanWarning
from tensigma.planning import Budget
from tensigma.planning import front as fronts


def strided() -> nn.Module:
    """Strided layers, whose first factor would run at four times the positions."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
        ).eval()


@pytest.fixture(scope="module")
def stats() -> ts.Calibration:
    return ts.calibrate(strided(), [torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(0))])


@pytest.mark.slow
class TestAtMost:
    def test_by_default_no_plan_raises_macs(self, stats: ts.Calibration) -> None:
        raised = 0
        front = ts.plan(strided(), stats, budget=ts.Params(0.98), method="tucker2", layers=["2"]).front()
        for share in (0.998, 0.995, 0.99, 0.98, 0.95):
            free = front.plan(ts.Params(share, at_most=None))
            kept = front.plan(ts.Params(share))
            raised += free.raises_macs
            assert not kept.raises_macs
            assert kept.after.params <= share * kept.before.params
            # Plans that raise nothing stay as they are.
            assert free.raises_macs or kept == free
        assert raised

    def test_a_smaller_share_of_macs_is_kept_too(self, stats: ts.Calibration) -> None:
        plan = ts.plan(strided(), stats, budget=ts.Params(0.5, at_most=0.6), method="tucker2")
        assert plan.after.macs <= 0.6 * plan.before.macs
        assert plan.after.params <= 0.5 * plan.before.params

    def test_where_macs_rise_the_plan_says_so(self, stats: ts.Calibration) -> None:
        with pytest.warns(PlanWarning, match="needs more multiply-adds"):
            plan = ts.plan(strided(), stats, budget=ts.Params(0.998, at_most=None), method="tucker2", layers=["2"])
        assert "times the MACs" in str(plan).splitlines()[-1]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ts.plan(strided(), stats, ranks=ts.Ranks({"2": (4, 4)}))


@pytest.mark.parametrize("limit", [0, -1, "1", True])
def test_nonsense_is_refused(limit: object) -> None:
    with pytest.raises(InputError, match="at_most is the share"):
        ts.Params(0.5, at_most=limit)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [ts.Params(0.001), ts.Macs(0.001), ts.Bytes(0.001), ts.Bytes(0.5) & ts.Macs(0.001)])
def test_a_budget_out_of_reach_is_refused_before_curves_are_computed(
    stats: ts.Calibration, budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("curves are computed")

    monkeypatch.setattr(fronts, "_curves", fail)
    with pytest.raises(InputError, match=r"no plan leaves 0\.001 of the .* with the lowest ranks"):
        ts.plan(strided(), stats, budget=budget)

"""Budgets of bytes, and several budgets at once."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
import torch
from torch import nn

import tensigma as ts
from reference import naive_front
from support_nets import small_net
from tensigma.errors import InputError, StoreError
from tensigma.evaluation import count_bytes
from tensigma.layers import Cost, grid_of
from tensigma.planning import AllOf, CompressedEntry, Plan
from tensigma.planning.allocation import SeveralLimits, undominated
from tensigma.planning.curves import Measure, Option


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.Conv2d(12, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1, groups=16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.Flatten(),
            nn.Linear(16 * 16, 10),
        ).eval()


def images(seed: int = 0) -> torch.Tensor:
    return torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(seed)).cumsum(2)


@pytest.fixture(scope="module")
def stats() -> ts.Calibration:
    return ts.calibrate(net(), [images()])


@pytest.fixture(scope="module")
def plan(stats: ts.Calibration) -> Plan:
    return ts.plan(net(), stats, budget=ts.Bytes(0.16) & ts.Macs(0.7), weights=None)


def _options(seed: int, count: int) -> list[Option]:
    """The dense layer, and options that save in one measure or in the other."""
    generator = random.Random(seed)
    dense = Option(None, None, Cost(60, 60, 60), 0.0)
    return [
        dense,
        *(
            Option(None, (1,), Cost(0, generator.randint(1, 60), generator.randint(1, 60)), generator.random() * 0.9)
            for _ in range(count)
        ),
    ]


@pytest.mark.parametrize("count", [0, 1, 7, 200])
@pytest.mark.parametrize("measures", [["macs"], ["macs", "bytes"], ["params", "macs", "bytes"]])
def test_only_options_that_nothing_beats_are_considered(count: int, measures: list[Measure], seed: int) -> None:
    rng = random.Random(seed)
    options = [
        # Few values, so that some are equal.
        Option(None, (1,), Cost(*(rng.randint(1, 9) for _ in range(3))), rng.choice([0.1, 0.2, 0.3, 0.5, 0.8]))
        for _ in range(count + 1)
    ]
    rows = [[option.loss, *(option.price(measure) for measure in measures)] for option in options]
    kept = undominated(options, measures)
    assert list(map(id, kept)) == [id(options[place]) for place in naive_front(rows)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.3, 0.8), (0.9, 0.4)])
def test_several_limits_are_kept_near_the_best_of_all_combinations(seed: int, shares: tuple[float, float]) -> None:
    """The twin tries every combination of options."""
    curves = {str(layer): _options(10 * seed + layer, 5) for layer in range(5)}
    limits: dict[Measure, float] = {"macs": shares[0] * 300, "bytes": shares[1] * 300}
    weights = {"1": 3.0}
    exact = None
    for combination in itertools.product(*curves.values()):
        if all(sum(option.price(key) for option in combination) <= limit for key, limit in limits.items()):
            lost = sum(weights.get(name, 1.0) * o.loss for name, o in zip(curves, combination, strict=True))
            exact = lost if exact is None else min(exact, lost)
    chosen = SeveralLimits(curves, limits, weights).choose()
    if chosen is None:
        # Prices find no choice off the convex hull; with limits this wide there are others.
        assert exact is None
        return
    assert exact is not None
    for key, limit in limits.items():
        assert sum(option.price(key) for option in chosen.values()) <= limit * (1 + 1e-6)
    found = sum(weights.get(name, 1.0) * option.loss for name, option in chosen.items())
    worst = max(weights.get(name, 1.0) * max(option.loss for option in options) for name, options in curves.items())
    assert exact - 1e-9 <= found <= exact + worst


def test_the_lowest_cost_within_the_other_limits() -> None:
    few_macs, few_bytes = Option(None, (1,), Cost(0, 1, 9), 0.5), Option(None, (2,), Cost(0, 9, 1), 0.5)
    curves = {"a": [Option(None, None, Cost(0, 10, 10), 0.0), few_macs, few_bytes]}
    several = SeveralLimits(curves, {"macs": 5.0, "bytes": 5.0})
    assert several.choose() is None
    assert several.least("macs") == pytest.approx(9)
    assert several.least("bytes") == pytest.approx(9)


@pytest.mark.slow
class TestPlans:
    def test_a_plan_keeps_to_both_and_says_what_it_will_be(self, plan: Plan, stats: ts.Calibration) -> None:
        assert plan.before.bytes == count_bytes(net())
        assert plan.after.bytes <= 0.16 * plan.before.bytes
        assert plan.after.macs <= 0.7 * plan.before.macs
        small, report = ts.compress(net(), plan, stats, sequential=False)
        assert report.after.bytes == count_bytes(small) == plan.after.bytes
        # Layers, and what was folded into them.
        norms = sum(count_bytes(net().get_submodule(name)) for name in plan.folding.norms)
        assert sum(layer.before.bytes - layer.after.bytes for layer in report.layers) + norms == (
            report.before.bytes - report.after.bytes
        )
        assert plan.folding.layers == {"0": "1", "3": "4"}
        for entry in plan.compressed:
            stages = small.get_submodule(entry.name)
            assert {grid_of(stage).bits for stage in stages.children()} == {entry.bits}  # type: ignore[union-attr]
            assert report[entry.name].bits == entry.bits
        assert ts.Report.from_json(json.loads(json.dumps(report.to_json()))) == report
        assert "bits" in str(plan)
        assert "bits" in str(report)

    def test_in_sequence_later_layers_are_rounded_too(self, plan: Plan, stats: ts.Calibration) -> None:
        small, report = ts.compress(net(), plan, stats, data=[images()])
        assert report.notes["sequential"]
        assert report.after.bytes == plan.after.bytes
        assert torch.isfinite(small(images(1))).all()

    def test_the_first_convolution_and_a_depthwise_one_are_only_rounded(self, plan: Plan) -> None:
        for name in ("0", "6"):
            entry = plan[name]
            assert isinstance(entry, CompressedEntry)
            assert (entry.method.name, entry.ranks) == ("dense", ())
        assert plan["0"].bits is not None
        assert plan["0"].bits >= 8

    def test_what_is_skipped_by_hand_is_left_alone(self, stats: ts.Calibration) -> None:
        other = ts.plan(net(), stats, budget=ts.Bytes(0.5), skip="3", method="dense", weights=None)
        assert other["3"].bits is None
        assert other["0"].bits is not None

    def test_more_bytes_never_mean_more_loss(self, plan: Plan) -> None:
        front = plan.front()
        losses = [
            sum((entry.error or 0) ** 2 for entry in front.plan(ts.Bytes(share)).values())
            for share in (0.12, 0.16, 0.25, 0.5, 1.0)
        ]
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] == 0

    def test_only_the_bits_that_are_allowed(self, plan: Plan) -> None:
        bits = {entry.bits for entry in plan.front().plan(ts.Bytes(0.3, bits=(8,))).values()}
        assert bits <= {8, None}
        assert 8 in bits

    def test_a_plan_is_read_back(self, plan: Plan, tmp_path: Path) -> None:
        plan.save(tmp_path / "plan.json")
        again = ts.Plan.load(tmp_path / "plan.json")
        assert again == plan
        assert again.after == plan.after
        data = json.loads((tmp_path / "plan.json").read_text())
        data["layers"]["0"]["bits"] = 9
        with pytest.raises(StoreError, match="bits is one of 2, 3"):
            ts.Plan.from_json(data)
        data["layers"]["0"] |= {"bits": 8, "ranks": None}
        with pytest.raises(StoreError, match="bits but no ranks"):
            ts.Plan.from_json(data)

    def test_limits_that_cannot_be_kept_are_named(self, plan: Plan) -> None:
        front = plan.front()
        with pytest.raises(InputError, match=r"no plan leaves 0.01 of the [\d,]+ bytes"):
            front.plan(ts.Bytes(0.01) & ts.Macs(0.5))
        least = front.trade(ts.Macs)[0].share
        with pytest.raises(InputError, match=r"together: within Macs, .* bytes remain at least|no plan leaves"):
            front.plan(ts.Bytes(front.trade(ts.Bytes)[0].share * 1.001) & ts.Macs(least * 1.001))

    def test_layers_by_hand(self, plan: Plan) -> None:
        changed = plan.with_("3", method="svd", ranks=4, bits=4)
        assert changed["3"].label == "svd 4, 4 bits"
        assert changed.with_("3", bits="float")["3"].label == "svd 4"
        with pytest.raises(InputError, match="bits is one of"):
            plan.with_("3", bits=9)


def test_half_precision_models_are_refused(stats: ts.Calibration) -> None:
    with pytest.raises(InputError, match=r"model\.float\(\)"):
        ts.plan(net().double(), stats, budget=ts.Bytes(0.5), check=False)


@pytest.mark.parametrize("bits", [(), 1, (4, 9), "4", None, (True,)])
def test_bits_that_weights_cannot_take(bits: object) -> None:
    with pytest.raises(InputError, match="bits"):
        ts.Bytes(0.5, bits=bits)  # type: ignore[arg-type]


def test_what_can_be_combined() -> None:
    both = ts.Bytes(0.2) & (ts.Macs(0.5) & ts.Params(0.4))
    assert isinstance(both, AllOf)
    assert [part.field for part in both.parts] == ["bytes", "macs", "params"]
    with pytest.raises(InputError, match="two budgets of macs"):
        ts.Macs(0.5) & ts.Macs(0.4)
    with pytest.raises(InputError, match="cannot be combined"):
        ts.Drop(0.01) & ts.Macs(0.4)
    with pytest.raises(TypeError):
        ts.Macs(0.4) & 0.5


def test_cp_stops_early_for_few_bits_by_hand_too() -> None:
    def options(plan: Plan) -> dict[str, object]:
        entry = plan["block.0"]
        assert isinstance(entry, CompressedEntry)
        return dict(entry.options)

    net = small_net()
    plan = ts.plan(net, ranks=ts.Ranks({"block.0": 6, "up": 3}), method="cp-joint", norm="frobenius")
    few = plan.with_("block.0", bits=4)
    assert options(few)["max_sweeps"] == 20
    assert options(plan.with_("block.0", bits=8)) == options(plan)
    # What the bits asked for goes with them; what somebody asked for stays.
    assert options(few.with_("block.0", bits="float")) == options(plan)
    assert options(few.with_("block.0", bits=8)) == options(plan)
    mine = plan.with_("block.0", bits=4, options={"max_sweeps": 7})
    assert options(mine)["max_sweeps"] == 7
    assert options(mine.with_("block.0", bits=3))["max_sweeps"] == 7

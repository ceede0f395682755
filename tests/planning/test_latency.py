"""Budgets of time: kept by a clock that can be foretold, measured once, and never trusting a damaged file."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensigma as ts
from support_nets import batches, reusing_net
from support_timing import FakeClock
from tensigma.errors import InputError
from tensigma.evaluation.size import count_macs
from tensigma.layers import Geometry
from tensigma.planning import Front, TimingProgress
from tensigma.planning.latency import _between, in_blocks
from tensigma.running import Chain


def wide_net() -> nn.Sequential:
    """Two convolutions of one shape among others, all of them wide enough to gain from a decomposition."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        convolutions = [nn.Conv2d(3, 32, 3), *(nn.Conv2d(32, 32, 3, padding=1) for _ in range(2)), nn.Conv2d(32, 48, 3)]
        return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10)).eval()


@pytest.fixture(scope="module")
def stats() -> ts.Calibration:
    images = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return ts.calibrate(wide_net(), [images])


@pytest.fixture(scope="module")
def front(stats: ts.Calibration) -> Front:
    return ts.plan(wide_net(), stats, budget=ts.Params(1.0), method="tucker2").front()


def _seconds(clock: FakeClock, plan: ts.Plan, batch: int = 1) -> tuple[float, float]:
    """The twin: every layer of a plan by the clock itself."""
    before = after = 0.0
    for entry in plan.values():
        assert entry.geometry is not None
        assert entry.input_size is not None
        before += clock.seconds(Chain.of(entry.geometry, None, entry.input_size, batch=batch))
        after += clock.seconds(Chain.of(entry.geometry, entry.format, entry.input_size, batch=batch))
    return before, after


@pytest.mark.parametrize("share", [0.45, 0.7, 0.95])
def test_time_stays_within_the_budget(
    front: Front, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, share: float
) -> None:
    clock = FakeClock(monkeypatch)
    plan = front.plan(ts.Latency(share, runtime="eager", batch=4, cache=tmp_path))
    before, after = _seconds(clock, plan, batch=4)
    # This clock is a straight line of multiply-adds, so nothing is lost between the ranks that were timed.
    assert plan.notes["latency"]["seconds"] == pytest.approx([before, after])
    assert after <= share * before
    assert plan.compressed
    assert (plan.notes["latency"]["runtime"], plan.notes["latency"]["batch"]) == ("eager", 4)
    plan.save(tmp_path / "plan.json")
    assert ts.Plan.load(tmp_path / "plan.json").notes == plan.notes


def test_layers_take_as_long_as_all_their_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeClock(monkeypatch)
    net, data = reusing_net(), batches(1, pixels=8)
    stats = ts.calibrate(net, data)
    plan = ts.plan(net, stats, budget=ts.Latency(0.8, runtime="eager", cache=tmp_path), method="svd")
    assert plan.compressed
    small, _ = ts.compress(net, plan, stats, sequential=False)
    seconds = [count_macs(model, data[0][:1]) * 1e-9 for model in (net, small)]
    assert plan.notes["latency"]["seconds"] == pytest.approx(seconds)


def test_ranks_are_whole_blocks(front: Front, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeClock(monkeypatch)
    for share in (0.4, 0.6, 0.8):
        plan = front.plan(ts.Latency(share, runtime="eager", cache=tmp_path))
        for entry in plan.compressed:
            largest = entry.method.max_ranks(entry.geometry.kernel_shape)
            for rank, most in zip(entry.format.ranks, largest, strict=True):
                assert rank == most or rank == 8 or rank % 16 == 0
    assert all(in_blocks(rank, 1000) >= rank for rank in range(1, 200))


def test_layers_that_would_not_get_faster_stay_dense(
    front: Front, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where starting a layer costs more than running it, three in its place are slower however small they are."""
    FakeClock(monkeypatch, per_stage=1.0)
    plan = front.plan(ts.Latency(1.0, runtime="eager", cache=tmp_path))
    assert not plan.compressed
    with pytest.raises(InputError, match=r"no plan leaves 0\.9 of the 5e\+03 ms"):
        plan.front().plan(ts.Latency(0.9, runtime="eager", cache=tmp_path))


def test_every_shape_is_timed_once(stats: ts.Calibration, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = FakeClock(monkeypatch)
    seen: list[Any] = []
    budget = ts.Latency(0.8, runtime="eager", cache=tmp_path)
    first = ts.plan(wide_net(), stats, budget=budget, method="tucker2", progress=seen.append)
    assert len(clock.asked) == len(set(clock.asked))
    # Two equal convolutions, another and the Linear layer, at most six ranks of each, and dense; and the first layer.
    assert len(clock.asked) <= 3 * (6 + 1) + 1
    timing = [state for state in seen if isinstance(state, TimingProgress)]
    assert [(state.done, state.total) for state in timing] == [(1, 3), (2, 3), (3, 3)]
    clock.asked.clear()
    assert ts.plan(wide_net(), stats, budget=budget, method="tucker2") == first
    assert first.front().trade(budget)[-1].share == pytest.approx(1.0)
    assert not clock.asked
    first.front().plan(ts.Latency(0.8, runtime="eager", batch=2, cache=tmp_path))
    assert clock.asked


def test_times_between_never_fall(seed: int) -> None:
    generator = random.Random(seed)
    chains = [Chain.of(Geometry.of(nn.Linear(n, n)), None, ()) for n in sorted(generator.sample(range(1, 50), 5))]
    seconds = [generator.random() for _ in chains]
    found = [_between(macs, chains, seconds) for macs in range(0, 2600, 20)]
    assert all(a <= b for a, b in pairwise(found))
    assert min(seconds) <= found[0]
    assert found[-1] == max(seconds)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"share": 0}, "may remain"),
        ({"share": 0.5, "runtime": "tvm"}, "runtime 'tvm' is unknown"),
        ({"share": 0.5, "batch": 0}, "batch is a whole number"),
    ],
)
def test_budgets_of_time_check_themselves(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        ts.Latency(**wrong)


def test_sizes_of_inputs_are_needed() -> None:
    with pytest.raises(InputError, match=r"Latency.*needs stats="):
        ts.plan(wide_net(), budget=ts.Latency(0.5, runtime="eager"), norm="frobenius", method="svd")

"""Budgets of time: kept by a clock that can be foretold, measured once, and never trusting a damaged file."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensigma as ts
from cases import GEOMETRIES, LayerCase
from support_nets import batches, reusing_net
from tensigma.errors import InputError
from tensigma.evaluation.size import count_macs
from tensigma.layers import Geometry
from tensigma.planning import Front, TimingProgress
from tensigma.planning.latency import _between, in_blocks
from tensigma.running import Chain, TimeTable, runtime_of, timetable
from tensigma.running.timetable import cache_folder
from tensigma.running.timing import Eager, OnnxRuntime, Runtime, measure, onnx_graph


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


class FakeClock:
    """Seconds by formula in place of a measurement, and a record of what was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, per_stage: float = 0.0) -> None:
        self.per_stage = per_stage
        self.asked: list[str] = []
        monkeypatch.setattr(timetable, "measure", self.measure)

    def seconds(self, chain: Chain) -> float:
        return chain.batch * chain.macs * 1e-9 + self.per_stage * len(chain.stages)

    def measure(self, chains: Sequence[Chain], runtime: Runtime) -> list[float]:
        self.asked += [chain.key for chain in chains]
        return [self.seconds(chain) for chain in chains]


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


def _chain(n: int = 4) -> Chain:
    return Chain.of(Geometry.of(nn.Linear(n, n)), None, ())


def test_the_table_is_read_back_only_where_it_belongs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = FakeClock(monkeypatch)

    def times(about: str = "x") -> list[float]:
        runtime = Eager()
        monkeypatch.setattr(Eager, "about", lambda self: {"cpu": about})
        return TimeTable(runtime, tmp_path).seconds([_chain()])

    times()
    times()
    assert len(clock.asked) == 1
    (file,) = tmp_path.iterdir()
    data = json.loads(file.read_text())
    assert (data["format"], data["version"], data["about"]) == ("tensigma-timings", 1, {"cpu": "x"})
    times("another machine")
    assert len(clock.asked) == 2
    for damage in ("{", "[]", json.dumps({**data, "version": 2}), json.dumps({**data, "about": {"cpu": "y"}})):
        clock.asked.clear()
        file.write_text(damage)
        times()
        assert len(clock.asked) == 1
        assert json.loads(file.read_text()) == data
    # A time that cannot be is measured again; what others have added meanwhile stays.
    file.write_text(json.dumps({**data, "seconds": {_chain().key: -1, "other": 2.0}}))
    times()
    assert json.loads(file.read_text())["seconds"] == {**data["seconds"], "other": 2.0}


def test_a_folder_that_cannot_be_written_costs_time_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FakeClock(monkeypatch)
    (tmp_path / "file").write_text("in the way")
    assert TimeTable(Eager(), tmp_path / "file").seconds([_chain()]) == [pytest.approx(16e-9)]
    assert "not kept" in caplog.text


def test_the_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TENSIGMA_CACHE", raising=False)
    assert cache_folder().name == "tensigma"
    monkeypatch.setenv("TENSIGMA_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    assert cache_folder(tmp_path / "own") == tmp_path / "own"


def test_times_between_never_fall(seed: int) -> None:
    generator = random.Random(seed)
    chains = [_chain(n) for n in sorted(generator.sample(range(1, 50), 5))]
    seconds = [generator.random() for _ in chains]
    found = [_between(macs, chains, seconds) for macs in range(0, 2600, 20)]
    assert all(a <= b for a, b in pairwise(found))
    assert min(seconds) <= found[0]
    assert found[-1] == max(seconds)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("case", GEOMETRIES)
def test_graphs_compute_shapes_as_the_layers_do(case: LayerCase) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    layer = case.layer(dtype=torch.float32)
    chain = Chain.of(Geometry.of(layer), None, case.size, batch=3)
    session = runtime.InferenceSession(onnx_graph(chain), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": torch.ones(chain.input_shape).numpy()})
    assert found.shape == layer(case.inputs(3, dtype=torch.float32)).shape


@pytest.mark.parametrize("name", ["eager", "onnxruntime"])
def test_more_work_takes_longer(name: str) -> None:
    """The one test that starts a clock: a ratio of a thousand in work, seen as a ratio of two in time."""
    if name == "onnxruntime":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnx")
    few, many = (Chain.of(Geometry.of(nn.Linear(n, n)), None, ()) for n in (32, 1024))
    state = torch.get_rng_state()
    quick, slow = measure([few, many], runtime_of(name))
    assert 0 < 2 * quick < slow
    assert torch.equal(torch.get_rng_state(), state)


def test_auto_is_onnx_runtime_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    assert isinstance(runtime_of("auto"), OnnxRuntime)
    assert isinstance(runtime_of("auto", torch.device("meta")), Eager)
    monkeypatch.setattr("tensigma.running.timing.find_spec", lambda name: None)
    assert isinstance(runtime_of("auto"), Eager)
    with pytest.raises(ImportError, match=r"tensigma\[onnx\]"):
        runtime_of("onnxruntime")


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

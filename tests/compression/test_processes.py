"""Two processes under torchrun: both end with the model that one process makes, and a failure reaches both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import tensigma as ts
from support_nets import batches, reusing_net, small_net
from tensigma.errors import TensigmaError
from tensigma.running import rank_and_size, shard
from tensigma.solving.sharing import share_out

pytestmark = pytest.mark.slow


def torchrun(function: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a function of this file in two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [str(Path(__file__)), function, str(folder)]
    return subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=300)


def compress_and_save(folder: Path) -> None:
    net = small_net()
    # All processes see all data here, so that the statistics are those of one process to the last bit.
    stats = ts.Calibration.load(folder / "stats")
    plan = ts.plan(net, stats, budget=ts.Params(0.5))
    seen: list[str] = []
    small, report = ts.compress(net, plan, stats, progress=lambda state: seen.append(state.layer))
    rank, _ = rank_and_size()
    ts.save(small, folder / f"small-{rank}")
    (folder / f"seen-{rank}.txt").write_text("\n".join(seen))
    (folder / f"errors-{rank}.txt").write_text(str([row.error for row in report.layers]))


def one_call(folder: Path) -> None:
    """Each process has every second batch: five in all, so the shares differ in size."""
    rank, size = rank_and_size()
    small, report = ts.compress(small_net(), batches(count=5)[rank::size], recipe=closed_form())
    ts.save(small, folder / f"small-{rank}")
    (folder / f"notes-{rank}.json").write_text(json.dumps(report.notes))
    net = reusing_net()
    again, report = ts.compress(net, reused_plan(net), data=reused_batches()[rank::size])
    ts.save(again, folder / f"again-{rank}")
    assert report.notes["sequential_samples"] == 12


def closed_form() -> ts.Recipe:
    """Iterations that stop at a tolerance would end a little apart."""
    return ts.Recipe(budget=ts.Params(0.6), method="svd")


def reused_batches() -> list[Tensor]:
    return batches(count=3, size=4, seed=2)


def reused_plan(net: nn.Module) -> ts.Plan:
    """For a network whose layers are called several times, so that they are fitted in one pass each."""
    return ts.plan(net, ranks=ts.Ranks({"*": 3}), method="svd", data=shard(reused_batches()))


def fail_in_one(folder: Path) -> None:
    net = small_net()
    stats = ts.Calibration.load(folder / "stats")
    plan = ts.plan(net, stats, ranks=ts.Ranks({"*": 2}))
    rank, _ = rank_and_size()
    if rank == 1:
        for module in net.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.constant_(module.weight, float("nan"))
    wrong = batches(count=1)[0] if rank == 0 else torch.zeros(2, 5, 10, 10)
    try:
        ts.compress(small_net(), ts.plan(small_net(), stats, ranks=ts.Ranks({"*": 2})), stats, data=[wrong])
    except TensigmaError as error:
        (folder / f"error-{rank}-data.txt").write_text(str(error))
    for check in (True, False):
        try:
            ts.compress(net, plan, stats, check=check)
        except TensigmaError as error:
            (folder / f"error-{rank}-{check}.txt").write_text(str(error))


def test_two_processes_make_what_one_makes(tmp_path: Path) -> None:
    net = small_net()
    stats = ts.calibrate(net, batches())
    stats.save(tmp_path / "stats")
    plan = ts.plan(net, stats, budget=ts.Params(0.5))
    small, _ = ts.compress(net, plan, stats, workers=1)
    done = torchrun("compress_and_save", tmp_path)
    assert done.returncode == 0, done.stderr
    expected = small.state_dict()
    for rank in range(2):
        found = load_file(tmp_path / f"small-{rank}" / "model.safetensors")
        assert found.keys() == expected.keys()
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-6)
    first, second = (load_file(tmp_path / f"small-{rank}" / "model.safetensors") for rank in range(2))
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    # Each solved a share, and no layer was solved twice.
    seen = [(tmp_path / f"seen-{rank}.txt").read_text().split("\n") for rank in range(2)]
    assert all(seen)
    assert sorted(seen[0] + seen[1]) == sorted(entry.name for entry in plan.compressed)
    assert (tmp_path / "errors-0.txt").read_text() == (tmp_path / "errors-1.txt").read_text()


def test_one_call_over_shares_of_the_data(tmp_path: Path) -> None:
    done = torchrun("one_call", tmp_path)
    assert done.returncode == 0, done.stderr
    whole, report = ts.compress(small_net(), batches(count=5), recipe=closed_form())
    net = reusing_net()
    again, _ = ts.compress(net, reused_plan(net), data=reused_batches())
    for name, alone, build in (("small", whole, small_net), ("again", again, reusing_net)):
        first, second = (load_file(tmp_path / f"{name}-{rank}" / "model.safetensors") for rank in range(2))
        assert all(torch.equal(value, second[key]) for key, value in first.items())
        assert first.keys() == alone.state_dict().keys()
        ts.save(alone, tmp_path / name)
        # Signs of factors are free, so kernels are compared. The inputs of the last layers hardly vary, and there a
        # regression turns rounding into anything, in one process with its batches in another order too.
        found, expected = (ts.load(tmp_path / each, build(), dense=True) for each in (f"{name}-0", name))
        for layer in ("block.0", "grouped", "pointwise", "up") if name == "small" else ("again", "scales", "up"):
            one, other = (net.get_submodule(layer).weight for net in (found, expected))
            assert isinstance(one, Tensor)
            assert isinstance(other, Tensor)
            assert (one - other).norm() < 1e-3 * other.norm(), layer
    # Layers were fitted in sequence and weighed, with the samples of both.
    for rank in range(2):
        notes = json.loads((tmp_path / f"notes-{rank}.json").read_text())
        assert notes["sequential"]
        assert notes["sequential_samples"] == report.notes["sequential_samples"] == 40
        mine, alone = notes["weighing"], report.notes["weighing"]
        assert (mine["power"], mine["samples"], mine["effect_samples"]) == (alone["power"], 40, 40)
        assert mine["effects"] == pytest.approx(alone["effects"], rel=1e-3)
        for (power, divergence), (other, expected_divergence) in zip(mine["tried"], alone["tried"], strict=True):
            assert power == other
            assert divergence == pytest.approx(expected_divergence, rel=1e-2)


def test_a_failure_reaches_all(tmp_path: Path) -> None:
    ts.calibrate(small_net(), batches()).save(tmp_path / "stats")
    done = torchrun("fail_in_one", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rejected batch 0" in (tmp_path / "error-1-data.txt").read_text()
    assert "process 1 of 2 failed" in (tmp_path / "error-0-data.txt").read_text()
    # Where weights are compared before anything is solved, and where they are not.
    for check, message in ((True, "other weights"), (False, "NaN")):
        assert message in (tmp_path / f"error-1-{check}.txt").read_text()
        assert "process 1 of 2 failed" in (tmp_path / f"error-0-{check}.txt").read_text()


def test_work_is_shared_evenly() -> None:
    work = [100, 1, 50, 49, 2, 1]
    owners = share_out(work, 2)
    loads = [sum(w for w, owner in zip(work, owners, strict=True) if owner == rank) for rank in range(2)]
    assert abs(loads[0] - loads[1]) <= 3
    assert share_out([], 3) == []


if __name__ == "__main__":
    {"compress_and_save": compress_and_save, "one_call": one_call, "fail_in_one": fail_in_one}[sys.argv[1]](
        Path(sys.argv[2])
    )

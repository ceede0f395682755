"""Two processes under torchrun: both end with the model that one process makes, and a failure reaches both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tensigma as ts
from support_nets import batches, small_net
from tensigma.errors import TensigmaError
from tensigma.running import rank_and_size
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
    rank, size = rank_and_size()
    small, _ = ts.compress(small_net(), batches(count=4)[rank::size], budget=ts.Params(0.5))
    ts.save(small, folder / f"small-{rank}")


def fail_in_one(folder: Path) -> None:
    net = small_net()
    stats = ts.Calibration.load(folder / "stats")
    plan = ts.plan(net, stats, ranks=ts.Ranks({"*": 2}))
    rank, _ = rank_and_size()
    if rank == 1:
        for module in net.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.constant_(module.weight, float("nan"))
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
    first, second = (load_file(tmp_path / f"small-{rank}" / "model.safetensors") for rank in range(2))
    assert all(torch.equal(value, second[key]) for key, value in first.items())


def test_a_failure_reaches_all(tmp_path: Path) -> None:
    ts.calibrate(small_net(), batches()).save(tmp_path / "stats")
    done = torchrun("fail_in_one", tmp_path)
    assert done.returncode == 0, done.stderr
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

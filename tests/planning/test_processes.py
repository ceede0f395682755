"""Two processes under torchrun: what each measures for itself may differ, what they plan may not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tensigma as ts
from tensigma.running import rank_and_size, timetable

pytestmark = pytest.mark.slow


def plan_in_two(folder: Path) -> None:
    rank, size = rank_and_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    inputs = torch.randn(480, 32) * torch.logspace(0, -1, 32)
    stats = ts.calibrate(net, inputs.split(40)[rank:6:size])
    # The second process has a slower clock, and a folder of its own.
    timetable.measure = lambda chains, runtime: [1e-9 * chain.macs ** (1 - 0.3 * rank) for chain in chains]
    quick = ts.plan(net, stats, budget=ts.Latency(0.7, runtime="eager", cache=folder / str(rank)))
    kept = ts.plan(net, stats, budget=ts.Drop(0.2), data=list(inputs.split(40)[6 + rank :: size]))
    notes = {"quick": quick.to_json(), "kept": kept.to_json(), "timed": (folder / str(rank)).exists()}
    (folder / f"plans-{rank}.json").write_text(json.dumps(notes))


def test_all_processes_plan_alike(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [str(Path(__file__)), str(tmp_path)]
    result = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    first, second = (json.loads((tmp_path / f"plans-{rank}.json").read_text()) for rank in range(2))
    assert first["quick"] == second["quick"]
    assert first["kept"] == second["kept"]
    assert first["kept"]["notes"]["drop"]["samples"] == 240
    assert (first["timed"], second["timed"]) == (True, False)


if __name__ == "__main__":
    plan_in_two(Path(sys.argv[1]))

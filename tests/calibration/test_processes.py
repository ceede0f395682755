"""Several processes that work together, and processes that are killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tensigma as ts

SETUP = """
import sys
import torch
from torch import nn
import tensigma as ts
from tensigma.running import shard

torch.set_num_threads(1)
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.wide = nn.Linear(16 * 16 * 16, 4)
        self.rare = nn.Linear(4, 4)
    def forward(self, x):
        y = self.wide(self.conv(x).relu().flatten(1))
        return self.rare(y) if x.mean() > 0.55 else y

model = Net()
generator = torch.Generator().manual_seed(1)
# Only the second of six batches is bright enough for the last layer.
batches = [torch.rand(4, 3, 16, 16, generator=generator) + 0.2 * (i == 1) for i in range(6)]
"""


def script(folder: Path, body: str) -> Path:
    file = folder / "script.py"
    file.write_text(SETUP + textwrap.dedent(body))
    return file


def run(file: Path, *arguments: str, ranks: int = 1) -> list[subprocess.CompletedProcess[str]]:
    """Run a script in one process or several that know of each other, as torchrun would start them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(ranks):
        variables = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **{key: str(value) for key, value in variables.items() if ranks > 1}}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(file), *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    done = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return done


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    file = script(
        tmp_path,
        """
        stats = ts.calibrate(model, shard(batches), fisher="model")
        stats.save(sys.argv[1] + str(shard([]).rank))
        """,
    )
    for done in run(file, str(tmp_path / "rank"), ranks=2):
        assert done.returncode == 0, done.stderr
    whole: dict[str, Any] = {}
    exec(SETUP, whole)
    single = ts.calibrate(whole["model"], whole["batches"], fisher="model")
    for rank in range(2):
        together = ts.Calibration.load(tmp_path / f"rank{rank}")
        assert list(together) == ["conv", "wide", "rare"]
        for name in single:
            mine, other = together[name], single[name]
            assert (mine.count, mine.samples, mine.input_shape) == (other.count, other.samples, other.input_shape)
            torch.testing.assert_close(mine.mean, other.mean)
            torch.testing.assert_close(mine.gram, other.gram, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(mine.output_abs_mean, other.output_abs_mean)
            assert mine.fisher is not None
            assert mine.fisher_samples == other.fisher_samples
        assert together["wide"].rows is not None
        assert len(together["wide"].rows) == 24


@pytest.mark.slow
def test_a_process_that_fails_does_not_leave_the_others_waiting(tmp_path):
    file = script(
        tmp_path,
        """
        mine = shard(batches)
        if mine.rank == 1:
            mine = [torch.rand(2, 5, 16, 16)]
        ts.calibrate(model, mine)
        """,
    )
    first, second = run(file, ranks=2)
    assert first.returncode != 0
    assert "process 1 of 2 failed" in first.stderr
    assert "rejected batch 0" in second.stderr


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_result(tmp_path):
    file = script(
        tmp_path,
        """
        import time
        slow = sys.argv[2] == "slow"
        stats = ts.calibrate(
            model, batches, checkpoint=sys.argv[1] + "/run", checkpoint_every=1, resume=True,
            progress=lambda state: time.sleep(0.3 if slow else 0),
        )
        stats.save(sys.argv[1] + "/stats")
        """,
    )
    process = subprocess.Popen([sys.executable, str(file), str(tmp_path), "slow"])
    deadline = time.monotonic() + 60
    while not list((tmp_path / "run").glob("step-000002")):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    assert not (tmp_path / "stats").exists()
    (done,) = run(file, str(tmp_path), "fast")
    assert done.returncode == 0, done.stderr
    whole: dict[str, Any] = {}
    exec(SETUP, whole)
    single = ts.calibrate(whole["model"], whole["batches"])
    resumed = ts.Calibration.load(tmp_path / "stats")
    for name in single:
        assert resumed[name].count == single[name].count
        torch.testing.assert_close(resumed[name].gram, single[name].gram, rtol=1e-5, atol=1e-6)

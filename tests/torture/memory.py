"""What calibration takes beyond the forward passes of the model, beside what ``memory=`` allows."""

from __future__ import annotations

import json
import os
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import tensigma as ts
from tensigma.calibration import estimate_memory, select_layers
from torture.tally import Tally

#: What the system may add: a share of the limit for what the allocator holds back, and bytes for code that is loaded
#: when it first runs and for counters of pages that the kernel brings up to date now and then.
SLACK, SLACK_BYTES = 0.05, 24 * 2**20
_LARGEST = "largest share of the limit"

Case = Callable[[], tuple[nn.Module, list[Tensor]]]
CASES: dict[str, Case] = {
    "one wide Linear": lambda: (nn.Sequential(nn.Linear(6144, 16)), [torch.randn(64, 8, 6144) for _ in range(2)]),
    "two wide Linear": lambda: (
        nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 8)),
        [torch.randn(32, 16, 4096) for _ in range(2)],
    ),
    # More rows than columns, so that they become sums on the way.
    "a wide Linear with many rows": lambda: (
        nn.Sequential(nn.Linear(5120, 16)),
        [torch.randn(16, 16, 5120) for _ in range(21)],
    ),
    "the same in double precision": lambda: (
        nn.Sequential(nn.Linear(4096, 16)).double(),
        [torch.randn(16, 16, 4096, dtype=torch.float64) for _ in range(17)],
    ),
    "many channels": lambda: (nn.Sequential(nn.Conv2d(512, 8, 3, padding=1)), [torch.randn(4, 512, 14, 14)] * 2),
    "several convolutions": lambda: (
        nn.Sequential(*(nn.Conv2d(256, 256, 3, padding=1) for _ in range(4))),
        [torch.randn(4, 256, 14, 14)] * 2,
    ),
    "strides and one axis": lambda: (
        nn.Sequential(nn.Conv1d(768, 768, 5, stride=2), nn.Conv1d(768, 8, 3)),
        [torch.randn(8, 768, 64)] * 2,
    ),
}


def least_memory(model: nn.Module) -> int:
    """The smallest limit under which calibration of ``model`` runs."""
    estimate = estimate_memory(select_layers(model, None), memory=1)
    return sum(estimate.results.values()) + estimate.working([max(estimate.sums, key=estimate.sums.__getitem__)])


def torture(tally: Tally, names: tuple[str, ...] = tuple(CASES)) -> None:
    """Every case just above the least limit and with half as much again, each in a process of its own."""
    for name in names:
        for share in (1.01, 1.5):
            outcome = _in_child(partial(_measured, CASES[name], share))
            if "error" in outcome:
                tally.add("crashed", f"{name}: {outcome['error']}")
                continue
            taken = outcome["taken"] / outcome["limit"]
            within = outcome["taken"] <= (1 + SLACK) * outcome["limit"] + SLACK_BYTES
            tally.add("held" if within else "took more", f"{name}, {outcome['limit'] / 1e6:.0f} MB: {taken:.2f} times")
            tally.facts[_LARGEST] = round(max(taken, tally.facts.get(_LARGEST, 0)), 3)


def _measured(case: Case, share: float) -> dict[str, float]:
    torch.set_num_threads(1)
    model, batches = case()
    model.eval()
    limit = int(share * least_memory(model))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    _forget_peak()
    before = _status("VmRSS")
    with torch.no_grad():
        for batch in batches:
            model(batch)
    forward = _status("VmHWM") - before
    _forget_peak()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ts.calibrate(model, batches, memory=limit)
    return {"limit": limit, "taken": _status("VmHWM") - before - forward}


def _in_child(work: Callable[[], dict[str, float]]) -> dict[str, float]:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer: dict[str, object] = dict(work())
        except BaseException as error:
            answer = {"error": "".join(traceback.format_exception_only(error))}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        content = stream.read()
    os.waitpid(child, 0)
    outcome: dict[str, float] = json.loads(content or '{"error": "killed"}')
    return outcome


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    """A size of this process in bytes, as the kernel counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024

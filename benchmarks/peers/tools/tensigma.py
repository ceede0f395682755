"""Tensigma itself by default; and two rules that it rebuilds: BALF's, and the paper's (VBMF, Tucker-2 under Σ)."""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import nn

import tensigma as ts
from peers.search import n_params, nearest_above
from peers.worker import Assignment, main
from tensigma.experiments import BALF


def compress(assignment: Assignment) -> nn.Module | Path:
    model, batches = assignment.model, list(assignment.batches())
    budget = ts.Params(1 / assignment.job.rate)
    method = assignment.job.method
    solved = Path(assignment.job.material) / f"solved-{assignment.job.rate:g}"
    if method == "default":
        # What it takes is measured from nothing; INT8 of the same rate finds it done.
        shutil.rmtree(solved, ignore_errors=True)
        return ts.compress(model, batches, budget=budget, cache=solved)[0]
    if method == "int8":
        small = model if assignment.job.rate == 1 else ts.compress(model, batches, budget=budget, cache=solved)[0]
        file = Path(assignment.job.out) / "int8.onnx"
        ts.quantize(small, file, batches, latency=False)
        assignment.notes["params"] = n_params(small)
        return file
    stats = ts.calibrate(model, batches)
    plan = BALF(model, stats).plan(budget) if method == "balf" else vbmf_plan(assignment, stats)
    return ts.compress(model, plan, stats)[0]


def vbmf_plan(assignment: Assignment, stats: ts.Calibration) -> ts.Plan:
    """The paper's recipe, its ratio searched until the rate is met."""
    plans: dict[float, ts.Plan] = {}

    def count(ratio: float) -> int:
        plans[ratio] = ts.plan(
            assignment.model,
            stats,
            ranks=ts.VBMF(ratio),
            method="tucker2",
            norm="sigma",
            layers="spatial",
            saving="none",
        )
        return plans[ratio].after.params

    # Beyond 1 the rule takes ranks below those of VBMF.
    ratio = nearest_above(count, n_params(assignment.model) / assignment.job.rate, low=0.0, high=2.0)
    assignment.notes["ratio"] = ratio
    count(ratio)
    return plans[ratio]


if __name__ == "__main__":
    main(compress)

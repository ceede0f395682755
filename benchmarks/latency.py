"""What a budget of time asks for and what the whole model then takes, in the runtime that it was planned for.

    TENSIGMA_DATA=… python benchmarks/latency.py [--method auto]

A trained ResNet-18 of width 32 on CIFAR-10 images is planned for several shares of its time, compressed, and run as a
whole: original and compressed in turns, one thread, minimum of processor time over rounds. The sum over layers is what
was promised; the whole model has activations and additions besides, which no decomposition makes faster. Writes
results/benchmark_latency.json.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import machine
import torch
from torch import Tensor, nn

import tensigma as ts
from tensigma.planning import Front
from tensigma.running import threads
from tensigma.running.timing import processor_clock
from tensigma.zoo import load_data, load_model

SHARES = (0.8, 0.6)
ROUNDS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="auto")
    method = parser.parse_args().method
    root = Path(os.environ["TENSIGMA_DATA"]) / "cifar10"
    model = load_model("zoo:resnet18w32-cifar", root / "resnet18w32.safetensors").eval()
    images = list(load_data(f"cifar10:{root}?split=train", batch_size=100, samples=1500))
    calibration, held_out = images[:10], images[10:]
    stats = ts.calibrate(model, calibration)
    # The curves are the same whatever is measured.
    front = ts.plan(model, stats, budget=ts.Params(1.0), method=method).front()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        for runtime, batch in (("onnxruntime", 1), ("eager", 1), ("eager", 16)):
            budget = partial(ts.Latency, runtime=runtime, batch=batch, cache=cache)  # type: ignore[arg-type]
            rows += one_runtime(model, stats, front, held_out, budget)
            result = {"model": "resnet18w32-cifar", "method": method, "rounds": ROUNDS, "rows": rows}
            machine.write("benchmark_latency", result)


def one_runtime(
    model: nn.Module, stats: ts.Calibration, front: Front, held_out: Any, budget: Callable[[float], ts.Latency]
) -> list[dict[str, Any]]:
    runtime, batch = budget(1.0).runtime, budget(1.0).batch
    start = time.perf_counter()
    front.plan(budget(1.0))
    timing = time.perf_counter() - start
    plans = [front.plan(budget(share)) for share in SHARES]
    smalls = [ts.compress(model, plan, stats)[0].eval() for plan in plans]
    x = torch.randn(batch, 3, 32, 32)
    seconds = in_turns([whole(each, x, runtime) for each in (model, *smalls)])
    rows = []
    for share, plan, small, own in zip(SHARES, plans, smalls, seconds[1:], strict=True):
        before, after = plan.notes["latency"]["seconds"]
        row = {
            "runtime": runtime,
            "batch": batch,
            "asked": share,
            "layers_planned": after / before,
            "layers_ms": [1000 * before, 1000 * after],
            "whole_ms": [1000 * seconds[0], 1000 * own],
            "whole_share": own / seconds[0],
            "params_share": plan.after.params / plan.before.params,
            "macs_share": plan.after.macs / plan.before.macs,
            "formats": dict(Counter(entry.label.split()[0] for entry in plan.values()).most_common()),
            "agreement": ts.evaluate(small, held_out, original=model).agreement,
            "seconds_to_time_all_shapes": timing,
        }
        rows.append(row)
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    return rows


def whole(model: nn.Module, x: Tensor, runtime: str) -> Callable[[], object]:
    """A function that runs the whole model once."""
    if runtime == "eager":
        return lambda: model(x)
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        torch.onnx.export(model, (x,), file, dynamo=True, verbose=False, external_data=False)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, feed)


def in_turns(runners: Sequence[Callable[[], object]]) -> list[float]:
    best = [math.inf] * len(runners)
    clock = processor_clock()
    with torch.inference_mode(), threads(1):
        for _ in range(ROUNDS):
            for index, run in enumerate(runners):
                start = clock()
                run()
                best[index] = min(best[index], clock() - start)
    return best


if __name__ == "__main__":
    main()

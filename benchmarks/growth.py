"""How time and memory grow with images, layers and width, beside what the products alone would take.

    python benchmarks/growth.py [--widest 512]

Exponents are slopes of straight lines through the logarithms of times (or of memory) and sizes. Times are CPU seconds
of one thread, which depend little on what else the machine does.

- Images: the CIFAR-10 ResNet-20 of ``$TENSIGMA_DATA``, calibrated and fitted in sequence (without solving) on 250 to
  2,000.
- Layers: stacks of 4 to 32 convolutions, 32 channels each, on noise; calibration, planning and compression together.
- Width: one 3×3 convolution of 64 to 512 (or 1,024) channels at half its parameters: error curves of all formats, CP
  with joint taps, and Tucker-2. Beside each solution stands the time of one product of Σ with the factors, at the speed
  of a large matrix product on this machine: no solver under Σ can need less than one.

Grams of the last part are a Kronecker product of a channel and a tap gram with decaying spectra plus 64 random
directions that are not; kernels have a power-law spectrum (material.py).
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import machine
import material
import numpy as np
import torch
from torch import Tensor, nn
from whole import Images, Peak

import tensigma as ts
from tensigma.layers import Geometry
from tensigma.linalg import CPJoint, Metric, Tucker2
from tensigma.solving import choices_of, norm_of

SHARE = 0.5


def timed(function: Callable[..., Any], *args: Any, **keywords: Any) -> tuple[Any, float]:
    """What a call returns, and its CPU seconds."""
    start = time.process_time()
    result = function(*args, **keywords)
    return result, time.process_time() - start


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of log(value) over log(size)."""
    return round(float(np.polyfit(np.log(sizes), np.log(values), 1)[0]), 2)


def gemm_speed(size: int = 3072) -> float:
    """Multiply-adds per second of a large product in float32."""
    a = torch.randn(size, size)
    return size**3 / min(timed(torch.mm, a, a)[1] for _ in range(3))


def images_row(count: int) -> dict[str, Any]:
    folder = Path(os.environ["TENSIGMA_DATA"]) / "cifar10"
    model = ts.zoo.load_model("zoo:resnet20-cifar", folder / "resnet20.safetensors")
    batches = ts.zoo.load_data(f"npz:{folder / 'train_10k.npz'}?samples={count}")
    images = torch.cat([part for part, _ in batches])
    few = Images(images[:250])
    stats = ts.calibrate(model, few)
    plan = ts.plan(model, stats, budget=ts.Params(SHARE))
    part = Images(images)
    with Peak() as calibrating:
        _, calibration = timed(ts.calibrate, model, part)
    start = time.perf_counter()
    with Peak() as fitting:
        (_, report), whole = timed(ts.compress, model, plan, stats, data=part, sequential=True, memory="20GB")
    # Layers know the seconds of the clock that they took: the share of these is taken off.
    solving = sum(layer.seconds or 0.0 for layer in report.compressed) / (time.perf_counter() - start)
    return {
        "images": count,
        "calibration": calibration,
        "sequence_without_solving": (1 - solving) * whole,
        "calibration_bytes": calibrating.bytes,
        "sequence_bytes": fitting.bytes,
    }


def layers_row(count: int) -> dict[str, Any]:
    torch.manual_seed(0)
    blocks = [[nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()] for _ in range(count)]
    layers = [layer for block in blocks for layer in block]
    model = nn.Sequential(nn.Conv2d(3, 32, 3), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    images = Images(torch.randn(128, 3, 16, 16, generator=torch.Generator().manual_seed(0)))
    with torch.no_grad():
        model.train()
        for batch in images:
            model(batch)
    model.eval()
    recipe = ts.Recipe(budget=ts.Params(SHARE), answers=ts.Scores(axis=1))
    with Peak() as peak:
        _, whole = timed(ts.compress, model, images, recipe=recipe)
    return {"layers": count, "whole": whole, "whole_bytes": peak.bytes}


def synthetic_gram(channels: int) -> Tensor:
    rng = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(channels, channels, generator=rng)).Q
    between = (basis * torch.arange(1, channels + 1).float().pow(-1.0)) @ basis.T
    place = torch.cartesian_prod(torch.arange(3.0), torch.arange(3.0))
    taps = 0.8 ** torch.cdist(place, place, p=1)
    odd = torch.randn(9 * channels, 64, generator=rng) / math.sqrt(9 * channels)
    gram = torch.kron(between, taps)
    return gram + 0.1 * gram.trace() / 64 * (odd @ odd.T)


def width_row(width: int, speed: float) -> dict[str, Any]:
    kernel, gram = material.kernel(width, width, seed=0), synthetic_gram(width)
    metric = Metric.from_gram(gram)
    rank = int(SHARE * 9 * width * width / (2 * width + 9))
    half = round(width * (math.sqrt(1 + 9 * 9 * SHARE) - 1) / 9)  # 2 w r + 9 r² = 9 w² ÷ 2
    methods = choices_of("auto", Geometry.of(nn.Conv2d(width, width, 3)), norm_of("sigma"))
    with Peak() as peak:
        curves = [timed(method.errors, kernel, metric)[1] for method in methods]
        cp_joint, cp_seconds = timed(CPJoint(rank).fit, kernel, metric)
        tucker2, tucker2_seconds = timed(Tucker2(half, half).fit, kernel, metric)
    product = (9 * width) ** 2 / speed  # of Σ with one vector
    return {
        "width": width,
        "curves": sum(curves),
        "cp_joint": cp_seconds,
        "tucker2": tucker2_seconds,
        "bytes": peak.bytes,
        "cp_joint_products": cp_seconds / (product * rank),
        "tucker2_products": tucker2_seconds / (product * 9 * half),
        "errors": {"cp_joint": round(cp_joint.error, 4), "tucker2": round(tucker2.error, 4)},
    }


def warm_up() -> None:
    """What only the first call takes, such as imports."""
    torch.set_num_threads(1)
    width_row(16, 1.0)


def measured(size: str, row: Callable[..., dict[str, Any]], sizes: Sequence[int], *args: Any) -> dict[str, Any]:
    """One row for each size, each in a process of its own: memory that one leaves behind would hide another's."""
    rows = []
    for count in sizes:
        with ProcessPoolExecutor(1, get_context("spawn"), warm_up) as process:
            rows.append(process.submit(row, count, *args).result())
        print(rows[-1], flush=True)
    return _with_exponents(rows, size)


def _with_exponents(rows: list[dict[str, Any]], size: str) -> dict[str, Any]:
    names = [name for name, value in rows[0].items() if name != size and not isinstance(value, dict)]
    sizes = [row[size] for row in rows]
    rounded = [
        {name: float(f"{value:.3g}") if isinstance(value, float) else value for name, value in row.items()}
        for row in rows
    ]
    return {"rows": rounded, "exponents": {name: exponent(sizes, [row[name] for row in rows]) for name in names}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widest", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    speed = gemm_speed()
    result: dict[str, Any] = {"seed": 0, "gemm_multiply_adds_per_second": float(f"{speed:.3g}")}
    widths = [width for width in (64, 128, 256, 512, 1024) if width <= options.widest]
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "images": lambda: measured("images", images_row, [250, 500, 1000, 2000]),
        "layers": lambda: measured("layers", layers_row, [4, 8, 16, 32]),
        "width": lambda: measured("width", width_row, widths, speed),
    }
    for name, run in parts.items():
        result[name] = run()
        machine.write("benchmark_growth", result)
    print({name: result[name]["exponents"] for name in parts})


if __name__ == "__main__":
    main()

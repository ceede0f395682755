"""Cost of calibration beside the forward pass it rides on: time, memory, and growth with the data.

    python benchmarks/calibration.py [--images 320] [--growth 100 1000] [--threads 1]

Every figure is a ratio or a difference within one run. Plain forward passes and calibration take turns batch by batch,
so that whatever else the machine does falls on both. Memory is the peak of a fresh process less the peak of another
that only runs the model.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import tensigma as ts

ROOT = Path(__file__).resolve().parents[1]
BATCH = 16


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return ts.zoo.load_model("torchvision:resnet18")


def spatial_layers(model: nn.Module) -> list[str]:
    convolutions = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    return [name for name, module in convolutions if module.kernel_size == (3, 3)]


class Images:
    """Batches of noise, made anew each time so that they take no memory."""

    def __init__(self, n_images: int) -> None:
        self.sizes = [min(BATCH, n_images - start) for start in range(0, n_images, BATCH)]

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Tensor]:
        for seed, size in enumerate(self.sizes):
            yield torch.randn(size, 3, 224, 224, generator=torch.Generator().manual_seed(seed))


class TakingTurns:
    """Batches, each first run through a plain copy of the model and timed."""

    def __init__(self, model: nn.Module, images: Images) -> None:
        self.model = copy.deepcopy(model)
        self.images = images
        self.forward = 0.0
        self.making = 0.0

    def __iter__(self) -> Iterator[Tensor]:
        start = time.perf_counter()
        for batch in self.images:
            self.making += time.perf_counter() - start
            start = time.perf_counter()
            with torch.no_grad():
                self.model(batch)
            self.forward += time.perf_counter() - start
            yield batch
            start = time.perf_counter()


def time_ratio(n_images: int, layers: list[str] | None) -> dict[str, float]:
    model = make_model()
    ts.calibrate(model, Images(BATCH), layers=layers)  # warm up
    turns = TakingTurns(model, Images(n_images))
    start = time.perf_counter()
    ts.calibrate(model, turns, layers=layers)
    total = time.perf_counter() - start
    calibration = total - turns.forward - turns.making
    return {
        "images": n_images,
        "forward_seconds": turns.forward,
        "calibration_seconds": calibration,
        "ratio": calibration / turns.forward,
    }


def peak_bytes(task: str, n_images: int, threads: int) -> int:
    """Peak memory of a fresh process that does ``task``."""
    command = [sys.executable, __file__, "--peak", task, "--images", str(n_images), "--threads", str(threads)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])["peak"]


def run_task(task: str, n_images: int) -> None:
    model = make_model()
    if task == "forward":
        with torch.no_grad():
            for batch in Images(n_images):
                model(batch)
    else:
        ts.calibrate(model, Images(n_images), layers=spatial_layers(model))
    # ru_maxrss would also count what the parent process held when this one was started.
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    print(json.dumps({"peak": peak * 1024}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=320)
    parser.add_argument("--growth", type=int, nargs=2, default=(100, 1000))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmark_calibration.json")
    parser.add_argument("--peak", choices=["forward", "calibrate"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        run_task(options.peak, options.images)
        return
    spatial = spatial_layers(make_model())
    ratios = sorted(
        (time_ratio(options.images, spatial) for _ in range(options.repeats)), key=lambda found: found["ratio"]
    )
    every_layer = time_ratio(options.images, None)
    small, large = options.growth
    forward = peak_bytes("forward", small, options.threads)
    # Inputs wait for their product until some 128 of them are there: memory rises up to that point and no further.
    middle = max(small, min(large, 300))
    peaks = {n: peak_bytes("calibrate", n, options.threads) - forward for n in (small, middle, large)}
    times = {n: time_ratio(n, spatial) for n in (small, large)}
    seconds = {n: times[n]["calibration_seconds"] / n for n in times}
    report = {
        "what": "torchvision resnet18 (random weights), 224x224, batch 16, all 3x3 convolutions; noise images",
        "seed": 0,
        "threads": options.threads,
        "torch": torch.__version__,
        "tensigma": ts.__version__,
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "ratio_best": ratios[0]["ratio"],
        "ratio_median": ratios[len(ratios) // 2]["ratio"],
        "ratio_all_layers": every_layer["ratio"],
        "runs": ratios,
        "peak_above_forward_bytes": {str(n): peak for n, peak in peaks.items()},
        "seconds_per_image": {str(n): value for n, value in seconds.items()},
        "ratio_by_images": {str(n): found["ratio"] for n, found in times.items()},
    }
    print(f"{'figure':58} {'reach':>8} {'found':>8}")
    print(f"{'calibration / forward, 3x3 layers, median of runs':58} {'2.2':>8} {report['ratio_median']:8.2f}")
    print(f"{'the same, all 21 layers':58} {'':>8} {every_layer['ratio']:8.2f}")
    for n, peak in peaks.items():
        print(f"{f'peak memory above forward, {n} images, GB':58} {'1':>8} {peak / 1e9:8.2f}")
    print(f"{f'seconds an image, {large} / {small} images':58} {'1':>8} {seconds[large] / seconds[small]:8.2f}")
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

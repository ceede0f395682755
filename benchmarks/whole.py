"""A whole compression beside the forward pass over its images: time by stage, and memory.

    python benchmarks/whole.py [--network resnet50] [--network resnet18] [--images 256] [--share 0.5]

Everything is as ``tensigma compress`` does it by default, from calibration to the archive. Stages are told apart by the
progress that the library reports. Forward passes over the same images are timed before and after, in the same process,
and every ratio is to their mean. Memory is the peak of the process less what it held once the model, the images and one
forward pass were in place.

Seconds of CPU, over all threads, stand beside those of the clock: they depend less on what else the machine does.

``resnet50`` is the real network of ``$TENSIGMA_DATA/imagenet``; ``resnet18`` has torchvision's shapes and random
weights, with BatchNorm estimated on the images; ``resnet20`` is the real CIFAR-10 network, at 1,000 images.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import machine
import material
import torch
from torch import Tensor, nn

import tensigma as ts

BATCH = 16


class Images:
    """Batches of images held in memory."""

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return -(-len(self.images) // BATCH)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.images.split(BATCH))


# What reports each type of progress.
STAGES = {
    "CalibrationProgress": "calibration",
    "PlanningProgress": "curves",
    "EffectProgress": "effects",
    "TrialProgress": "trials",
    "CompressionProgress": "fitting",
}


class Stages:
    """Seconds by stage, from the types of the progress reported."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self._last, self._last_cpu = time.perf_counter(), time.process_time()

    def __call__(self, progress: Any) -> None:
        self.mark(STAGES.get(type(progress).__name__, "other"))

    def mark(self, stage: str) -> None:
        """What has passed since the last report belongs to ``stage``."""
        now, cpu = time.perf_counter(), time.process_time()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self.cpu[stage] = self.cpu.get(stage, 0.0) + cpu - self._last_cpu
        self._last, self._last_cpu = now, cpu


class Peak:
    """The largest resident size of this process inside the block, in bytes above that at its start."""

    def __enter__(self) -> Peak:
        gc.collect()
        self._start, self.bytes = _resident(), 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.bytes = max(self.bytes, _resident() - self._start)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def resnet50(count: int) -> tuple[nn.Module, Images]:
    weights = Path(os.environ["TENSIGMA_DATA"]) / "imagenet" / "resnet50.safetensors"
    return ts.zoo.load_model("zoo:resnet50-v1", weights), Images(material.images(count)[0])


def resnet18(count: int) -> tuple[nn.Module, Images]:
    model, images = material.resnet18(), Images(material.images(count)[0])
    with torch.no_grad():
        model.train()
        for batch in images:
            model(batch)
    return model.eval(), images


def resnet20(count: int) -> tuple[nn.Module, Images]:
    folder = Path(os.environ["TENSIGMA_DATA"]) / "cifar10"
    model = ts.zoo.load_model("zoo:resnet20-cifar", folder / "resnet20.safetensors")
    batches = ts.zoo.load_data(f"npz:{folder / 'train_10k.npz'}?samples={count}")
    return model, Images(torch.cat([images for images, _ in batches]))


NETWORKS: dict[str, Callable[[int], tuple[nn.Module, Images]]] = {
    "resnet50": resnet50,
    "resnet18": resnet18,
    "resnet20": resnet20,
}


def forward_seconds(model: nn.Module, images: Images) -> tuple[float, float]:
    """Seconds of one pass over the images, by the clock and of CPU."""
    start, cpu = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        for batch in images:
            model(batch)
    return time.perf_counter() - start, time.process_time() - cpu


def measure(name: str, count: int, share: float) -> dict[str, Any]:
    model, images = NETWORKS[name](count)
    forwards = [forward_seconds(model, images)]
    stages = Stages()
    with Peak() as peak, tempfile.TemporaryDirectory() as folder:
        small, report = ts.compress(model, images, budget=ts.Params(share), progress=stages)
        stages.mark("other")
        ts.save(small, Path(folder) / "small")
        stages.mark("archive")
    forwards.append(forward_seconds(model, images))
    clock, cpu = (sum(times) / len(times) for times in zip(*forwards, strict=True))
    small_cpu = forward_seconds(small, images)[1]
    # Layers are solved in the thread that reports, so their seconds are the clock's; of CPU they are the same share.
    solving = sum(layer.seconds or 0.0 for layer in report.compressed)
    samples = report.notes.get("sequential_samples", count)
    passing = (1 - solving / stages.seconds["fitting"]) * stages.cpu["fitting"]
    return {
        "images": count,
        "share": share,
        "forward_seconds": [round(seconds, 2) for seconds, _ in forwards],
        "forward_cpu": [round(seconds, 2) for _, seconds in forwards],
        "seconds": round(sum(stages.seconds.values()), 1),
        "cpu": round(sum(stages.cpu.values()), 1),
        "whole_to_forward": round(sum(stages.seconds.values()) / clock, 2),
        "whole_to_forward_cpu": round(sum(stages.cpu.values()) / cpu, 2),
        "stages": {stage: round(value, 1) for stage, value in stages.seconds.items()},
        "stages_cpu": {stage: round(value, 1) for stage, value in stages.cpu.items()},
        "solving_in_fitting": round(solving, 1),
        "sequential_samples": samples,
        "sequential_without_solving_to_both_forwards": round(passing / ((cpu + small_cpu) * samples / count), 2),
        "effects_to_forward": round(stages.cpu.get("effects", 0.0) / cpu, 2),
        "peak_gb": round(peak.bytes / 1e9, 2),
        "params": [report.before.params, report.after.params],
        "macs": [report.before.macs, report.after.macs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", choices=list(NETWORKS), help="default: all")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--share", type=float, default=0.5)
    options = parser.parse_args()
    result: dict[str, Any] = {"seed": 0, "networks": machine.read("benchmark_whole").get("networks", {})}
    for name in options.network or NETWORKS:
        count = 1_000 if name == "resnet20" else options.images
        result["networks"][name] = measure(name, count, options.share)
        print(name, result["networks"][name], flush=True)
        machine.write("benchmark_whole", result)


if __name__ == "__main__":
    main()

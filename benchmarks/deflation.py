"""CP-ALS-Σ beside greedy deflation under the same Σ at the same rank, layer by layer, on trained CIFAR-10 ResNets.

    python benchmarks/deflation.py [--only resnet20]

Needs TENSIGMA_DATA. Ranks are the paper's with α = 0.8, Σ is from 500 training images. Writes
results/benchmark_deflation.json after every layer and goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import machine
import torch

from tensigma.calibration import calibrate
from tensigma.linalg import CP, Deflation, Metric, cp_rank
from tensigma.zoo import load_data, load_model

ALPHA = 0.8
MODELS = ("resnet20", "resnet56", "resnet18w32")


def layers(name: str, folder: Path, done: set[str]) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, kernel and gram of every convolution with taps but the first, less those that are done."""
    model = load_model(f"zoo:{name}-cifar", folder / f"{name}.safetensors")
    wanted = {
        path: module.weight.detach()
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Conv2d) and path != "conv1" and module.kernel_size != (1, 1) and path not in done
    }
    if not wanted:
        return []
    stats = calibrate(model, load_data(f"cifar10:{folder}?samples=500"), layers=list(wanted))
    return [(path, weight, stats[path].gram) for path, weight in wanted.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, action="append")
    folder = Path(os.environ["TENSIGMA_DATA"]) / "cifar10"
    file = machine.RESULTS / "benchmark_deflation.json"
    rows: dict[str, list[dict[str, Any]]] = json.loads(file.read_text())["layers"] if file.exists() else {}
    for name in parser.parse_args().only or MODELS:
        own = rows.setdefault(name, [])
        for path, weight, gram in layers(name, folder, {row["layer"] for row in own}):
            metric, rank = Metric.from_gram(gram), cp_rank(weight, ALPHA)
            greedy, als = Deflation(rank).fit(weight, metric).error, CP(rank, solver="als").fit(weight, metric).error
            row = {"layer": path, "rank": rank, "deflation": greedy, "cp_als": als, "ratio": greedy / als}
            own.append(row)
            print(f"{name:12} {path:16} rank {rank:5}  {greedy:.3f}  {als:.3f}  {greedy / als:.2f}", flush=True)
            machine.write("benchmark_deflation", {"alpha": ALPHA, "layers": rows})


if __name__ == "__main__":
    main()

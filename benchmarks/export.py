"""How much of the saving in multiply-adds becomes time, in ONNX Runtime and in PyTorch.

    python benchmarks/export.py [--rounds 30]

ResNet-18 shapes at 224², random weights, every 3×3 convolution as Tucker-2 with half the channels for ranks. Dense and
compressed models, in both runtimes, take turns on one thread; the minimum of each counts. Writes
results/benchmark_export.json. Target: in ONNX Runtime the speed-up is at least 0.85 of the saving.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import machine
import material
import torch
from torch import nn

from tensigma.deployment import OnnxModel, export, measure_together
from tensigma.evaluation import size_of
from tensigma.layers import Tucker2Format, empty_modules, find_layers, replace_

TARGET = 0.85
BATCHES = (1, 16)


def halved(model: nn.Module) -> nn.Module:
    """Every 3×3 convolution as Tucker-2 at half ranks, with weights that keep the variance of what passes."""
    small = copy.deepcopy(model)
    replacements: dict[str, nn.Module] = {}
    for layer in find_layers(small):
        geometry = layer.geometry
        if geometry is not None and geometry.kernel_size == (3, 3):
            format = Tucker2Format(geometry.out_channels // 2, geometry.in_channels // 2)
            modules = empty_modules(format, geometry).to_empty(device="cpu")
            for weight in modules.parameters():
                nn.init.kaiming_normal_(weight, nonlinearity="linear")
            replacements[layer.name] = modules
    replace_(small, replacements)
    return small


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="passes of each model over one input; fewer over many")
    rounds = parser.parse_args().rounds
    dense = material.resnet18().eval()
    small = halved(dense).eval()
    sample = torch.randn(max(BATCHES), 3, 224, 224, generator=torch.Generator().manual_seed(0))
    saving = (size_of(dense, sample[:1]).macs or 0) / (size_of(small, sample[:1]).macs or 1)
    print(f"multiply-adds: {saving:.2f} times fewer")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        models: dict[str, nn.Module] = {"eager dense": dense, "eager compressed": small}
        for name, model in (("dense", dense), ("compressed", small)):
            file = Path(folder) / f"{name}.onnx"
            found = export(model, file, sample[:2])
            print(f"{name}: {found.bytes:,} bytes, largest difference {found.max_difference:.1e}")
            models[f"onnxruntime {name}"] = OnnxModel(file)
        for batch in BATCHES:
            times = measure_together(models, sample[:batch], rounds=rounds if batch == 1 else max(5, rounds // 4))
            row: dict[str, Any] = {"batch": batch}
            for runtime in ("eager", "onnxruntime"):
                before, after = times[f"{runtime} dense"], times[f"{runtime} compressed"]
                speedup = before.minimum / after.minimum
                row[runtime] = {
                    "dense_seconds": before.minimum,
                    "compressed_seconds": after.minimum,
                    "speedup": speedup,
                    "speedup_of_medians": before.median / after.median,
                    "share_of_saving": speedup / saving,
                    "rounds": before.rounds,
                }
                print(f"batch {batch:2}  {runtime:12} {speedup:.2f} times faster, {speedup / saving:.2f} of the saving")
            rows.append(row)
    result = {
        "task": "ResNet-18 shapes, 224², Tucker-2 at half ranks on 3×3 convolutions, one thread",
        "saving_in_macs": saving,
        "target": TARGET,
        "reached": all(row["onnxruntime"]["share_of_saving"] >= TARGET for row in rows),
        "batches": rows,
        "onnxruntime": version("onnxruntime"),
    }
    print(machine.write("benchmark_export", result))


if __name__ == "__main__":
    main()

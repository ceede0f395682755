"""Ranks and bits from one budget: top-1 of trained networks at a few shares of their bytes, without labels.

    TENSIGMA_DATA=… python benchmarks/bytes.py [--only resnet20] [--cells "8×" "14×"] [--threads 1]

Each cell is planned and fitted on unlabelled training images and evaluated on the test images; bytes are those of the
file, against the float32 file of the original. It stands beside the same ranks fitted without rounding and then rounded
to nearest, the same ranks in ONNX Runtime's own static INT8, and fewer bits alone at the same bytes. Writes
results/benchmark_bytes.json after every cell and leaves out those that are there.

``--int8`` adds, for each network, INT8 files of the original and of half its multiply-adds: top-1 with ranges of
activations from the smallest to the largest value and with those that are chosen, and times as ratios. ``--table``
prints the tables of docs/bytes.md, ``--layer`` measures what rounding adds to the error of one layer in every format.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import machine
import torch
from torch import nn

import tensigma as ts
from tensigma.deployment import OnnxModel, measure_together, plain_bytes, stored_bytes
from tensigma.layers import Geometry, Grid, from_modules, kernels_of, set_grid_
from tensigma.linalg import Metric, Rounding
from tensigma.planning import AllOf, CostBudget, Plan
from tensigma.solving import Treatment, method_of, norm_of, solve
from tensigma.zoo import load_data, load_model

NAME = "benchmark_bytes"
#: Unlabelled images behind Σ and the fits, by the folder of the data.
SAMPLES = {"cifar10": 2_000, "imagenet": 512}
#: Images on which the ranges of activations are measured, as many as ``ts.quantize`` takes.
INT8_SAMPLES = 256
BITS = (2, 3, 4, 5, 6, 8, 16)


@dataclass(frozen=True)
class Cell:
    network: str
    title: str
    budget: CostBudget | AllOf
    #: "auto", or "dense" for bits alone.
    method: str = "auto"
    #: The bits of every layer but the first convolution, instead of those that the budget would choose.
    everywhere: int | None = None


CELLS = (
    Cell("resnet20", "4 bits, bits alone", ts.Bytes(0.5), "dense", everywhere=4),
    Cell("resnet20", "3 bits, bits alone", ts.Bytes(0.5), "dense", everywhere=3),
    Cell("resnet20", "8×, bits alone", ts.Bytes(1 / 8), "dense"),
    Cell("resnet20", "10.5×, bits alone", ts.Bytes(1 / 10.5, bits=BITS), "dense"),
    Cell("resnet20", "14×, MACs 1.8×", ts.Bytes(1 / 14) & ts.Macs(1 / 1.8)),
    Cell("resnet56", "16×, MACs 1.8×", ts.Bytes(1 / 16) & ts.Macs(1 / 1.8)),
    Cell("resnet56", "28×, MACs 3×", ts.Bytes(1 / 28) & ts.Macs(1 / 3)),
    Cell("resnet50", "7.5×, bits alone", ts.Bytes(1 / 7.5), "dense"),
    Cell("resnet50", "10×, MACs 1.4×", ts.Bytes(1 / 10) & ts.Macs(1 / 1.4)),
)


def alone(budget: CostBudget | AllOf) -> CostBudget:
    """The budget of bytes for fewer bits alone, which 2 bits make reachable."""
    share = next(part.share for part in budget.parts if isinstance(part, ts.Bytes))
    return ts.Bytes(share, bits=BITS)


class Bench:
    def __init__(self, root: Path, network: str) -> None:
        if network == "resnet50":
            folder, spec = root / "imagenet", "zoo:resnet50-v1"
            train, test = f"imagefolder:{folder / 'calib'}", f"imagefolder:{folder / 'val'}?shuffle=false"
            size = 16
        else:
            folder, spec = root / "cifar10", f"zoo:{network}-cifar"
            train, test = f"cifar10:{folder}?split=train", f"cifar10:{folder}?split=test"
            size = 100
        self.model = load_model(spec, folder / f"{network}.safetensors").eval()
        self.images = [batch[0] for batch in load_data(train, batch_size=size, samples=SAMPLES[folder.name])]
        self.test = load_data(test, batch_size=250)
        self.stats = ts.calibrate(self.model, self.images)
        self.top1 = self.evaluated(self.model)

    def evaluated(self, model: nn.Module) -> float:
        top1 = ts.evaluate(model, self.test).top1
        assert top1 is not None
        return 100 * top1

    def cell(self, cell: Cell) -> Iterator[dict[str, Any]]:
        """What is known of a cell so far: ours, which takes longest, and then with what it is compared to."""
        plan = ts.plan(self.model, self.stats, budget=cell.budget, method=cell.method, data=self.images)
        if cell.everywhere is not None:
            first, *others = plan
            plan = plan.with_(others, bits=cell.everywhere).with_(first, bits=8)
        small, report = ts.compress(self.model, plan, self.stats, data=self.images)
        assert report.before.macs is not None
        assert report.after.macs is not None
        figures = {
            "before": self.top1,
            "bytes": [plain_bytes(self.model), self.stored(small)],
            "planned bytes": [report.before.bytes, report.after.bytes],
            "folded": len(plan.folding.layers),
            "macs": [report.before.macs, report.after.macs],
            "top1": self.evaluated(small),
            "formats": {entry.name: entry.label for entry in plan.values()},
        }
        print(cell.network, cell.title, figures["bytes"], figures["macs"], figures["top1"], flush=True)
        yield figures
        exact = self.exact(plan)
        figures["nearest"] = self.evaluated(self.nearest(plan, copy.deepcopy(exact)))
        if cell.method != "dense":
            figures["static int8"] = self.static_int8(exact)
            try:
                bits_alone = ts.plan(
                    self.model, self.stats, budget=alone(cell.budget), method="dense", data=self.images
                )
            except ts.errors.InputError as error:
                yield {**figures, "bits alone": None, "why": str(error)}
                return
            figures["bits alone"] = self.evaluated(ts.compress(self.model, bits_alone, self.stats, data=self.images)[0])
        yield figures

    def stored(self, small: nn.Module) -> int:
        """The bytes of the file in an archive."""
        with tempfile.TemporaryDirectory() as place:
            ts.save(small, f"{place}/small")
            return stored_bytes(f"{place}/small")

    def exact(self, plan: Plan) -> nn.Module:
        """The ranks of ``plan`` fitted in sequence, in float32."""
        unrounded = plan.with_([entry.name for entry in plan.compressed], bits="float")
        return ts.compress(self.model, unrounded, self.stats, data=self.images)[0]

    def static_int8(self, exact: nn.Module) -> dict[str, float]:
        """The same ranks, quantized by ONNX Runtime alone: top-1 and bytes of the file."""
        with tempfile.TemporaryDirectory() as place:
            file = Path(place) / "exact.onnx"
            ts.export(exact, file, self.images[0][:1])
            target = static_int8(file, torch.cat(self.images)[:INT8_SAMPLES])
            return {"top1": self.evaluated(OnnxModel(target)), "bytes": target.stat().st_size}

    def int8(self) -> dict[str, Any]:
        """INT8 of the original and of half its multiply-adds: top-1 by the rule for ranges, and times as ratios."""
        plan = ts.plan(self.model, self.stats, budget=ts.Macs(0.5), data=self.images)
        models = {
            "original": self.model,
            "half the MACs": ts.compress(self.model, plan, self.stats, data=self.images)[0],
        }
        figures: dict[str, Any] = {}
        files: dict[str, nn.Module] = {}
        with tempfile.TemporaryDirectory() as place:
            for name, model in models.items():
                exported = Path(place) / f"{name}.onnx"
                ts.export(model, exported, self.images[0][:1])
                files[name] = OnnxModel(exported)
                row: dict[str, Any] = {"float": self.evaluated(files[name])}
                for rule in ("minmax", "auto"):
                    file = Path(place) / f"{name}-{rule}.onnx"
                    made = ts.quantize(model, file, self.images, ranges=rule, max_samples=INT8_SAMPLES, latency=False)
                    files[f"{name}, {rule}"] = OnnxModel(file)
                    row[rule] = self.evaluated(files[f"{name}, {rule}"])
                row["chosen"] = made.ranges
                figures[name] = row
            for batch in (1, 16):
                times = measure_together(files, self.images[0][:batch], rounds=60)
                for name in models:
                    int8 = times[f"{name}, auto"].minimum
                    figures[name][f"time at {batch}"] = {
                        "to float of the same ranks": int8 / times[name].minimum,
                        "to the original": int8 / times["original"].minimum,
                    }
        return figures

    def nearest(self, plan: Plan, small: nn.Module) -> nn.Module:
        """``small``, the ranks of ``plan``, with every weight rounded to the nearest integer."""
        for entry in plan.compressed:
            for stage in small.get_submodule(entry.name).children():
                weight = stage.weight
                assert isinstance(weight, torch.Tensor)
                if entry.bits == 16:
                    stage.weight = nn.Parameter(weight.detach().half().float())
                elif entry.bits is not None:
                    rounded = Rounding(entry.bits, half_scales=True).nearest(weight.detach())
                    grid = Grid(entry.bits, rounded.scales)
                    stage.weight = nn.Parameter(grid.values(rounded.integers, tuple(weight.shape)))
                    set_grid_(stage, grid)
        return small


def static_int8(file: Path, images: torch.Tensor) -> Path:
    """ONNX Runtime's static INT8 of ``file``, one image at a time: QDQ, weights by channel, its usual ranges."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    name = OnnxModel(file).inputs[0]

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self._images: Iterator[dict[str, Any]] = iter({name: image[None].numpy()} for image in images)

        def get_next(self) -> dict[str, Any] | None:
            return next(self._images, None)

    prepared, target = file.with_name("prepared.onnx"), file.with_name("static.onnx")
    quant_pre_process(str(file), str(prepared), skip_symbolic_shape=True)
    quantize_static(
        str(prepared),
        str(target),
        Reader(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        # Seven bits for weights: without VNNI, sums of eight by eight bits saturate.
        reduce_range=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    return target


FORMATS: dict[str, tuple[int, ...]] = {
    "dense": (),
    "spatial-svd": (64,),
    "svd": (48,),
    "tucker2": (48, 48),
    "tensor-train": (48, 64, 48),
    "cp-joint": (102,),
}


def layer_table(root: Path, name: str = "layer3.1.conv1", samples: int = 1_000, bits: int = 4) -> str:
    """Squared relative errors of one layer of ResNet-20: of its ranks, and what rounding adds to them."""
    cifar = root / "cifar10"
    model = load_model("zoo:resnet20-cifar", cifar / "resnet20.safetensors").eval()
    images = [batch[0] for batch in load_data(f"cifar10:{cifar}?split=train", batch_size=100, samples=samples)]
    stats = ts.calibrate(model, images, layers=[name])[name]
    layer = model.get_submodule(name)
    geometry, norm = Geometry.of(layer), norm_of("centred")
    metric = norm.targets(geometry, stats)[0]
    assert isinstance(metric, Metric)
    (kernel,) = kernels_of(layer)
    lines = ["| format | ranks alone | 4 bits add | to nearest, they add |", "|---|---|---|---|"]
    for key, ranks in FORMATS.items():
        method = method_of(key)
        treatment = Treatment(geometry=geometry, method=method, norm=norm, format=method.format(ranks))
        modules = solve(treatment, layer, stats).modules
        errors = [solve(replace(treatment, bits=width), layer, stats).error or 0.0 for width in (None, bits)]
        for stage in modules:
            assert isinstance(stage.weight, torch.Tensor)
            stage.weight = nn.Parameter(Rounding(bits).nearest(stage.weight.detach()).to_dense())
        (factors,) = from_modules(modules, treatment.format, geometry)
        nearest = metric.relative_error(kernel, factors.to_dense())
        exact, fitted = (error**2 for error in errors)
        lines.append(f"| {treatment.label} | {exact:.4f} | {fitted - exact:.4f} | {nearest**2 - exact:.4f} |")
    return "\n".join(lines)


def table(results: dict[str, Any]) -> str:
    """The tables of docs/bytes.md: cells, then INT8 files."""
    lines = [
        "| network (top-1) | bytes | MACs | ranks and bits | to nearest | ranks, ONNX Runtime's INT8 | bits alone |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, cells in results["networks"].items():
        for title, cell in cells.items():
            rate, macs = (cell[key][0] / cell[key][1] for key in ("bytes", "macs"))
            alone, static = cell.get("bits alone"), cell.get("static int8")
            nearest = f"{cell['nearest']:.2f}" if "nearest" in cell else "–"
            if title.endswith("bits alone"):
                row = ["–", nearest, "–", f"**{cell['top1']:.2f}**"]
            else:
                theirs = "–" if static is None else f"{static['top1']:.2f} at {cell['bytes'][0] / static['bytes']:.1f}×"
                ours = [f"**{cell['top1']:.2f}**", nearest]
                row = [*ours, theirs, "–" if alone is None else f"{alone:.2f}"]
            lines.append(f"| {name} ({cell['before']:.2f}) | {rate:.1f}× | {macs:.2f}× | {' | '.join(row)} |")
    files = results.get("int8", {})
    if files:
        lines += [
            "",
            "| network | float | INT8, all values | INT8, chosen | time ÷ float, same ranks | time ÷ original |",
            "|---|---|---|---|---|---|",
        ]
    for name, rows in files.items():
        for title, row in rows.items():
            once = row["time at 1"]
            chosen = f"{row['auto']:.2f} ({row['chosen']})"
            times = [f"{once[key]:.2f}" for key in ("to float of the same ranks", "to the original")]
            figures = [f"{row['float']:.2f}", f"{row['minmax']:.2f}", chosen, *times]
            lines.append(f"| {name}, {title} | {' | '.join(figures)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=sorted({cell.network for cell in CELLS}))
    parser.add_argument("--cells", nargs="*", help="parts of titles")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--layer", action="store_true")
    parser.add_argument("--int8", action="store_true")
    arguments = parser.parse_args()
    file = machine.RESULTS / f"{NAME}.json"
    if arguments.table:
        print(table(json.loads(file.read_text())))
        return
    torch.set_num_threads(arguments.threads)
    root = Path(os.environ["TENSIGMA_DATA"])
    if arguments.layer:
        print(layer_table(root))
        return
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"networks": {}}
    results.pop("machine", None)
    results["samples"] = SAMPLES
    benches: dict[str, Bench] = {}

    def bench(network: str) -> Bench:
        nonlocal benches
        if network not in benches:
            benches = {network: Bench(root, network)}
        return benches[network]

    if arguments.int8:
        for network in dict.fromkeys(cell.network for cell in CELLS):
            if arguments.only in (None, network) and network not in results.get("int8", {}):
                results.setdefault("int8", {})[network] = bench(network).int8()
                machine.write(NAME, results)
        return
    for cell in CELLS:
        wanted = arguments.only in (None, cell.network)
        wanted = wanted and (not arguments.cells or any(part in cell.title for part in arguments.cells))
        # A cell that was interrupted has no comparisons, and is run again.
        if wanted and "nearest" not in results["networks"].get(cell.network, {}).get(cell.title, {}):
            for figures in bench(cell.network).cell(cell):
                results["networks"].setdefault(cell.network, {})[cell.title] = figures
                machine.write(NAME, results)


if __name__ == "__main__":
    main()

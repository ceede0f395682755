"""Ranks and bits from one budget: top-1 of trained networks at a few shares of their bytes, without labels.

    TENSIGMA_DATA=… python benchmarks/bytes.py [--only resnet20] [--cells "8×" "14×"] [--threads 1]

Each cell is planned and fitted on unlabelled training images and evaluated on the test images, beside two others: the
same ranks fitted without rounding and then rounded to nearest, and fewer bits alone at the same bytes. Writes
results/benchmark_bytes.json after every cell and leaves out those that are there; ``--table`` prints the table of
docs/bytes.md, ``--layer`` measures what rounding adds to the error of one layer in every format.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import machine
import torch
from torch import nn

import tensigma as ts
from tensigma.layers import Geometry, Grid, from_modules, kernels_of, set_grid_
from tensigma.linalg import Metric, Rounding
from tensigma.planning import AllOf, CostBudget, Plan
from tensigma.solving import Treatment, method_of, norm_of, solve
from tensigma.zoo import load_data, load_model

NAME = "benchmark_bytes"
SAMPLES = 2_000
BITS = (2, 3, 4, 8, 16)


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
)


def alone(budget: CostBudget | AllOf) -> CostBudget:
    """The budget of bytes for fewer bits alone, which 2 bits make reachable."""
    share = next(part.share for part in budget.parts if isinstance(part, ts.Bytes))
    return ts.Bytes(share, bits=BITS)


class Bench:
    def __init__(self, root: Path, network: str) -> None:
        cifar = root / "cifar10"
        self.model = load_model(f"zoo:{network}-cifar", cifar / f"{network}.safetensors").eval()
        self.images = [batch[0] for batch in load_data(f"cifar10:{cifar}?split=train", batch_size=100, samples=SAMPLES)]
        self.test = load_data(f"cifar10:{cifar}?split=test", batch_size=250)
        self.stats = ts.calibrate(self.model, self.images)
        self.top1 = self.evaluated(self.model)

    def evaluated(self, model: nn.Module) -> float:
        top1 = ts.evaluate(model, self.test).top1
        assert top1 is not None
        return 100 * top1

    def cell(self, cell: Cell) -> dict[str, Any]:
        plan = ts.plan(self.model, self.stats, budget=cell.budget, method=cell.method, data=self.images)
        if cell.everywhere is not None:
            first, *others = plan
            plan = plan.with_(others, bits=cell.everywhere).with_(first, bits=8)
        small, report = ts.compress(self.model, plan, self.stats, data=self.images)
        assert report.before.macs is not None
        assert report.after.macs is not None
        figures = {
            "before": self.top1,
            "bytes": [report.before.bytes, report.after.bytes],
            "macs": [report.before.macs, report.after.macs],
            "top1": self.evaluated(small),
            "formats": {entry.name: entry.label for entry in plan.values()},
            "nearest": self.evaluated(self.nearest(plan)),
        }
        if cell.method != "dense":
            try:
                bits_alone = ts.plan(
                    self.model, self.stats, budget=alone(cell.budget), method="dense", data=self.images
                )
            except ts.errors.InputError as error:
                return {**figures, "bits alone": None, "why": str(error)}
            figures["bits alone"] = self.evaluated(ts.compress(self.model, bits_alone, self.stats, data=self.images)[0])
        return figures

    def nearest(self, plan: Plan) -> nn.Module:
        """The ranks of ``plan`` fitted in sequence, and every weight then rounded to the nearest integer."""
        exact = plan.with_([entry.name for entry in plan.compressed], bits="float")
        small = ts.compress(self.model, exact, self.stats, data=self.images)[0]
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
    lines = [
        "| network (top-1) | bytes | MACs | ranks and bits | the same, to nearest | bits alone |",
        "|---|---|---|---|---|---|",
    ]
    for name, cells in results["networks"].items():
        for title, cell in cells.items():
            rate, macs = (cell[key][0] / cell[key][1] for key in ("bytes", "macs"))
            alone = cell.get("bits alone")
            if title.endswith("bits alone"):
                row = ["–", f"{cell['nearest']:.2f}", f"**{cell['top1']:.2f}**"]
            else:
                row = [f"**{cell['top1']:.2f}**", f"{cell['nearest']:.2f}", "–" if alone is None else f"{alone:.2f}"]
            lines.append(f"| {name} ({cell['before']:.2f}) | {rate:.1f}× | {macs:.2f}× | {' | '.join(row)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=sorted({cell.network for cell in CELLS}))
    parser.add_argument("--cells", nargs="*", help="parts of titles")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--layer", action="store_true")
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
    benches: dict[str, Bench] = {}
    for cell in CELLS:
        known = json.loads(file.read_text())["networks"] if file.exists() else {}
        wanted = arguments.only in (None, cell.network)
        wanted = wanted and (not arguments.cells or any(part in cell.title for part in arguments.cells))
        if not wanted or cell.title in known.get(cell.network, {}):
            continue
        if cell.network not in benches:
            benches = {cell.network: Bench(root, cell.network)}
        figures = benches[cell.network].cell(cell)
        known = json.loads(file.read_text())["networks"] if file.exists() else {}
        known.setdefault(cell.network, {})[cell.title] = figures
        machine.write(NAME, {"samples": SAMPLES, "networks": known})


if __name__ == "__main__":
    main()

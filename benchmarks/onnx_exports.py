"""torchvision's networks as files of both of PyTorch's ONNX exporters: read, decomposed at full rank, written again.

    python benchmarks/onnx_exports.py [--only resnet18 …] [--out FILE]

Weights are random and images small: what is measured is whether every layer is found, and how far the answers of the
written file are from those of the file that came. Writes results/benchmark_onnx_exports.json. Target: 1e-4 of the
largest value.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch
from torch import Tensor, nn

import tensigma as ts
from tensigma.graphs import OnnxModel

NAME = "benchmark_onnx_exports"
SIZE = 64


def small_transformer() -> nn.Module:
    """torchvision's vision transformer with few and narrow blocks."""
    ts.zoo.load_model("torchvision:squeezenet1_1")  # makes torchvision importable beside a PyTorch without CUDA
    from torchvision.models.vision_transformer import VisionTransformer

    model = VisionTransformer(
        image_size=SIZE, patch_size=16, num_layers=3, num_heads=4, hidden_dim=96, mlp_dim=192, num_classes=10
    )
    # It begins with zeros, and all answers would be zero.
    nn.init.normal_(model.heads.head.weight)
    return model.eval()


def by_name(name: str) -> Callable[[], nn.Module]:
    return lambda: ts.zoo.load_model(f"torchvision:{name}").eval()


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    name: by_name(name)
    for name in (
        "squeezenet1_1",
        "mobilenet_v3_small",
        "shufflenet_v2_x0_5",
        "resnet18",
        "efficientnet_b0",
        "densenet121",
    )
} | {"vision_transformer": small_transformer}


def network(name: str) -> nn.Module:
    """A network with random weights that are the same in every run."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return NETWORKS[name]()


def export(model: nn.Module, file: Path, exporter: str) -> None:
    """Write a file with a batch axis of any size, by the exporter ``"dynamo"`` or ``"torchscript"``."""
    x = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(2))
    names: dict[str, Any] = {"input_names": ["input"], "output_names": ["output"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exporter == "dynamo":
            shapes = ({0: torch.export.Dim("n", min=1, max=64)},)
            torch.onnx.export(model, (x,), file, dynamo=True, dynamic_shapes=shapes, verbose=False, **names)
        else:
            axes = {"input": {0: "n"}, "output": {0: "n"}}
            torch.onnx.export(model, (x,), file, dynamo=False, dynamic_axes=axes, **names)


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference relative to the largest value of ``other``."""
    return float((one - other).abs().max() / other.abs().max())


def at_full_rank(model: nn.Module, exporter: str, folder: Path) -> dict[str, Any]:
    """What becomes of one file."""
    file, again = folder / "model.onnx", folder / "again.onnx"
    export(model, file, exporter)
    read = ts.load_onnx(file)
    x = torch.randn(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    recipe = ts.Recipe(ranks=ts.Ranks({"*": 10**6}), norm="frobenius", method="svd", skip=(), saving="none")
    full, report = ts.compress(read, ts.plan(read, recipe=recipe))
    ts.export(full, again, x)
    # Not around the export: without gradients, attention becomes one operator that the older exporter does not know.
    with torch.inference_mode():
        expected, as_read, at_full, in_pytorch = (
            module(x) for module in (OnnxModel(file), read, OnnxModel(again), model)
        )
    return {
        "layers": len(read.layers),
        "layers_in_pytorch": len(ts.layers.find_layers(model)),
        "left_alone": len(read.left_alone),
        "decomposed": len(report.compressed),
        "difference_as_read": difference(as_read, expected),
        "difference_at_full_rank": difference(at_full, expected),
        "difference_from_pytorch": difference(expected, in_pytorch),
    }


def table(networks: dict[str, Any]) -> str:
    """The results as a table of the documentation."""
    rows = ["| network | exporter | layers | decomposed | at full rank |", "|---|---|---|---|---|"]
    for name, exporters in networks.items():
        for exporter, facts in exporters.items():
            cells = [f"`{name}`", exporter, str(facts["layers"]), str(facts["decomposed"])]
            rows.append(f"| {' | '.join([*cells, format(facts['difference_at_full_rank'], '.0e')])} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=NETWORKS, default=list(NETWORKS), help="networks to measure")
    parser.add_argument("--table", action="store_true", help="print the table of the results and measure nothing")
    options = parser.parse_args()
    former = machine.RESULTS / f"{NAME}.json"
    networks = json.loads(former.read_text())["networks"] if former.exists() else {}
    if options.table:
        print(table(networks))
        return
    torch.set_num_threads(1)
    for name in options.only:
        model = network(name)
        for exporter in ("dynamo", "torchscript"):
            start = time.process_time()
            with tempfile.TemporaryDirectory() as folder:
                facts = at_full_rank(model, exporter, Path(folder))
            networks = json.loads(former.read_text())["networks"] if former.exists() else {}
            networks.setdefault(name, {})[exporter] = facts
            print(name, exporter, facts, f"{time.process_time() - start:.0f} s", flush=True)
            machine.write(NAME, {"task": "ONNX files of both exporters at full rank", "networks": networks})


if __name__ == "__main__":
    main()

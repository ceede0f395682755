"""How far fine-tuning with few labels goes where others have published results with a whole training set.

    TENSIGMA_DATA=… python benchmarks/finetuned.py [--only resnet56] [--threads 1]

Each cell is compressed on 2,000 unlabelled images of CIFAR-10, refined on 30,000 samples towards the original's
answers, and then trained with labels: 9,000 images, mirrored and moved by up to 3 pixels, for up to 6 epochs at two
learning rates; the best epoch is chosen on 1,000 other training images. Top-1 is on the 5,000 test images. Writes
results/benchmark_finetuned.json after every cell and leaves out those that are there; docs/peers.md shows it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import torch
from torch import Tensor, nn

import tensigma as ts
from tensigma.compression import blocks_around, refine_
from tensigma.planning import CostBudget
from tensigma.zoo import load_data, load_model

NAME = "benchmark_finetuned"
UNLABELLED, PASSES, EPOCHS, HELD_OUT, BATCH, SHIFT = 2_000, 30_000, 6, 1_000, 50, 3
RATES = (1e-3, 1e-4)


@dataclass(frozen=True)
class Cell:
    network: str
    saving: str
    budget: CostBudget


CELLS = (
    Cell("resnet56", "2.57 times fewer MACs", ts.Macs(1 / 2.57)),
    Cell("resnet56", "75 % fewer parameters", ts.Params(0.25)),
    Cell("resnet56", "91 % fewer parameters", ts.Params(0.09)),
    Cell("resnet20", "72 % fewer MACs", ts.Macs(0.28)),
)


class Moved:
    """Batches in a new order in each round, mirrored at random and moved by up to ``SHIFT`` pixels."""

    def __init__(self, images: Tensor, labels: Tensor | None = None) -> None:
        self._images, self._labels = images, labels
        self._generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[Any]:
        for chosen in torch.randperm(len(self._images), generator=self._generator).split(BATCH):
            x = self.moved(self._images[chosen])
            yield x if self._labels is None else (x, self._labels[chosen])

    def moved(self, x: Tensor) -> Tensor:
        if torch.rand((), generator=self._generator) < 0.5:
            x = x.flip(-1)
        down, right = torch.randint(0, 2 * SHIFT + 1, (2,), generator=self._generator).tolist()
        padded = nn.functional.pad(x, [SHIFT] * 4)
        return padded[..., down : down + x.shape[-2], right : right + x.shape[-1]].contiguous()


def top1(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.inference_mode():
        answers = torch.cat([model(part).argmax(1) for part in images.split(250)])
    return round(100 * float((answers == labels).double().mean()), 2)


def whole(spec: str) -> tuple[Tensor, Tensor]:
    batches = list(load_data(spec, batch_size=250))
    return torch.cat([batch[0] for batch in batches]), torch.cat([batch[1] for batch in batches])


def run(cell: Cell, data: Path) -> dict[str, Any]:
    start = time.process_time()
    model = load_model(f"zoo:{cell.network}-cifar", data / f"cifar10/{cell.network}.safetensors").eval()
    images, labels = whole(f"cifar10:{data}/cifar10")
    test = whole(f"cifar10:{data}/cifar10?split=test&shuffle=false")
    shown, held_out = images[:-HELD_OUT], (images[-HELD_OUT:], labels[-HELD_OUT:])
    small, report = ts.compress(model, list(shown[:UNLABELLED].split(BATCH)), budget=cell.budget)
    found: dict[str, Any] = {
        "network": cell.network,
        "saving": cell.saving,
        "before": top1(model, *test),
        "closed": top1(small, *test),
        "params": report.after.params / report.before.params,
        "macs": (report.after.macs or 0) / (report.before.macs or 1),
    }
    blocks = blocks_around(model, [layer.name for layer in report.compressed])
    refine_(small, model, Moved(shown), ts.Refine(passes=PASSES), blocks=blocks)
    found["refined"] = top1(small, *test)
    for parameter in small.parameters():
        parameter.requires_grad_(True)
    tuned, history = ts.finetune(
        small,
        Moved(shown, labels[:-HELD_OUT]),
        validation=list(zip(held_out[0].split(250), held_out[1].split(250), strict=True)),
        epochs=EPOCHS,
        learning_rates=RATES,
        eliminate=True,
    )
    found |= {"finetuned": top1(tuned, *test), "labels": len(images), "learning_rate": history.learning_rate}
    return found | {"cpu_seconds": round(time.process_time() - start)}


def cells() -> list[dict[str, Any]]:
    return machine.read(NAME).get("cells", [])


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tuning with few labels beside published results.")
    parser.add_argument("--only", default="", help="networks whose name begins so")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data", type=Path, default=os.environ.get("TENSIGMA_DATA"), help="models and images")
    options = parser.parse_args()
    if options.data is None:
        parser.error("name the folder of models and images: --data DIR or TENSIGMA_DATA")
    torch.set_num_threads(options.threads)
    for cell in CELLS:
        known = {(each["network"], each["saving"]) for each in cells()}
        if cell.network.startswith(options.only) and (cell.network, cell.saving) not in known:
            found = run(cell, Path(options.data))
            machine.write(NAME, {"cells": [*cells(), found]})
            print(found, flush=True)


if __name__ == "__main__":
    main()

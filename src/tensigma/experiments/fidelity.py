"""Does the order of the paper's results hold on real models? Norms and methods side by side at the paper's ranks.

    python -m tensigma.experiments.fidelity --data DIR --out results/fidelity.json
    python -m tensigma.experiments.fidelity --out results/fidelity.json --table docs/results.md

``DIR`` holds ``cifar10/`` and ``imagenet/`` with the weights and images named in :data:`STUDIES`. Every finished cell
is written at once, so a killed run goes on where it stopped. Which images a cell got right is kept, bit by bit, so that
two cells can be compared image by image.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tensigma.calibration import calibrate
from tensigma.errors import InputError
from tensigma.experiments.hits import advantage, pack_hits
from tensigma.pipeline import compress
from tensigma.planning import VBMF, plan
from tensigma.zoo import load_data, load_model

logger = logging.getLogger(__name__)

TUCKER2_NORMS = ("frobenius", "activation", "fisher", "sigma", "centred")
CP_NORMS = ("frobenius", "sigma", "centred")
SEED = 0


@dataclass(frozen=True)
class Cell:
    """One compressed model."""

    method: str
    alpha: float
    norm: str

    @property
    def key(self) -> str:
        return f"{self.method}/{self.alpha:g}/{self.norm}"


@dataclass(frozen=True)
class Study:
    """One model with its data and the ranks it is compressed to. Layers: kernels larger than 1, first one skipped."""

    model: str
    weights: str
    calibration: str
    evaluation: str
    tucker2: tuple[float, ...]
    cp: tuple[float, ...]

    def cells(self) -> Iterator[Cell]:
        """Both methods at their first ratio, then at the next: a run cut short has something of each."""
        for tucker2, cp in zip_longest(self.tucker2, self.cp):
            if tucker2 is not None:
                yield from (Cell("tucker2", tucker2, norm) for norm in TUCKER2_NORMS)
            if cp is not None:
                yield from (Cell("cp", cp, norm) for norm in CP_NORMS)
                yield Cell("deflation", cp, "sigma")


def _cifar(name: str, tucker2: tuple[float, ...], cp: tuple[float, ...]) -> Study:
    return Study(
        model=f"zoo:{name}-cifar",
        weights=f"cifar10/{name}.safetensors",
        calibration="cifar10:{data}/cifar10?samples=2000&seed=0",
        evaluation="cifar10:{data}/cifar10?split=test&shuffle=false",
        tucker2=tucker2,
        cp=cp,
    )


STUDIES = {
    "resnet20": _cifar("resnet20", (0.5, 0.7, 0.9), (0.8, 0.9)),
    "resnet56": _cifar("resnet56", (0.5, 0.7), (0.8, 0.9)),
    "squeezenet": Study(
        model="zoo:squeezenet1_1",
        weights="imagenet/squeezenet1_1.safetensors",
        calibration="imagefolder:{data}/imagenet/calib?size=224",
        evaluation="imagefolder:{data}/imagenet/val?size=224&shuffle=false",
        tucker2=(0.5, 0.7),
        cp=(0.8, 0.9),
    ),
}


def hits(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[bool]:
    """For each image, whether the label scores highest."""
    with torch.inference_mode():
        return [bool(hit) for x, y in batches for hit in model(x).argmax(1) == y]


def run(study: Study, data: Path, found: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
    """Complete ``found`` (key → cell) cell by cell; yields it after each."""
    model = load_model(study.model, data / study.weights)
    cells = [cell for cell in study.cells() if cell.key not in found]
    if not cells:
        return
    batches = [(x, y) for x, y in load_data(study.evaluation.format(data=data), batch_size=100) if y is not None]
    if "original" not in found:
        right = hits(model, batches)
        found["original"] = {"rate": 1.0, "top1": sum(right) / len(right), "right": pack_hits(right)}
        yield found
    stats = calibrate(model, load_data(study.calibration.format(data=data)), fisher="model", seed=SEED)
    for cell in cells:
        began = time.perf_counter()
        chosen = plan(
            model, stats, ranks=VBMF(cell.alpha), method=cell.method, norm=cell.norm, layers="spatial", saving="none"
        )
        small, report = compress(model, chosen, stats)
        seconds = time.perf_counter() - began
        right = hits(small, batches)
        found[cell.key] = {
            "rate": report.before.params / report.after.params,
            "top1": sum(right) / len(right),
            "seconds": round(seconds, 1),
            "right": pack_hits(right),
        }
        logger.info("%s %s: %.4f at %.2f", study.model, cell.key, found[cell.key]["top1"], found[cell.key]["rate"])
        yield found


_INTRODUCTION = """# Norms and methods on real models

Top-1 accuracy in per cent without any retraining, at the ranks of the paper's rule (VBMF with ratio α, kernels larger
than 1×1, first convolution left dense). Σ is the paper's norm, Σ_c the centred one that is the default here, FW-LRA and
AG-LRA the data-aware baselines of the paper. In brackets: the points by which Σ is ahead on the same images, with the
95 % interval of a paired bootstrap. Rate: original ÷ compressed parameters of the whole model under Σ; Σ_c adds biases
where a layer had none and is counted with them.

Models and images: CIFAR-10 ResNet-20 and ResNet-56 on 5,000 test images, Σ from 2,000 training images; SqueezeNet 1.1
on 1,000 ImageNet validation images, Σ from 1,000 others. They stand in for the paper's ResNet-18, ResNet-50 and
GoogLeNet, which are wider.

Regenerate with `python -m tensigma.experiments.fidelity --data DIR --out results/fidelity.json`, and this page from the
JSON with `--table`."""


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    names = {"frobenius": "Frobenius", "activation": "AG-LRA", "fisher": "FW-LRA", "sigma": "Σ", "centred": "Σ_c"}
    lines = [_INTRODUCTION]
    for name, study in STUDIES.items():
        cells = results["studies"].get(name, {})
        if "original" not in cells:
            continue
        lines += [f"\n## {name}: {100 * cells['original']['top1']:.1f} % before compression", ""]
        columns: dict[str, list[tuple[str, str]]] = {
            "tucker2": [("tucker2", norm) for norm in TUCKER2_NORMS],
            "cp": [("deflation", "sigma"), *(("cp", norm) for norm in CP_NORMS)],
        }
        for method, alphas in (("tucker2", study.tucker2), ("cp", study.cp)):
            heads = ["deflation, Σ" if m == "deflation" else names[norm] for m, norm in columns[method]]
            lines += [f"| {'Tucker-2' if method == 'tucker2' else 'CP'}, α | rate | " + " | ".join(heads) + " |"]
            lines += ["|---" * (len(heads) + 2) + "|"]
            for alpha in alphas:
                sigma = cells.get(f"{method}/{alpha:g}/sigma")
                if sigma is None:
                    continue
                row = [f"{alpha:g}", f"{sigma['rate']:.2f}"]
                row += [_entry(cells.get(f"{m}/{alpha:g}/{norm}"), sigma) for m, norm in columns[method]]
                lines.append("| " + " | ".join(row) + " |")
            lines.append("")
        lines.pop()
    return "\n".join(lines).rstrip() + "\n"


def _entry(cell: dict[str, Any] | None, sigma: dict[str, Any]) -> str:
    if cell is None:
        return "–"
    if cell is sigma:
        return f"**{100 * cell['top1']:.1f}**"
    points, low, high = advantage(sigma["right"], cell["right"])
    return f"{100 * cell['top1']:.1f} ({points:+.1f}: {low:+.1f} to {high:+.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with cifar10/ and imagenet/")
    parser.add_argument("--out", type=Path, default=Path("results/fidelity.json"), help="results, kept up to date")
    parser.add_argument("--only", choices=list(STUDIES), action="append", help="study to run, instead of all")
    parser.add_argument("--table", type=Path, help="write the table to this Markdown file and run nothing")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    results: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"studies": {}}
    if arguments.table:
        arguments.table.write_text(table(results))
        return
    if arguments.data is None:
        raise InputError("--data names the folder of models and images, or --table FILE writes what is there already")
    results.update(seed=SEED, versions={name: version(name) for name in ("tensigma", "torch", "numpy")})
    results["machine"] = {"processor": platform.machine(), "cpus": os.cpu_count(), "threads": torch.get_num_threads()}
    for name in arguments.only or STUDIES:
        for found in run(STUDIES[name], arguments.data, results["studies"].setdefault(name, {})):
            results["studies"][name] = found
            partial = arguments.out.with_suffix(".part")
            partial.write_text(json.dumps(results, indent=1) + "\n")
            partial.replace(arguments.out)


if __name__ == "__main__":
    main()

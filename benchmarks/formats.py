"""Which formats ``method="auto"`` chooses on trained networks, and what spatial SVD and tensor train add to the others.

    TENSIGMA_DATA=… python benchmarks/formats.py [--only resnet20] [--threads 1]

Every network is calibrated on few images and planned for five budgets, each time with all formats and with all but
spatial SVD and tensor train. Errors are those that planning expects, before anything is solved. ResNet-20, ResNet-18
and SqueezeNet are then compressed by both plans of each budget, layers fitted in sequence, and evaluated on test
images. Writes results/benchmark_formats.json after every network and continues where it stopped; ``--only`` measures
one again. ``--table`` prints the tables of docs/formats.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import os
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import machine
import torch
from safetensors.torch import load_file
from torch import nn

import tensigma as ts
from tensigma import solving
from tensigma.errors import InputError
from tensigma.planning import CompressedEntry, CostBudget, ParetoFront
from tensigma.zoo import Data, load_data, load_model

Measure = Literal["params", "macs"]
NEW = ("spatial-svd", "tensor-train")
FITTED_ON = 500
SEED = 0
NAME = "benchmark_formats"
WAYS = ("with", "without")
# "auto" leaves these formats out where a layer is wide; here they are considered everywhere, to see what that costs.
for name in NEW:
    solving.methods._METHODS[name] = replace(solving.METHODS[name], widest_in_auto=None)
RUNTIMES: tuple[Literal["onnxruntime", "eager"], ...] = ("onnxruntime", "eager")
ANSWERS = ("fitted on", "test images", "top-1 before", "with", "without", "agreement with", "without")
#: Columns of the table, and the methods that each counts.
COLUMNS = {
    "spatial SVD": ["spatial-svd"],
    "tensor train": ["tensor-train"],
    "Tucker-2": ["tucker2"],
    "CP": ["cp", "cp-joint"],
    "SVD": ["svd"],
    "dense": ["dense"],
}


@dataclass(frozen=True)
class Network:
    title: str
    load: Callable[[Path], nn.Module]
    images: str
    calibration: int
    batch_size: int
    #: Test images, where the compressed network is evaluated too.
    test: str | None = None


def cifar(name: str) -> Callable[[Path], nn.Module]:
    return lambda root: load_model(f"zoo:{name}-cifar", root / "cifar10" / f"{name}.safetensors")


def squeezenet(root: Path) -> nn.Module:
    return load_model("zoo:squeezenet1_1", root / "imagenet" / "squeezenet1_1.safetensors")


def resnet50(root: Path) -> nn.Module:
    """The weights are of version 1, which has the stride of a stage in its first pointwise convolution."""
    model: Any = load_model("torchvision:resnet50")
    for stage in (model.layer2, model.layer3, model.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    model.load_state_dict(load_file(root / "imagenet" / "resnet50.safetensors"))
    return model


CIFAR_TRAIN, CIFAR_TEST = "cifar10:{root}/cifar10?split=train", "cifar10:{root}/cifar10?split=test"
CALIB, VAL = "imagefolder:{root}/imagenet/calib", "imagefolder:{root}/imagenet/val?shuffle=false"
NETWORKS = {
    "resnet20": Network("ResNet-20, CIFAR-10", cifar("resnet20"), CIFAR_TRAIN, 256, 64, CIFAR_TEST),
    "resnet56": Network("ResNet-56, CIFAR-10", cifar("resnet56"), CIFAR_TRAIN, 256, 64),
    "resnet18w32": Network("ResNet-18 of width 32, CIFAR-10", cifar("resnet18w32"), CIFAR_TRAIN, 256, 64, CIFAR_TEST),
    "squeezenet": Network("SqueezeNet 1.1, ImageNet", squeezenet, CALIB, 64, 16, VAL),
    "resnet50": Network("ResNet-50, ImageNet", resnet50, CALIB, 32, 8),
}


def budgets(cache: str) -> list[CostBudget]:
    times = [ts.Latency(0.6, runtime=runtime, cache=cache) for runtime in RUNTIMES]
    return [ts.Params(0.5), ts.Params(0.2), ts.Macs(0.5), *times]


def named(budget: CostBudget) -> str:
    runtime = f', runtime="{budget.runtime}"' if isinstance(budget, ts.Latency) else ""
    return f"{type(budget).__name__}({budget.share:g}{runtime})"


def measure(network: Network, root: Path) -> dict[str, Any]:
    model = network.load(root).eval()
    images = load_data(network.images.format(root=root), batch_size=network.batch_size, seed=SEED)
    assert isinstance(images, Data)
    stats = ts.calibrate(model, images.take(network.calibration))
    start = time.perf_counter()
    every = ts.plan(model, stats, budget=ts.Params(0.5), weights=None).front()
    assert isinstance(every, ParetoFront)
    found: dict[str, Any] = {
        "title": network.title,
        "calibration_images": network.calibration,
        "layers": len(every.curves),
        "layers_with_taps": sum(_may_be_new(options) for options in every.curves.values()),
        "curve_seconds": round(time.perf_counter() - start, 1),
        "halved": {measure: halved(every, measure) for measure in ("params", "macs")},
        "budgets": {},
    }
    fronts = dict(zip(WAYS, (every, without_new(every)), strict=True))
    fitting = images.take(FITTED_ON)
    with tempfile.TemporaryDirectory() as cache:
        for budget in budgets(cache):
            plans = {way: planned(front, budget) for way, front in fronts.items()}
            row = compare(every, plans)
            if network.test is not None:
                test = load_data(network.test.format(root=root), batch_size=100)
                row["models"] = {"with": judged(model, plans["with"], stats, fitting, test)}
                same = plans["with"] == plans["without"]
                row["models"]["without"] = (
                    row["models"]["with"] if same else judged(model, plans["without"], stats, fitting, test)
                )
            found["budgets"][named(budget)] = row
            print(network.title, budget, json.dumps(row)[:600], flush=True)
    return found


def _may_be_new(options: Sequence[Any]) -> bool:
    return any(option.method is not None and option.method.name in NEW for option in options)


def halved(front: ParetoFront, measure: Measure) -> dict[str, float]:
    """Median over layers with taps of the expected error where each layer keeps half of its parameters or MACs."""
    errors: dict[str, list[float]] = {}
    for options in filter(_may_be_new, front.curves.values()):
        limit = options[0].price(measure) / 2
        for column, names in COLUMNS.items():
            suited = [o.error for o in options if o.method and o.method.name in names and o.price(measure) <= limit]
            if suited:
                errors.setdefault(column, []).append(min(suited))
    return {column: statistics.median(values) for column, values in errors.items()}


def without_new(front: ParetoFront) -> ParetoFront:
    """The front that planning finds where the new formats are not in ``auto``: curves do not depend on each other."""
    other = copy.copy(front)
    other.curves = {
        name: [option for option in options if option.method is None or option.method.name not in NEW]
        for name, options in front.curves.items()
    }
    other._timed = {}
    return other


def planned(front: ParetoFront, budget: CostBudget) -> ts.Plan:
    try:
        return front.plan(budget)
    except InputError:
        # The smallest that can be reached, where that is more than the budget.
        return front.plan(replace(budget, share=math.ceil(1000 * front.trade(budget)[0].share) / 1000))


def compare(front: ParetoFront, plans: Mapping[str, ts.Plan]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for way, plan in plans.items():
        entries = [plan[name] for name in front.curves]
        row[way] = {
            "formats": dict(Counter(label(entry) for entry in entries).most_common()),
            "rms_error": math.sqrt(sum((entry.error or 0.0) ** 2 for entry in entries) / len(entries)),
            "params_share": plan.after.params / plan.before.params,
            "macs_share": plan.after.macs / plan.before.macs,
        }
        if "latency" in plan.notes:
            before, after = plan.notes["latency"]["seconds"]
            row[way] |= {"time_share": after / before, "runtime": plan.notes["latency"].get("runtime")}
    chosen = [name for name in front.curves if label(plans["with"][name]) in NEW]
    row["chosen"] = {name: [plans["with"][name].label, plans["without"][name].label] for name in chosen}
    return row


def label(entry: Any) -> str:
    return entry.method.name if isinstance(entry, CompressedEntry) else "dense"


def judged(model: nn.Module, plan: ts.Plan, stats: ts.Calibration, images: Any, test: Any) -> dict[str, Any]:
    with fitted_samples() as limits:
        small, _ = ts.compress(model, plan, stats, data=images, sequential=True)
    evaluation = ts.evaluate(small, test, original=model)
    assert evaluation.original is not None
    return {
        "fitted_on": min([FITTED_ON, *limits]),
        "test_images": evaluation.samples,
        "top1_original": evaluation.original.top1,
        "top1": evaluation.top1,
        "agreement": evaluation.agreement,
    }


@contextmanager
def fitted_samples() -> Iterator[list[int]]:
    """How many samples fitting in sequence took, where memory allowed fewer than there were; known from its log."""
    found: list[int] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.extend(record.args[:1] if "samples" in record.msg else ())  # type: ignore
    logger = logging.getLogger("tensigma.compression.sequential")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=NETWORKS, action="append", help="measure these again")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--table", action="store_true", help="print the tables of the page from the stored results")
    arguments = parser.parse_args()
    file = machine.RESULTS / f"{NAME}.json"
    found: dict[str, Any] = json.loads(file.read_text())["networks"] if file.exists() else {}
    if arguments.table:
        print(tables(found))
        return
    torch.manual_seed(SEED)
    torch.set_num_threads(arguments.threads)
    root = Path(os.environ["TENSIGMA_DATA"])
    for name in arguments.only or [name for name in NETWORKS if name not in found]:
        found[name] = measure(NETWORKS[name], root)
        ordered = {key: found[key] for key in NETWORKS if key in found}
        machine.write(NAME, {"seed": SEED, "new": NEW, "networks": ordered})


def tables(found: Mapping[str, Any]) -> str:
    """The tables of docs/formats.md: choices, errors of each format at half size, and the compressed networks."""
    choices = [("network", "budget", *COLUMNS, "expected error with", "without")]
    answers = [("network", "budget", *ANSWERS)]
    for network in found.values():
        for budget, row in network["budgets"].items():
            start = (f"{network['title']} ({network['layers']})", f"`{budget}`")
            formats = Counter(row["with"]["formats"])
            counts = [sum(formats[name] for name in names) for names in COLUMNS.values()]
            errors = [expected(budget, row[way]) for way in WAYS]
            choices.append((*start, *map(str, counts), *errors))
            if "models" in row:
                both = [row["models"][way] for way in WAYS]
                shares = [both[0]["top1_original"], *(each[key] for key in ("top1", "agreement") for each in both)]
                texts = [f"{100 * share:.1f}" for share in shares]
                counted = [f"{both[0][key]:,}" for key in ("fitted_on", "test_images")]
                answers.append((network["title"], start[1], *counted, *texts))
    kept = [("network", "layers", "half of the", *(column for column in COLUMNS if column != "dense"))]
    for network in found.values():
        for measure, word in (("params", "parameters"), ("macs", "multiply-adds")):
            errors = [f"{network['halved'][measure][column]:.3f}" for column in COLUMNS if column != "dense"]
            kept.append((network["title"], str(network["layers_with_taps"]), word, *errors))
    return "\n\n".join("\n".join(lines(rows)) for rows in (choices, kept, answers))


def expected(budget: str, result: Mapping[str, Any]) -> str:
    """The expected error of a plan, and the share of time it reaches where the budget cannot be kept."""
    reached, asked = result.get("time_share", 0.0), float(re.findall(r"[\d.]+", budget)[0])
    return f"{result['rms_error']:.3f}" + (f" at {reached:.2f}" if reached > asked else "")


def lines(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *rest = [f"| {' | '.join(row)} |" for row in rows]
    return [head, "|" + "---|" * len(rows[0]), *rest]


if __name__ == "__main__":
    main()

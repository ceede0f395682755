"""Architectures by the hundred: from random weights to a small model that was saved, loaded, exported and compared.

Every classification and segmentation model of torchvision and one model of every family of timm goes through:
calibrate → plan at 70 % of the parameters → compress → save → load in a new process → export → compare. A model passes
if

- every layer left dense has its reason, and the plan keeps the budget;
- every compressed layer, given the inputs of the original, has the error that the report says;
- the loaded model computes exactly what the saved one did;
- the exported file (ONNX, or torch.export where that operator set does not suffice; with ``--quick`` torch.export
  alone) computes what the model computes; a model may remain without one only if the original cannot be exported
  either.

    python benchmarks/zoo_coverage.py                     # all that are not in results/coverage.json yet
    python benchmarks/zoo_coverage.py --again             # also those that did not pass
    python benchmarks/zoo_coverage.py torchvision:resnet18 timm:vit_tiny_patch16_224
    python benchmarks/zoo_coverage.py --page              # only write docs/coverage.md

Each model runs in a process of its own, with limits of time and memory; a killed run continues where it stopped.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import re
import resource
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from zoo_families import FAMILIES

import tensigma as ts
from tensigma.compression import reestimate_bn_
from tensigma.errors import ExportError, InputError

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "results" / "coverage.json", ROOT / "docs" / "coverage.md"
#: Sides of images to try, smallest first: the first that the model takes is used.
SIDES = (32, 48, 64, 96, 128, 192, 224, 240, 256, 299, 384)
SHARES = (0.7, 0.8, 0.9, 0.97)
CLASSES, IMAGES = 5, 4
#: How many times as long as on an idle processor a model may take.
_PATIENCE = 20
#: Formats to try, with suffixes; the second is the quicker one.
FORMATS = [("onnx", "onnx"), ("torch-export", "pt2")]


def names() -> list[str]:
    """All models, by the names that ``load_model`` takes."""
    models = ts.zoo.import_torchvision().models
    listed = [*models.list_models(module=models), *models.list_models(module=models.segmentation)]
    return [f"torchvision:{name}" for name in listed] + [f"timm:{name}" for name in FAMILIES.values()]


def build(name: str, sides: Sequence[int] = SIDES) -> tuple[nn.Module, Tensor]:
    """The model with random weights, and images as small as it takes them with a finite answer."""
    problem: Exception | None = None
    model: nn.Module | None = None
    for side in sides:
        images = torch.randn(IMAGES, 3, side, side, generator=torch.Generator().manual_seed(1))
        # Some transformers have a fixed size, which can be set; others take no such option and are built once.
        options = (f"&img_size={side}",) if name.startswith("timm:") else ()
        for option in (*options, ""):
            try:
                if option or model is None:
                    torch.manual_seed(0)
                    candidate = ts.zoo.load_model(f"{name}?num_classes={CLASSES}{option}")
                    model = model if option else candidate
                else:
                    candidate = model
                with torch.inference_mode():
                    answer = candidate(images)
                # At one position for each window, some divide by zero.
                if not all(leaf.isfinite().all() for leaf in ts.running.leaves(answer).values()):
                    raise InputError(f"the answer at {side}×{side} is not finite")
                return candidate, images
            except Exception as error:  # any package raises what it likes
                problem = error
    raise problem or InputError(f"{name} takes no images")


def alive(model: nn.Module, images: Tensor) -> None:
    """Statistics of BatchNorm that fit the random weights: with those of no training, signals vanish or explode."""
    with suppress(InputError):
        reestimate_bn_(model, [images])


def check_model(name: str, place: Path, note: Callable[..., None]) -> None:
    """All steps but loading; ``note`` keeps what is known so far."""
    note(step="build")
    model, images = build(name)
    alive(model, images)
    note(step="calibrate", side=images.shape[-1])
    # From a folder each layer is read when it is its turn: the moments of the largest models take more than they do.
    ts.calibrate(model, [images]).save(place / "stats")
    stats = ts.Calibration.load(place / "stats")
    note(step="plan")
    plan = smallest(model, stats, note)
    unreasoned = [entry.name for entry in plan.values() if entry.format is None and not entry.reason]
    assert not unreasoned, f"dense without a reason: {unreasoned}"
    reasons = Counter(entry.reason for entry in plan.values() if entry.format is None)
    note(layers=len(plan), compressed=len(plan.compressed), reasons=dict(reasons.most_common()))
    note(step="compress")
    small, report = ts.compress(model, plan, stats)
    note(params=[report.before.params, report.after.params])
    assert report.after.params == plan.after.params == sum(p.numel() for p in small.parameters())
    note(step="layers", gap=check_layers(model, small, report, images))
    note(step="save")
    ts.save(small, place / "small")
    with torch.inference_mode():
        expected = ts.running.leaves(small(images))
    assert all(tensor.isfinite().all() for tensor in expected.values()), "answers that are not finite"
    torch.save({"images": images, "expected": expected}, place / "answers.pt")
    note(step="compare")
    result = ts.evaluate(small, [images], original=model)
    note(answers=result.answers, likeness=result.likeness)
    note(step="export")
    form = exported(small, place, images)
    if form is None:
        assert exported(model, place, images) is None, "the original can be exported and the small model cannot"
        form = "not exported, and neither is the original"
    note(exported=form)
    note(step="load")


def smallest(model: nn.Module, stats: ts.Calibration, note: Callable[..., None]) -> ts.Plan:
    """The plan at 70 % of the parameters, or at the first larger share that can be kept."""
    for share in SHARES:
        try:
            note(share=share)
            return ts.plan(model, stats, budget=ts.Params(share), method="svd", weights=None)
        except InputError as error:
            if "no plan leaves" not in str(error) or share == SHARES[-1]:
                raise
    raise AssertionError


def check_layers(model: nn.Module, small: nn.Module, report: ts.Report, images: Tensor) -> float:
    """The largest gap between the error of a compressed layer, on the inputs of the original, and the reported one."""
    sums: dict[str, list[Tensor]] = {}
    handles = []
    for row in report.compressed:
        replaced = small.get_submodule(row.name)
        dense = model.get_submodule(row.name)

        def hook(
            module: nn.Module, args: Any, output: Tensor, name: str = row.name, other: nn.Module = replaced
        ) -> None:
            change, energy = (other(*args) - output).double(), output.double()
            axes = [
                axis
                for axis in range(output.dim())
                if axis != (output.dim() - 1 if isinstance(module, nn.Linear) else 1)
            ]
            rows = output.numel() // output.shape[-1 if isinstance(module, nn.Linear) else 1]
            entry = [change.square().sum(), energy.square().sum(), energy.sum(axes), torch.tensor(float(rows))]
            sums[name] = [a + b for a, b in zip(sums[name], entry, strict=True)] if name in sums else entry

        handles.append(dense.register_forward_hook(hook))
    with torch.inference_mode():
        model(images)
    for handle in handles:
        handle.remove()
    worst = 0.0
    for row in report.compressed:
        difference, square, total, rows = sums[row.name]
        # The default norm is centred: errors are relative to the energy around the mean.
        energy = square - total.square().sum() / rows
        error = float((difference / energy).sqrt()) if energy > 1e-12 * square else 0.0
        gap = abs(error - (row.error or 0.0))
        assert gap < 0.02 + 0.05 * error, f"{row.name}: error {error:.3f}, reported {row.error}"
        worst = max(worst, gap)
    return round(worst, 5)


def exported(model: nn.Module, place: Path, images: Tensor) -> str | None:
    """The format in which the model could be written, if any; a file that computes something else is an error."""
    for form, suffix in FORMATS:
        for dynamic in (True, False):
            try:
                ts.export(model, place / f"model.{suffix}", images[:2], format=form, dynamic_batch=dynamic)  # type: ignore[arg-type]
                return form if dynamic else f"{form}, fixed batch"
            except ExportError as error:
                if "differs from the model" in str(error):
                    raise
    return None


def check_loaded(name: str, place: Path, note: Callable[..., None]) -> None:
    """Load what another process saved, and compare."""
    kept = torch.load(place / "answers.pt")
    loaded = ts.load(place / "small", build(name, [kept["images"].shape[-1]])[0])
    with torch.inference_mode():
        answers = ts.running.leaves(loaded.eval()(kept["images"]))
    assert list(answers) == list(kept["expected"])
    for path, expected in kept["expected"].items():
        assert torch.equal(answers[path], expected), f"the loaded model differs in {path or 'its answer'}"
    note(step="done")


def in_process(work: Callable[..., None], name: str, place: Path, seconds: float, memory: float) -> dict[str, Any]:
    """What ``work`` noted in a process of its own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def target() -> None:
        limit = int(memory * 1e9)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        # Time of the processor, so that a busy machine fails no model.
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        begun: dict[str, float] = {}

        def note(**facts: Any) -> None:
            if "step" in facts:
                begun[facts["step"]] = round(time.process_time(), 1)
            sender.send({**facts, "begun": dict(begun)})

        try:
            work(name, place, note)
        except BaseException as error:
            trace = traceback.extract_tb(error.__traceback__)[-1]
            sender.send(
                {
                    "error": f"{type(error).__name__}: {error}"[:400],
                    "where": f"{Path(trace.filename).name}:{trace.lineno}",
                }
            )
        sender.send({"cpu": round(time.process_time(), 1)})

    process = context.Process(target=target)
    process.start()
    sender.close()
    # A process that waits for ever takes no time of the processor.
    end = time.monotonic() + _PATIENCE * seconds
    facts: dict[str, Any] = {}
    try:
        while receiver.poll(max(0.0, end - time.monotonic())):
            facts |= receiver.recv()
    except EOFError:
        pass
    else:
        facts["error"] = f"not finished after {_PATIENCE * seconds:g} s"
        process.kill()
    process.join()
    if process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL) and "error" not in facts:
        facts["error"] = f"not finished after {seconds:g} s of the processor"
    if process.exitcode and "error" not in facts:
        facts["error"] = f"the process ended with code {process.exitcode}"
    return facts


def warm_up() -> None:
    """Import what exporting needs before processes are forked: it takes longer than many a model."""
    torch.export.export(nn.Linear(1, 1), (torch.ones(1, 1),))
    for package in ("torch.onnx", "onnxscript", "onnxruntime") if len(FORMATS) > 1 else ():
        importlib.import_module(package)


def record(name: str, seconds: float, memory: float) -> dict[str, Any]:
    """Everything that is known about one model."""
    with tempfile.TemporaryDirectory(prefix="coverage-") as folder:
        facts = in_process(check_model, name, Path(folder), seconds, memory)
        if facts.get("step") == "load" and "error" not in facts:
            loaded = in_process(check_loaded, name, Path(folder), seconds, memory)
            loaded.pop("begun", None)
            loaded["cpu"] = round(facts.get("cpu", 0.0) + loaded.get("cpu", 0.0), 1)
            facts |= loaded
    return facts


def passed(facts: dict[str, Any]) -> bool:
    return facts.get("step") == "done" and "error" not in facts


def page(results: dict[str, Any]) -> str:
    """``docs/coverage.md``."""
    models = results["models"]
    done = [facts for facts in models.values() if passed(facts)]
    lines = [
        "# Coverage",
        "",
        "Every classification and segmentation model of torchvision (86) and one model of every family of timm (97),",
        f"with random weights, {CLASSES} classes and images as small as it takes: calibrate → plan at 70 % of the",
        "parameters → compress → save → load in a new process → export → compare. `make zoo` runs it; a killed run",
        "continues. What counts as passing is written at the top of `benchmarks/zoo_coverage.py`.",
        "",
        f"**{len(done)} of {len(models)} models that have run pass**, of {results['listed']} that are listed.",
        "",
        "*share*: parameters that remain; above 70 % where layers that stay dense hold too many of them. *gap*: the",
        "largest difference between the reported error of a layer and that on the inputs of the original.",
        "*exported*: the format that was written and compared; `--quick` tries `torch-export` alone.",
        "",
        "| model | side | layers | compressed | share | gap | exported | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, facts in sorted(models.items()):
        before, after = facts.get("params", [0, 0])
        share = f"{100 * after / before:.0f} %" if before else "–"
        outcome = (
            "" if passed(facts) else f"{facts.get('step')}: {facts.get('error')}".replace("|", "\\|").replace("\n", " ")
        )
        cells = [
            facts.get("side", "–"),
            facts.get("layers", "–"),
            facts.get("compressed", "–"),
            share,
            facts.get("gap", "–"),
        ]
        form = str(facts.get("exported", "–")).replace("|", "\\|").replace("\n", " ")
        lines.append(f"| `{name}` | {' | '.join(map(str, cells))} | {form[:120]} | {outcome[:160]} |")
    reasons: Counter[str] = Counter()
    for facts in models.values():
        for reason, count in facts.get("reasons", {}).items():
            reasons[_general(reason)] += count
    lines += ["", "## Why layers stay dense", "", "| reason | layers |", "|---|---|"]
    lines += [f"| {reason} | {count} |" for reason, count in reasons.most_common()]
    return "\n".join(lines) + "\n"


def _general(reason: str) -> str:
    """The reason without the numbers and names that differ from layer to layer."""
    reason = re.sub(r"groups=\d+", "groups = channels", reason)
    return re.sub(r"(also reachable as|tied to) .*", r"\1 …", reason)


def main() -> None:
    parser = argparse.ArgumentParser(description="All architectures of torchvision, and one of each family of timm.")
    parser.add_argument("models", nargs="*", help="only these, whether they have run before or not")
    parser.add_argument("--again", action="store_true", help="also run those that did not pass")
    parser.add_argument("--page", action="store_true", help="write docs/coverage.md and run nothing")
    parser.add_argument("--seconds", type=float, default=300, help="processor time of each process of a model")
    parser.add_argument("--memory", type=float, default=8, help="limit for each process, in GB of addresses")
    parser.add_argument("--quick", action="store_true", help="export by torch.export alone, which takes half the time")
    options = parser.parse_args()
    if options.quick:
        FORMATS.pop(0)
    listed = names()
    if not options.page:
        warm_up()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"models": {}}
    results["listed"] = len(listed)
    known = results["models"]
    wanted: Sequence[str] = options.models or [
        name for name in listed if name not in known or (options.again and not passed(known[name]))
    ]
    for name in () if options.page else wanted:
        known[name] = record(name, options.seconds, options.memory)
        facts = known[name]
        print(f"{name}: {'passed' if passed(facts) else facts.get('error')} ({facts.get('cpu', '–')} s)", flush=True)
        results["models"] = {name: known[name] for name in listed if name in known}
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        PAGE.write_text(page(results), encoding="utf-8")
    PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()

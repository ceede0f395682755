"""``tensigma quantize``: fewer bits, with what that does to accuracy, size and time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from tensigma.cli.command import command
from tensigma.cli.loading import data_of, name_of, needed
from tensigma.cli.options import BatchSize, DataNames, Force, Workers
from tensigma.cli.outputs import MODEL, check_file, check_folder
from tensigma.cli.screen import Screen
from tensigma.cli.subject import OriginalName, SubjectName, SubjectWeights, subject_of
from tensigma.cli.tables import Columns
from tensigma.deployment import Quantized
from tensigma.deployment import quantize as carry_out
from tensigma.evaluation import Evaluation
from tensigma.report import milliseconds, number, percent, short, speed, times


class Bits(StrEnum):
    """Precisions by the names that people write."""

    int8 = "int8"
    fp16 = "fp16"


Out = Annotated[
    Path,
    typer.Option("--out", metavar="PATH", help="An ONNX file; for fp16 a name without .onnx makes a folder instead."),
]
PrecisionName = Annotated[Bits, typer.Option("--precision", help="int8 to compute with, fp16 to store.")]
EvalData = Annotated[
    list[str] | None,
    typer.Option(
        "--eval-data",
        metavar="DATA",
        help="Images to measure on; those of --data where not given.",
        rich_help_panel="Data",
    ),
]
Samples = Annotated[
    int,
    typer.Option(
        "--max-samples", min=1, metavar="N", help="Images of --data to find ranges with.", rich_help_panel="Data"
    ),
]
Equalise = Annotated[
    bool,
    typer.Option("--equalise/--no-equalise", help="Make channels between factors equally large before int8."),
]
ReduceRange = Annotated[
    bool | None,
    typer.Option("--reduce-range/--full-range", help="Weights of 7 or 8 bits; 7 by default where the CPU lacks VNNI."),
]
WithLatency = Annotated[bool, typer.Option("--latency/--no-latency", help="Measure time, on one thread, in turns.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, metavar="N", help="Passes that --latency takes.")]


@command
def quantize(
    screen: Screen,
    model: SubjectName,
    out: Out,
    data: DataNames = None,
    precision: PrecisionName = Bits.int8,
    eval_data: EvalData = None,
    original: OriginalName = None,
    weights: SubjectWeights = None,
    max_samples: Samples = 256,
    equalise: Equalise = True,
    reduce_range: ReduceRange = None,
    latency: WithLatency = True,
    rounds: Rounds = 20,
    batch_size: BatchSize = 64,
    workers: Workers = 1,
    force: Force = False,
) -> None:
    """Store a model in fewer bits and measure what that costs.

    int8 is static quantization by ONNX Runtime: weights per channel, activations
    by their range on unlabelled images. fp16 halves the weights on disk; CPUs
    compute with them in single precision as before.

    [bold]Examples[/bold]

      tensigma quantize small/ --data imagefolder:photos \\
          --eval-data imagefolder:val --out small-int8.onnx
      tensigma quantize small/ --precision fp16 --data imagefolder:photos \\
          --out small-fp16/
    """
    folder = precision is Bits.fp16 and out.suffix != ".onnx"
    if folder:
        check_folder(out, force=force, format=MODEL)
    else:
        check_file(out, force=force)
    images = needed(data_of(data, batch_size, workers), "no data was named; give for example --data imagefolder:DIR")
    judged = data_of(eval_data, batch_size, workers)
    subject = subject_of(screen, model, original, weights)
    if subject.original is not None and not subject.trained:
        screen.note("the original's own weights are not given (--weights), so nothing is compared with it")
    screen.note(f"quantizing with {name_of(images)}")
    with _evaluating(screen) as progress:
        found = carry_out(
            subject.network,
            out,
            images,
            precision=precision.value,
            data=judged,
            original=subject.original if subject.trained else None,
            equalise=equalise,
            reduce_range=reduce_range,
            max_samples=max_samples,
            latency=latency,
            rounds=rounds,
            force=force,
            progress=progress,
        )
    where = name_of(images if judged is None else judged)
    facts = {"model": model, "data": name_of(images), "evaluated_on": where, **found.to_json()}
    screen.result("quantize", facts, _table(found, precision.value.upper()))
    remarks = [f"{number(found.after.samples)} samples of {where}", f"relative error of outputs {found.error:.1e}"]
    if found.reduce_range:
        remarks.append("weights of 7 bits")
    screen.note(f"{'; '.join(remarks)}; written to {out}")


@contextmanager
def _evaluating(screen: Screen) -> Iterator[Callable[[Any], None]]:
    """Progress that begins with the first batch: rates would count the time that quantization takes otherwise."""
    with ExitStack() as stack:
        shown: list[Callable[[Any], None]] = []

        def update(state: Any) -> None:
            if shown:
                shown[0](state)
            else:
                shown.append(stack.enter_context(screen.progress("evaluating")))

        yield update


def _table(found: Quantized, name: str) -> Columns:
    """Figures before and after, and of the original where there is one."""
    stages = [*([found.original] if found.original else []), found.before, found.after]
    header = ["", *([">original"] if found.original else []), ">FP32", f">{name}", ">"]

    def row(title: str, values: Sequence[str], change: str = "") -> list[str]:
        return [title, *values, change]

    def step(key: str) -> str:
        old, new = getattr(found.before, key), getattr(found.after, key)
        return "" if old is None or new is None else f"{100 * (new - old):+.2f} points"

    def faster(before: Evaluation, after: Evaluation) -> str:
        if before.latency is None or after.latency is None:
            return ""
        return speed(before.latency.minimum / after.latency.minimum)

    rows = [
        row(
            "bytes",
            [short(each.size.bytes, "B") for each in stages],
            times(found.before.size.bytes, found.after.size.bytes),
        ),
        row("top-1", [percent(each.top1) for each in stages], step("top1")),
        row("top-5", [percent(each.top5) for each in stages], step("top5")),
        row("agreement", [percent(each.agreement) for each in stages], step("agreement")),
        row("latency", [milliseconds(each.latency) for each in stages], faster(found.before, found.after)),
    ]
    return Columns(header, [each for each in rows if each[-2] != "–"])

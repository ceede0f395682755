"""``tensigma quantize``: fewer bits, and the effect on accuracy, size and latency."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import tensigma as ts
from tensigma.cli.command import command
from tensigma.cli.loading import data_of, name_of, required_data
from tensigma.cli.options import AnswersOption, BatchSize, DataNames, Force, Workers
from tensigma.cli.outputs import MODEL, claim_file, claim_folder
from tensigma.cli.screen import Screen
from tensigma.cli.subject import OriginalName, SubjectName, SubjectWeights, subject_of
from tensigma.cli.tables import quantization_table


class Bits(StrEnum):
    """Precisions by the names that are typed."""

    int8 = "int8"
    fp16 = "fp16"


class RangeName(StrEnum):
    """Rules for ranges by the names that are typed."""

    auto = "auto"
    minmax = "minmax"
    mse = "mse"
    p99_999 = "p99.999"
    p99_99 = "p99.99"
    p99_9 = "p99.9"


Out = Annotated[
    Path,
    typer.Option("--out", metavar="PATH", help="An ONNX file; with fp16, a name without .onnx makes a folder instead."),
]
PrecisionName = Annotated[
    Bits, typer.Option("--precision", help="int8 for storage and computation, fp16 for storage only.")
]
EvalData = Annotated[
    list[str] | None,
    typer.Option(
        "--eval-data",
        metavar="DATA",
        help="Images to evaluate on; by default those of --data.",
        rich_help_panel="Data",
    ),
]
Samples = Annotated[
    int,
    typer.Option(
        "--max-samples", min=1, metavar="N", help="Images of --data for finding value ranges.", rich_help_panel="Data"
    ),
]
Equalise = Annotated[
    bool,
    typer.Option("--equalise/--no-equalise", help="Bring channels between factors to one scale before int8."),
]
ReduceRange = Annotated[
    bool | None,
    typer.Option("--reduce-range/--full-range", help="Weights of 7 or 8 bits; by default 7 if the CPU lacks VNNI."),
]
Ranges = Annotated[
    RangeName,
    typer.Option(
        "--ranges",
        help="Where activations are clipped for int8: by default where the outputs change least on --data.",
    ),
]
WithLatency = Annotated[
    bool, typer.Option("--latency/--no-latency", help="Measure latency, on one thread, alternating between models.")
]
Rounds = Annotated[int, typer.Option("--rounds", min=1, metavar="N", help="Number of passes for --latency.")]


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
    ranges: Ranges = RangeName.auto,
    latency: WithLatency = True,
    rounds: Rounds = 20,
    batch_size: BatchSize = 64,
    workers: Workers = 1,
    force: Force = False,
    answers: AnswersOption = None,
) -> None:
    """Store a model in fewer bits and measure the effect.

    int8 is static quantization by ONNX Runtime: weights per channel, activations
    by their ranges on images without labels, clipped where that keeps the outputs
    closest. Weights that are integers of few bits already stay those. fp16 halves the weights on disk; a
    CPU still computes in single precision.

    [bold]Examples[/bold]

      tensigma quantize small/ --data imagefolder:photos \\
          --eval-data imagefolder:val --out small-int8.onnx
      tensigma quantize small/ --precision fp16 --data imagefolder:photos \\
          --out small-fp16/
    """
    if precision is Bits.fp16 and out.suffix != ".onnx":
        claim_folder(screen, out, force=force, format=MODEL)
    else:
        claim_file(screen, out, force=force)
    images = required_data(data, batch_size, workers)
    judges = data_of(eval_data, batch_size, workers)
    subject = subject_of(screen, model, original, weights)
    if subject.original is not None and not subject.trained:
        screen.note("nothing is compared with the original, whose trained weights are not given (--weights)")
    screen.note(f"quantizing with {name_of(images)}")
    with _progress_of_evaluation(screen) as progress:
        quantized = ts.quantize(
            subject.network,
            out,
            images,
            precision=precision.value,
            data=judges,
            original=subject.original if subject.trained else None,
            equalise=equalise,
            reduce_range=reduce_range,
            ranges=ranges.value,
            max_samples=max_samples,
            latency=latency,
            rounds=rounds,
            answers=answers,
            force=force,
            progress=progress,
        )
    evaluated_on = name_of(images if judges is None else judges)
    facts = {"model": model, "data": name_of(images), "evaluated_on": evaluated_on, **quantized.to_json()}
    screen.result("quantize", facts, quantization_table(quantized, precision.value.upper()))
    notes = [
        f"{ts.report.number(quantized.after.samples)} samples of {evaluated_on}",
        f"relative error of the outputs {quantized.error:.1e}",
    ]
    if quantized.reduce_range:
        notes.append("weights of 7 bits")
    if quantized.ranges is not None:
        notes.append(f"ranges by {quantized.ranges}")
    if quantized.kept:
        notes.append(f"{quantized.kept} weights kept their integers")
    screen.note(f"{'; '.join(notes)}; written to {out}")


@contextmanager
def _progress_of_evaluation(screen: Screen) -> Iterator[Callable[[Any], None]]:
    """Progress that starts with the first batch evaluated, so that rates do not count the time of quantization."""
    with ExitStack() as stack:
        shown: list[Callable[[Any], None]] = []

        def update(state: Any) -> None:
            if shown:
                shown[0](state)
            else:
                shown.append(stack.enter_context(screen.progress("evaluating")))

        yield update

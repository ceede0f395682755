"""``tensigma export``: one file for other runtimes, checked against the model and timed beside it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from torch import nn

from tensigma.cli.command import command
from tensigma.cli.options import Force
from tensigma.cli.outputs import check_file
from tensigma.cli.screen import Screen
from tensigma.cli.subject import OriginalName, SampleShape, Subject, SubjectName, SubjectWeights, subject_of
from tensigma.cli.tables import Columns
from tensigma.deployment import Exported, measure_together, read_exported
from tensigma.deployment import export as write
from tensigma.evaluation import Timing, size_of
from tensigma.report import milliseconds, short, speed, times


class FileFormat(StrEnum):
    """Formats by the names that people write."""

    onnx = "onnx"
    torch_export = "torch-export"


_RUNTIMES = {FileFormat.onnx: "ONNX Runtime", FileFormat.torch_export: "torch.export"}
Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write, such as small.onnx.")]
Format = Annotated[FileFormat, typer.Option("--format", help="onnx for ONNX Runtime; torch-export for PyTorch.")]
FixedBatch = Annotated[bool, typer.Option("--fixed-batch", help="Take batches of --batch inputs only.")]
Tolerance = Annotated[
    float | None,
    typer.Option("--tolerance", metavar="X", help="The difference that may be, as a share of the largest output."),
]
Opset = Annotated[int | None, typer.Option("--opset", min=18, metavar="N", help="Version of ONNX operators.")]
WithLatency = Annotated[bool, typer.Option("--latency/--no-latency", help="Measure time, on one thread, in turns.")]
Batch = Annotated[int, typer.Option("--batch", min=1, metavar="N", help="Inputs at a time, for --latency.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, metavar="N", help="Passes that --latency takes.")]


@command
def export(
    screen: Screen,
    model: SubjectName,
    out: Out,
    original: OriginalName = None,
    weights: SubjectWeights = None,
    input: SampleShape = None,
    format: Format = FileFormat.onnx,
    fixed_batch: FixedBatch = False,
    tolerance: Tolerance = None,
    opset: Opset = None,
    latency: WithLatency = True,
    batch: Batch = 1,
    rounds: Rounds = 20,
    force: Force = False,
) -> None:
    """Write a model as one file that runs without tensigma and without its code.

    The file is compared with the model on batches of several sizes before it
    takes its place; one that computes something else is not kept. Then both are
    timed, and the original beside them.

    [bold]Examples[/bold]

      tensigma export small/ --out small.onnx
      tensigma export torchvision:resnet18 --weights r18.pth --out r18.onnx
      tensigma export small/ --original mine.py:build --input 3x96x96 \\
          --out small.pt2 --format torch-export
    """
    check_file(out, force=force)
    subject = subject_of(screen, model, original, weights)
    example = subject.example(input, batch)
    screen.note(f"writing {out}")
    found = write(
        subject.network,
        out,
        example,
        format=format.value,
        dynamic_batch=not fixed_batch,
        tolerance=tolerance,
        opset=opset,
    )
    times_found: dict[str, Timing] = {}
    if latency:
        screen.note(f"measuring time: {rounds} passes over {batch} inputs, on one thread, in turns")
        with TemporaryDirectory(prefix="tensigma-") as scratch:
            models = _models(subject, found, Path(scratch) / "original", example)
            times_found = measure_together(models, example, rounds=rounds)
    sizes = {"model": size_of(subject.network, example[:1])}
    if subject.original is not None:
        sizes["original"] = size_of(subject.original, example[:1])
    facts = {
        "model": model,
        **found.to_json(),
        "sizes": {name: vars(size) for name, size in sizes.items()},
        "latency": {name: vars(each) for name, each in times_found.items()},
    }
    rows = [
        ["largest difference", "", f"{_difference(found):.1e}", "of the largest output"],
        ["bytes of the file", "", short(found.bytes, "B"), ""],
    ]
    if "original" in sizes:
        before, after = sizes["original"], sizes["model"]
        rows.append(["MACs", short(before.macs), short(after.macs), times(before.macs, after.macs)])
    for runtime, name in (("eager", "PyTorch"), ("file", _RUNTIMES[format])):
        own, first = times_found.get(f"model, {runtime}"), times_found.get(f"original, {runtime}")
        if own is not None:
            gain = "" if first is None else speed(first.minimum / own.minimum)
            rows.append([f"latency, {name}", milliseconds(first), milliseconds(own), gain])
    header = ["", ">original", ">model", ">"]
    if subject.original is None:
        header, rows = [header[0], *header[2:]], [[row[0], *row[2:]] for row in rows]
    screen.result("export", facts, Columns(header, rows))
    screen.note(f"compared on batches of {', '.join(map(str, found.batches))}; written to {out}")


def _models(subject: Subject, found: Exported, place: Path, example: object) -> dict[str, nn.Module]:
    """Everything that is timed: the model and its original, in PyTorch and as files."""
    models = {"model, eager": subject.network, "model, file": read_exported(found.path, found.format)}
    if subject.original is not None:
        write(subject.original, place, example, format=found.format, opset=found.opset, check=False)
        models["original, eager"] = subject.original
        models["original, file"] = read_exported(place, found.format)
    return models


def _difference(found: Exported) -> float:
    assert found.max_difference is not None
    return found.max_difference / found.largest_output if found.largest_output else 0.0

"""``tensigma export``: one file for other runtimes, checked against the model and timed beside it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

import tensigma as ts
from tensigma.cli.command import command
from tensigma.cli.loading import Network
from tensigma.cli.options import Force
from tensigma.cli.outputs import claim_file
from tensigma.cli.screen import Screen
from tensigma.cli.subject import OriginalName, SampleShape, Subject, SubjectName, SubjectWeights, subject_of
from tensigma.cli.tables import Columns


class FileFormat(StrEnum):
    """Formats by the names that are typed."""

    onnx = "onnx"
    torch_export = "torch-export"


_RUNTIMES = {FileFormat.onnx: "ONNX Runtime", FileFormat.torch_export: "torch.export"}
Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write, such as small.onnx.")]
Format = Annotated[FileFormat, typer.Option("--format", help="onnx for ONNX Runtime, torch-export for PyTorch.")]
FixedBatch = Annotated[bool, typer.Option("--fixed-batch", help="Accept only batches of --batch inputs.")]
Tolerance = Annotated[
    float | None,
    typer.Option("--tolerance", metavar="X", help="Largest accepted difference, as a share of the largest output."),
]
Opset = Annotated[int | None, typer.Option("--opset", min=18, metavar="N", help="Version of the ONNX operators.")]
Pack = Annotated[
    bool,
    typer.Option("--pack/--no-pack", help="Store weights of few bits as integers, or half as half, in ONNX files."),
]
WithLatency = Annotated[
    bool, typer.Option("--latency/--no-latency", help="Measure latency, on one thread, alternating between models.")
]
Batch = Annotated[int, typer.Option("--batch", min=1, metavar="N", help="Inputs in a batch, for --latency.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, metavar="N", help="Number of passes for --latency.")]


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
    pack: Pack = True,
    latency: WithLatency = True,
    batch: Batch = 1,
    rounds: Rounds = 20,
    force: Force = False,
) -> None:
    """Write a model as one file that runs without tensigma and without the model's code.

    Before the file is kept, its outputs are compared with those of the model on
    batches of several sizes. Then both are timed, and the original beside them.

    [bold]Examples[/bold]

      tensigma export small/ --out small.onnx
      tensigma export torchvision:resnet18 --weights r18.pth --out r18.onnx
      tensigma export small/ --original mine.py:build --input 3x96x96 \\
          --out small.pt2 --format torch-export
    """
    claim_file(screen, out, force=force)
    subject = subject_of(screen, model, original, weights)
    example = subject.example(input, batch)
    screen.note(f"writing {out}")
    exported = ts.export(
        subject.network,
        out,
        example,
        format=format.value,
        dynamic_batch=not fixed_batch,
        tolerance=tolerance,
        opset=opset,
        pack=pack,
    )
    timings: dict[str, ts.evaluation.Timing] = {}
    if latency:
        size = "1 input" if batch == 1 else f"{batch} inputs"
        screen.note(f"measuring latency: {rounds} passes of {size}, on one thread, alternating between models")
        with TemporaryDirectory(prefix="tensigma-") as scratch:
            models = _timed_models(subject, exported, Path(scratch) / "original", example)
            timings = ts.deployment.measure_together(models, example, rounds=rounds)
    sizes = {"model": ts.evaluation.size_of(subject.network, example[:1])}
    if subject.original is not None:
        sizes["original"] = ts.evaluation.size_of(subject.original, example[:1])
    facts = {
        "model": model,
        **exported.to_json(),
        "sizes": {name: vars(size) for name, size in sizes.items()},
        "latency": {name: vars(timing) for name, timing in timings.items()},
    }
    screen.result("export", facts, _table(exported, sizes, timings, _RUNTIMES[format]))
    screen.note(f"compared on batches of {', '.join(map(str, exported.batches))}; written to {out}")


def _timed_models(subject: Subject, exported: ts.Exported, scratch: Path, example: Any) -> dict[str, Network]:
    """The model and its original, in PyTorch and as files."""
    read = ts.deployment.read_exported
    models = {"model, eager": subject.network, "model, file": read(exported.path, exported.format)}
    if subject.original is not None:
        ts.export(subject.original, scratch, example, format=exported.format, opset=exported.opset, check=False)
        models["original, eager"] = subject.original
        models["original, file"] = read(scratch, exported.format)
    return models


def _table(
    exported: ts.Exported,
    sizes: dict[str, ts.evaluation.Size],
    timings: dict[str, ts.evaluation.Timing],
    runtime: str,
) -> Columns:
    short, milliseconds = ts.report.short, ts.report.milliseconds
    assert exported.max_difference is not None
    difference = exported.max_difference / exported.largest_output if exported.largest_output else 0.0
    rows = [
        ["largest difference", "", f"{difference:.1e}", "of the largest output"],
        ["bytes of the file", "", short(exported.bytes, "B"), ""],
    ]
    if exported.packed:
        kinds = ", ".join(f"{count} in {kind}" for kind, count in exported.packed.items())
        rows.append(["weights of few bits", "", str(sum(exported.packed.values())), kinds])
    if "original" in sizes:
        before, after = sizes["original"].macs, sizes["model"].macs
        rows.append(["MACs", short(before), short(after), ts.report.times(before, after)])
    for form, name in (("eager", "PyTorch"), ("file", runtime)):
        timing, first = timings.get(f"model, {form}"), timings.get(f"original, {form}")
        if timing is not None:
            gain = "" if first is None else ts.report.speed(first.minimum / timing.minimum)
            rows.append([f"latency, {name}", milliseconds(first), milliseconds(timing), gain])
    if "original" in sizes:
        return Columns(["", ">original", ">model", ">"], rows)
    return Columns(["", ">model", ">"], [[row[0], *row[2:]] for row in rows])

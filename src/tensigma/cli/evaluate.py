"""``tensigma evaluate``: accuracy, agreement, size and latency of a model, beside the original."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import tensigma as ts
from tensigma.cli.command import command
from tensigma.cli.loading import compressed_of, is_untrained, model_of, name_of, required_data
from tensigma.cli.options import AnswersOption, BatchSize, DataNames, Device, MaxSamples, ModelName, Weights, Workers
from tensigma.cli.screen import Screen
from tensigma.cli.tables import evaluation_table
from tensigma.errors import StoreError
from tensigma.files import read_json

Compressed = Annotated[
    Path | None,
    typer.Option("--compressed", metavar="DIR", help="A folder from 'tensigma compress'; MODEL is its original."),
]
WithLatency = Annotated[
    bool,
    typer.Option("--latency", help="Also measure latency, on one thread, alternating with the original."),
]
Rounds = Annotated[int, typer.Option("--rounds", min=1, metavar="N", help="Number of passes for --latency.")]


@command
def evaluate(
    screen: Screen,
    model: ModelName,
    data: DataNames = None,
    compressed: Compressed = None,
    weights: Weights = None,
    latency: WithLatency = False,
    rounds: Rounds = 20,
    max_samples: MaxSamples = None,
    batch_size: BatchSize = 64,
    workers: Workers = 1,
    device: Device = None,
    answers: AnswersOption = None,
) -> None:
    """Measure accuracy (if there are labels), agreement with the original, size and latency.

    Agreement is the share of images on which both models give the same answer; it
    needs no labels. Of a segmenter it is also counted by position, beside the mean
    intersection over union; a detector is measured by average precision against
    the original's own detections; numbers by their relative error.

    Agreement also gives a certificate: a lower bound on the agreement
    on new images of the same kind, valid if the images measured here had no part
    in making the model.

    [bold]Examples[/bold]

      tensigma evaluate torchvision:resnet18 --weights r18.pth \\
          --compressed small/ --data imagefolder:val --latency
      tensigma evaluate zoo:digits-cnn --weights digits.pth --data 'digits:?split=val'
    """
    original = model_of(screen, model, weights, device, warn=compressed is None)
    images = required_data(data, batch_size, workers)
    network, reference = original, None
    if compressed is not None:
        network = compressed_of(screen, compressed, original)
        if is_untrained(model, weights):
            screen.note("nothing is compared with the original, whose trained weights are not given (--weights)")
        else:
            reference = original
    if not screen.speaks:
        return
    fresh = not any(ts.zoo.may_share(name_of(images), name) for name in _data_behind(compressed))
    if reference is not None and not fresh:
        screen.note("no certificate: some of these images may have had a part in making the model")
    with screen.progress("evaluating") as progress:
        evaluation = ts.evaluate(
            network,
            images,
            original=reference,
            latency=latency,
            rounds=rounds,
            max_samples=max_samples,
            answers=answers,
            confidence=0.95 if fresh else None,
            progress=progress,
        )
    facts = {
        "model": model,
        "compressed": None if compressed is None else str(compressed),
        "data": name_of(images),
        **evaluation.to_json(),
    }
    compared = f"; compared: {evaluation.answers}" if evaluation.answers else ""
    screen.note(f"{evaluation.samples:,} samples of {name_of(images)}{compared}")
    certificate = [] if evaluation.certificate is None else [str(evaluation.certificate)]
    screen.result("evaluate", facts, evaluation_table(evaluation), *certificate)


def _data_behind(compressed: Path | None) -> set[str]:
    """The names of the data that had a part in making a compressed model, as far as its report tells."""
    if compressed is None:
        return set()
    try:
        report = ts.Report.from_json(read_json(compressed / "report.json"))
    except StoreError:
        return set()
    weighing = report.notes.get("weighing")
    weighed_on = weighing.get("data") if isinstance(weighing, dict) else None
    return {str(name) for name in (report.notes.get("data"), report.notes.get("searched_on"), weighed_on) if name}

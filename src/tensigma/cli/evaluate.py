"""``tensigma evaluate``: accuracy, agreement, size and time of a model, beside the original."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tensigma.cli.command import command
from tensigma.cli.loading import compressed_of, data_of, is_untrained, model_of, name_of, needed
from tensigma.cli.options import BatchSize, DataNames, Device, MaxSamples, ModelName, Weights, Workers
from tensigma.cli.screen import Screen
from tensigma.cli.tables import evaluation_table
from tensigma.compression import Report
from tensigma.errors import StoreError
from tensigma.evaluation import evaluate as measure
from tensigma.zoo import may_share

Compressed = Annotated[
    Path | None,
    typer.Option("--compressed", metavar="DIR", help="A folder that 'tensigma compress' wrote; MODEL is its original."),
]
WithLatency = Annotated[
    bool, typer.Option("--latency", help="Also measure time, on one thread and in turn with the original.")
]
Rounds = Annotated[int, typer.Option("--rounds", min=1, metavar="N", help="Passes that --latency takes.")]


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
) -> None:
    """Measure accuracy (where there are labels), agreement with the original, size and time.

    Agreement is the share of images on which both models answer alike; it needs
    no labels. It also gives a certificate: a bound for images nobody has seen,
    valid where these images are like them and had no part in making the model.

    [bold]Examples[/bold]

      tensigma evaluate torchvision:resnet18 --weights r18.pth \\
          --compressed small/ --data imagefolder:val --latency
      tensigma evaluate zoo:digits-cnn --weights digits.pth --data 'digits:?split=val'
    """
    original = model_of(screen, model, weights, device, warn=compressed is None)
    images = needed(data_of(data, batch_size, workers), "no data was named; give for example --data imagefolder:DIR")
    network, beside = original, None
    if compressed is not None:
        network, beside = compressed_of(screen, compressed, original), original
        if is_untrained(model, weights):
            beside = None
            screen.note("the original's own weights are not given (--weights), so nothing is compared with it")
    if not screen.speaks:
        return
    fresh = not any(may_share(name_of(images), name) for name in _made_with(compressed))
    if beside is not None and not fresh:
        screen.note("no certificate: the model may have been made with some of these very images")
    with screen.progress("evaluating") as progress:
        found = measure(
            network,
            images,
            original=beside,
            latency=latency,
            rounds=rounds,
            max_samples=max_samples,
            confidence=0.95 if fresh else None,
            progress=progress,
        )
    facts = {
        "model": model,
        "compressed": None if compressed is None else str(compressed),
        "data": name_of(images),
        **found.to_json(),
    }
    screen.note(f"{found.samples:,} samples of {name_of(images)}")
    certificate = [] if found.certificate is None else [str(found.certificate)]
    screen.result("evaluate", facts, evaluation_table(found), *certificate)


def _made_with(compressed: Path | None) -> set[str]:
    """The data that a compressed model was calibrated or chosen with, as far as its report tells."""
    try:
        report = Report.from_json(json.loads(((compressed or Path()) / "report.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, StoreError):
        return set()
    weighed_on = report.notes.get("weighing", {}).get("data")
    return {str(name) for name in (report.notes.get("data"), report.notes.get("searched_on"), weighed_on) if name}

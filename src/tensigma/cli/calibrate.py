"""``tensigma calibrate``: the statistics of every layer's input, gathered once and kept."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import tensigma as ts
from tensigma.cli.command import command
from tensigma.cli.loading import Network, model_of, name_of, required_data, share_of_process
from tensigma.cli.options import (
    BatchSize,
    DataNames,
    Device,
    Force,
    MaxSamples,
    Memory,
    ModelName,
    Seed,
    Weights,
    Workers,
)
from tensigma.cli.outputs import CALIBRATION, claim_folder
from tensigma.cli.parsing import split_names
from tensigma.cli.progress import duration
from tensigma.cli.screen import Screen
from tensigma.cli.tables import Columns
from tensigma.errors import StoreError


class Fisher(StrEnum):
    """Labels for Fisher information."""

    model = "model"
    labels = "labels"


Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="New folder for the statistics.")]
CheckpointEvery = Annotated[
    int,
    typer.Option(
        "--checkpoint-every", min=0, metavar="N", help="Batches between checkpoints, written beside --out; 0 for none."
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue a calibration that was interrupted.")]
FisherLabels = Annotated[
    Fisher | None,
    typer.Option(
        "--fisher", help="Also gather what --norm fisher needs, with labels drawn by the model or those of the data."
    ),
]
LayerNames = Annotated[
    list[str] | None,
    typer.Option("--layers", metavar="NAMES", help="Names and patterns, such as 'layer4.*'; all layers by default."),
]


@command
def calibrate(
    screen: Screen,
    model: ModelName,
    out: Out,
    data: DataNames = None,
    weights: Weights = None,
    layers: LayerNames = None,
    max_samples: MaxSamples = None,
    batch_size: BatchSize = 64,
    workers: Workers = 1,
    memory: Memory = None,
    fisher: FisherLabels = None,
    checkpoint_every: CheckpointEvery = 50,
    resume: Resume = False,
    device: Device = None,
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Gather the second moment of every layer's input over images. Labels are not read.

    The statistics serve any number of plans and compressions of the model. A few
    hundred images are often enough, and they need not be the training images.

    [bold]Examples[/bold]

      tensigma calibrate zoo:digits-cnn --weights digits.safetensors \\
          --data digits: --out stats/
      tensigma calibrate torchvision:resnet50 --weights resnet50.pth \\
          --data 'imagefolder:photos?samples=1000' --memory 4GB --out stats/

    With several processes, each takes its share of the images:

      torchrun --nproc_per_node=4 -m tensigma calibrate timm:resnet50 \\
          --weights r50.safetensors --data imagefolder:photos --out stats/

    An interrupted run continues from its last checkpoint with --resume.
    """
    start = time.perf_counter()
    checkpoint = _checkpoint(out)
    claim_folder(screen, out, force=force, format=CALIBRATION)
    _check_checkpoint(screen, checkpoint, resume=resume, force=force)
    network = model_of(screen, model, weights, device, seed)
    images = required_data(data, batch_size, workers)
    with ts.running.process_group(device):
        stats = run_calibration(
            screen,
            network,
            images,
            layers=split_names(layers) or None,
            max_samples=max_samples,
            memory=memory,
            fisher=None if fisher is None else fisher.value,
            checkpoint=checkpoint if checkpoint_every else None,
            checkpoint_every=max(1, checkpoint_every),
            resume=resume,
            seed=seed,
        )
    if not screen.speaks:
        return
    stats.save(out, force=force)
    ts.calibration.remove_checkpoint(checkpoint)
    seconds = time.perf_counter() - start
    n_bytes = sum(file.stat().st_size for file in out.iterdir())
    facts = {
        "model": model,
        "data": stats.data,
        "out": str(out),
        "samples": stats.samples,
        "seconds": seconds,
        "unreached": list(stats.unreached),
        "bytes": n_bytes,
        "layers": {name: layer_facts(layer) for name, layer in stats.items()},
    }
    rows = [
        ["layers", str(len(stats))],
        ["samples", f"{stats.samples:,}"],
        ["data", str(stats.data)],
        ["on disk", ts.report.short(n_bytes, "B")],
        ["time", duration(seconds)],
        ["written to", str(out)],
    ]
    screen.result("calibrate", facts, Columns(["statistics", ""], rows))


def run_calibration(screen: Screen, model: Network, data: Any, **options: Any) -> ts.Calibration:
    """Calibrate with progress on the screen; ``options`` are those of :func:`tensigma.calibrate`."""
    share, limit = share_of_process(screen, data, options.pop("max_samples", None))
    targets = ts.calibration.select_layers(model, options.get("layers"))
    estimate = ts.calibration.estimate_memory(targets, max_samples=limit, memory=options.get("memory"))
    memory = ts.report.short(estimate.total, "B")
    screen.note(f"calibrating {len(targets)} layers on {name_of(data)}; up to {memory} of memory")
    checkpoint = options.get("checkpoint")
    try:
        with screen.progress("calibrating") as progress:
            return ts.calibrate(model, share, max_samples=limit, progress=progress, data_name=name_of(data), **options)
    except BaseException:
        if checkpoint is not None and checkpoint.exists():
            screen.note(f"{checkpoint} holds what was gathered so far; add --resume to continue from there")
        raise


def layer_facts(layer: ts.LayerStats) -> dict[str, Any]:
    """The statistics of one layer as plain data."""
    return {
        "d": layer.d,
        "groups": layer.groups,
        "rows": layer.count,
        "samples": layer.samples,
        "input_shape": list(layer.input_shape),
        "fisher": layer.fisher_samples > 0,
    }


def _checkpoint(out: Path) -> Path:
    return out.with_name(f"{out.name}.checkpoint")


def _check_checkpoint(screen: Screen, folder: Path, *, resume: bool, force: bool) -> None:
    if resume and not folder.exists():
        screen.note(f"{folder} does not exist, so there is nothing to resume; starting from the beginning")
    if resume or not folder.exists():
        return
    if not force:
        raise StoreError(
            f"{folder} holds an unfinished calibration; add --resume to continue it, or --force to start again"
        )
    if screen.speaks:
        ts.calibration.remove_checkpoint(folder)
        if folder.exists():
            raise StoreError(f"{folder} exists and holds something else; choose another --out")

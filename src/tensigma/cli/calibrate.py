"""``tensigma calibrate``: the statistics of every layer's input, gathered once and kept."""

from __future__ import annotations

import shutil
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from tensigma.calibration import Calibration, estimate_memory, parse_bytes, select_layers
from tensigma.calibration import calibrate as gather
from tensigma.cli.command import command
from tensigma.cli.loading import data_of, model_of, name_of, needed, own_share
from tensigma.cli.options import BatchSize, DataNames, Device, Force, MaxSamples, ModelName, Seed, Weights, Workers
from tensigma.cli.outputs import CALIBRATION, check_folder
from tensigma.cli.parsing import listed
from tensigma.cli.progress import duration
from tensigma.cli.screen import Screen
from tensigma.cli.tables import Columns
from tensigma.errors import InputError, StoreError
from tensigma.report import short
from tensigma.running import process_group


class Fisher(StrEnum):
    """Where the labels of Fisher information come from."""

    model = "model"
    labels = "labels"


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except InputError as error:
        raise typer.BadParameter(str(error)) from None


Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="A new folder for the statistics.")]
Memory = Annotated[
    int | None,
    typer.Option(
        "--memory",
        parser=_bytes,
        metavar="SIZE",
        help="Such as 4GB: take no more, in several passes over the data if need be.",
    ),
]
Every = Annotated[
    int,
    typer.Option(
        "--checkpoint-every", min=0, metavar="N", help="Batches between checkpoints beside --out; 0 for none."
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a calibration that was killed or failed.")]
WhichFisher = Annotated[
    Fisher | None, typer.Option("--fisher", help="Also gather what norm=fisher needs, by labels of this origin.")
]
Which = Annotated[
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
    layers: Which = None,
    max_samples: MaxSamples = None,
    batch_size: BatchSize = 64,
    workers: Workers = 1,
    memory: Memory = None,
    fisher: WhichFisher = None,
    checkpoint_every: Every = 50,
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

    With many processes, each takes its share of the images:

      torchrun --nproc_per_node=4 -m tensigma calibrate timm:resnet50 \\
          --weights r50.safetensors --data imagefolder:photos --out stats/

    A run that was killed goes on from its last checkpoint with --resume.
    """
    start = time.perf_counter()
    checkpoint = _checkpoint(out) if checkpoint_every else None
    check_folder(out, force=force, format=CALIBRATION)
    _check_checkpoint(screen, _checkpoint(out), resume=resume, force=force)
    network = model_of(screen, model, weights, device, seed)
    images = needed(data_of(data, batch_size, workers), "no data was named; give for example --data imagefolder:DIR")
    chosen = listed(layers) or None
    with process_group(device):
        stats = run_calibration(
            screen,
            network,
            images,
            layers=chosen,
            max_samples=max_samples,
            memory=memory,
            fisher=None if fisher is None else fisher.value,
            checkpoint=checkpoint,
            checkpoint_every=max(1, checkpoint_every),
            resume=resume,
            seed=seed,
        )
    if not screen.speaks:
        return
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()  # an empty folder is no loss, and a store takes its name as a whole
    stats.save(out, force=force)
    shutil.rmtree(_checkpoint(out), ignore_errors=True)
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
        ["on disk", short(n_bytes, "B")],
        ["time", duration(seconds)],
        ["written to", str(out)],
    ]
    screen.result("calibrate", facts, Columns(["statistics", ""], rows))


def run_calibration(screen: Screen, model: nn.Module, data: Any, **options: Any) -> Calibration:
    """Calibrate with progress on the screen; ``options`` are those of :func:`tensigma.calibrate`."""
    most = options.pop("max_samples", None)
    share, limit = own_share(screen, data, most)
    targets = select_layers(model, options.get("layers"))
    estimate = estimate_memory(targets, max_samples=limit, memory=options.get("memory"))
    screen.note(f"calibrating {len(targets)} layers with {name_of(data)}; up to {short(estimate.total, 'B')} of memory")
    checkpoint = options.get("checkpoint")
    try:
        with screen.progress("calibrating") as progress:
            return gather(model, share, max_samples=limit, progress=progress, data_name=name_of(data), **options)
    except BaseException:
        if checkpoint is not None and checkpoint.exists():
            screen.note(f"what was gathered so far is in {checkpoint}; add --resume to go on from there")
        raise


def layer_facts(layer: Any) -> dict[str, Any]:
    """Plain data about the statistics of one layer."""
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
        screen.note(f"there is no {folder} to go on from; starting from the beginning")
    if resume or not folder.exists():
        return
    if not force:
        raise StoreError(f"{folder} holds an unfinished calibration; add --resume to go on, or --force to start over")
    if screen.speaks:
        shutil.rmtree(folder)

"""``tensigma stats``: show, merge and compare statistics."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Annotated

import typer

import tensigma as ts
from tensigma.cli.calibrate import layer_facts
from tensigma.cli.command import EXIT_CODES, Command, Group, command
from tensigma.cli.options import Force
from tensigma.cli.outputs import CALIBRATION, claim_folder
from tensigma.cli.screen import Screen
from tensigma.cli.tables import Columns
from tensigma.errors import InputError

stats = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Show, merge or compare the statistics that 'tensigma calibrate' gathers.",
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", show_default=False, help="A folder from 'tensigma calibrate'.")]
Folders = Annotated[
    list[Path], typer.Argument(metavar="DIR DIR…", show_default=False, help="Folders from 'tensigma calibrate'.")
]
Second = Annotated[Path, typer.Argument(metavar="OTHER", show_default=False, help="Another one, of the same model.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="New folder for the merged statistics.")]


@stats.command(cls=Command, epilog=EXIT_CODES)
@command
def show(screen: Screen, folder: Folder) -> None:
    """Show the statistics of every layer.

    Rows are the patches (or vectors) that were averaged. If there are fewer rows
    than the width, calibrate on more images.

    [bold]Example[/bold]

      tensigma stats show stats/
    """
    stored = ts.Calibration.load(folder)
    layers = {name: layer_facts(layer) for name, layer in stored.items()}
    rows = [
        [
            name,
            f"{fact['groups']} × {fact['d']}" if fact["groups"] > 1 else str(fact["d"]),
            ts.report.number(fact["rows"]),
            ts.report.number(fact["samples"]),
            "×".join(map(str, fact["input_shape"])),
            ", ".join(["fewer rows than width"] * (fact["rows"] < fact["d"]) + ["Fisher"] * fact["fisher"]),
        ]
        for name, fact in layers.items()
    ]
    if stored.unreached:
        screen.note(f"no batch reached {', '.join(stored.unreached)}")
    screen.note(f"{folder}: {len(stored)} layers, {stored.samples:,} samples of {stored.data or 'unnamed data'}")
    data = {
        "folder": str(folder),
        "data": stored.data,
        "samples": stored.samples,
        "unreached": list(stored.unreached),
        "layers": layers,
    }
    screen.result("stats show", data, Columns(["layer", ">width", ">rows", ">samples", "input", "remarks"], rows))


@stats.command(cls=Command, epilog=EXIT_CODES)
@command
def merge(screen: Screen, folders: Folders, out: Out, force: Force = False) -> None:
    """Merge statistics of one model, as if all images had been seen in one run.

    [bold]Example[/bold]

      tensigma stats merge stats-monday/ stats-tuesday/ --out stats/
    """
    if len(folders) < 2:
        raise typer.BadParameter(f"got {len(folders)} folder; give at least two folders to merge")
    places = [folder.resolve() for folder in folders]
    for index, folder in enumerate(folders):
        if places[index] in places[:index]:
            raise InputError(f"{folder} is given twice, so its images would count twice; give each folder once")
    claim_folder(screen, out, force=force, format=CALIBRATION)
    if out.resolve() in places:
        raise InputError(f"{out} is one of the folders to merge; choose another --out")
    merged = reduce(ts.Calibration.merge, map(ts.Calibration.load, folders))
    merged.save(out, force=force)
    data = {
        "folders": list(map(str, folders)),
        "out": str(out),
        "data": merged.data,
        "samples": merged.samples,
        "layers": {name: layer_facts(layer) for name, layer in merged.items()},
    }
    rows = [["layers", str(len(merged))], ["samples", ts.report.number(merged.samples)], ["written to", str(out)]]
    screen.result("stats merge", data, Columns(["merged", ""], rows))


@stats.command(cls=Command, epilog=EXIT_CODES)
@command
def compare(screen: Screen, folder: Folder, other: Second) -> None:
    """Measure how different two data sets look to a model.

    0 means equal, 1 nothing in common. No labels are needed.

    [bold]Example[/bold]

      tensigma stats compare stats-photos/ stats-drawings/
    """
    distance = ts.calibration.distance(ts.Calibration.load(folder), ts.Calibration.load(other))
    rows = [
        [name, f"{layer.covariance:.4f}", f"{layer.mean:.4f}", f"{layer.value:.4f}"]
        for name, layer in distance.layers.items()
    ]
    rows.append(["all layers", "", "", f"{distance.total:.4f}"])
    data = {
        "folders": [str(folder), str(other)],
        "total": distance.total,
        "layers": {
            name: {"covariance": layer.covariance, "mean": layer.mean, "value": layer.value}
            for name, layer in distance.layers.items()
        },
    }
    screen.result("stats compare", data, Columns(["layer", ">covariance", ">mean", ">distance"], rows, n_totals=1))

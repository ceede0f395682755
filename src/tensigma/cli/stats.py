"""``tensigma stats``: look at statistics, merge them, compare them."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Annotated

import typer

from tensigma.calibration import Calibration, distance
from tensigma.cli.calibrate import layer_facts
from tensigma.cli.command import EXIT_CODES, Command, Group, command
from tensigma.cli.options import Force
from tensigma.cli.outputs import CALIBRATION, check_folder
from tensigma.cli.screen import Screen
from tensigma.cli.tables import Columns
from tensigma.errors import InputError
from tensigma.report import number

stats = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Look at the statistics that calibrate wrote, merge them, or compare them.",
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", show_default=False, help="A folder written by calibrate.")]
Folders = Annotated[
    list[Path], typer.Argument(metavar="DIR DIR…", show_default=False, help="Folders written by calibrate.")
]
Second = Annotated[Path, typer.Argument(metavar="OTHER", show_default=False, help="Another one, of the same model.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="A new folder for the merged statistics.")]


@stats.command(cls=Command, epilog=EXIT_CODES)
@command
def show(screen: Screen, folder: Folder) -> None:
    """Show what statistics hold, layer by layer.

    Rows are the patches (or vectors) averaged. Where there are fewer of them than
    they are wide, more images would help.

    [bold]Example[/bold]

      tensigma stats show stats/
    """
    found = Calibration.load(folder)
    layers = {name: layer_facts(layer) for name, layer in found.items()}
    rows = [
        [
            name,
            f"{fact['groups']} × {fact['d']}" if fact["groups"] > 1 else str(fact["d"]),
            number(fact["rows"]),
            number(fact["samples"]),
            "×".join(map(str, fact["input_shape"])),
            ", ".join(["fewer rows than width"] * (fact["rows"] < fact["d"]) + ["Fisher"] * fact["fisher"]),
        ]
        for name, fact in layers.items()
    ]
    if found.unreached:
        screen.note(f"no batch reached {', '.join(found.unreached)}")
    screen.note(f"{folder}: {len(found)} layers, {found.samples:,} samples of {found.data or 'unnamed data'}")
    data = {
        "folder": str(folder),
        "data": found.data,
        "samples": found.samples,
        "unreached": list(found.unreached),
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
        raise typer.BadParameter("give at least two folders to merge")
    twice = next((folder for i, folder in enumerate(folders) if folder.resolve() in _resolved(folders[:i])), None)
    if twice is not None:
        raise InputError(f"{twice} was given twice, and its images would count twice; give each folder once")
    check_folder(out, force=force, format=CALIBRATION)
    if out.resolve() in _resolved(folders):
        raise InputError(f"{out} is one of the folders to merge; choose another --out")
    merged = reduce(Calibration.merge, map(Calibration.load, folders))
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()
    merged.save(out, force=force)
    data = {
        "folders": list(map(str, folders)),
        "out": str(out),
        "data": merged.data,
        "samples": merged.samples,
        "layers": {name: layer_facts(layer) for name, layer in merged.items()},
    }
    rows = [["layers", str(len(merged))], ["samples", number(merged.samples)], ["written to", str(out)]]
    screen.result("stats merge", data, Columns(["merged", ""], rows))


def _resolved(folders: list[Path]) -> list[Path]:
    return [folder.resolve() for folder in folders]


@stats.command(cls=Command, epilog=EXIT_CODES)
@command
def compare(screen: Screen, folder: Folder, other: Second) -> None:
    """Tell how far apart two data sets look to a model.

    0 means equal, 1 nothing in common. No labels are needed.

    [bold]Example[/bold]

      tensigma stats compare stats-photos/ stats-drawings/
    """
    found = distance(Calibration.load(folder), Calibration.load(other))
    rows = [
        [name, f"{layer.covariance:.4f}", f"{layer.mean:.4f}", f"{layer.value:.4f}"]
        for name, layer in found.layers.items()
    ]
    rows.append(["all layers", "", "", f"{found.total:.4f}"])
    data = {
        "folders": [str(folder), str(other)],
        "total": found.total,
        "layers": {
            name: {"covariance": layer.covariance, "mean": layer.mean, "value": layer.value}
            for name, layer in found.layers.items()
        },
    }
    screen.result("stats compare", data, Columns(["layer", ">covariance", ">mean", ">distance"], rows, n_totals=1))

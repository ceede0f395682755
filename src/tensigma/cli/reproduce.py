"""``tensigma reproduce``: the paper's tables and figures, from configs to results to pages."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import tensigma as ts
from tensigma.cli.command import command
from tensigma.cli.options import Device, Seed
from tensigma.cli.outputs import write_text
from tensigma.cli.progress import duration, step_of
from tensigma.cli.screen import Screen
from tensigma.cli.tables import Columns
from tensigma.errors import InputError, MissingExtra

ALL = "all"
_CONFIG, _OUT = "substitute", Path("results/paper")
_DATA, _MODE = "Models and data", "What to do"

Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME…", show_default=False, help="Names that --list shows, or 'all' for those of the paper."
    ),
]
ConfigName = Annotated[
    str, typer.Option("--config", metavar="NAME|FILE", help="substitute, paper, or a TOML file.", rich_help_panel=_MODE)
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="DIR", help="Folder of models and images; {data} in configs.", rich_help_panel=_DATA
    ),
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model", metavar="NAME=MODEL", help="Use another model in place of one in the config.", rich_help_panel=_DATA
    ),
]
Weights = Annotated[
    list[str] | None,
    typer.Option("--weights", metavar="NAME=FILE", help="Weights of a model in the config.", rich_help_panel=_DATA),
]
ImageSources = Annotated[
    list[str] | None,
    typer.Option(
        "--source",
        metavar="NAME=DATA",
        help="Use other images in place of a source in the config.",
        rich_help_panel=_DATA,
    ),
]
Out = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Folder of results, one JSON file each.", rich_help_panel=_MODE)
]
Cache = Annotated[
    Path,
    typer.Option(
        "--cache", metavar="DIR", help="Folder of statistics and solutions that runs share.", rich_help_panel=_DATA
    ),
]
Only = Annotated[
    str,
    typer.Option(
        "--only", metavar="PATTERN", help="Compute only cells whose names match, such as '*CP*'.", rich_help_panel=_MODE
    ),
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Run a tiny version, to see that it works.", rich_help_panel=_MODE)
]
List = Annotated[
    bool, typer.Option("--list", help="List the experiments with their state; run nothing.", rich_help_panel=_MODE)
]
Table = Annotated[
    bool,
    typer.Option("--table", help="Show results beside the paper's as a table; run nothing.", rich_help_panel=_MODE),
]
To = Annotated[
    Path | None,
    typer.Option(
        "--to",
        metavar="FILE",
        help="Write --table to a .md or .html file, or as a figure to .svg or .png.",
        rich_help_panel=_MODE,
    ),
]


@command
def reproduce(
    screen: Screen,
    names: Names = None,
    config: ConfigName = _CONFIG,
    data: Data = None,
    model: Models = None,
    weights: Weights = None,
    source: ImageSources = None,
    out: Out = _OUT,
    cache: Cache = Path(".cache/reproduce"),
    only: Only = "*",
    quick: Quick = False,
    list_: List = False,
    table: Table = False,
    to: To = None,
    seed: Seed = 0,
    device: Device = None,
) -> None:
    """Run the paper's experiments, and turn their results into tables and figures.

    Each has two configs. 'substitute' runs on small models, and every output says
    so. 'paper' has the paper's own models, data and settings: give a folder with
    torchvision's checkpoints and the data sets as --data, or name what is stored
    elsewhere with --weights and --source. Patterns such as '*' match any name.

    Every result is written as soon as it is computed, so that the same command
    continues an interrupted run, and --only computes some of them.

    [bold]Examples[/bold]

      tensigma reproduce --list
      tensigma reproduce fisher Activation --data DIR
      tensigma reproduce all --data DIR --quick --out quick/
      tensigma reproduce beyond --data DIR --only 'ResNet-50* | BALF*'
      tensigma reproduce --table fisher
      tensigma reproduce --table all --to docs/paper.md
      tensigma reproduce alexnet --config paper --data DIR \\
          --weights alexnet=alexnet.pth --source 'imagenet-val=imagefolder:val'
    """
    if to is not None and not table:
        raise InputError("--to names a file for a table; add --table")
    configs = [_config(name, config, quick) for name in _chosen(names or [], config, listing=list_)]
    if list_:
        states = _states(configs, out, data, seed)
        screen.result("reproduce", {"config": config, "experiments": _facts(states)}, _overview(states))
        return
    if table:
        _show_results(screen, configs, out, to, seed)
        return
    overrides = ts.experiments.Overrides(
        models=_pairs("--model", model), weights=_pairs("--weights", weights), sources=_pairs("--source", source)
    )
    ready = _ready(screen, configs, out, data, seed, overrides)
    with screen.progress("reproducing") as progress:
        display = _Display(progress)
        results = ts.experiments.reproduce(
            ready,
            data=data,
            out=out,
            cache=cache,
            overrides=overrides,
            only=only,
            seed=seed,
            device=device,
            progress=display.cell,
            detail=display.within,
        )
    page = _page(screen, results, config, out, quick, seed)
    states = _states(ready, out, data, seed)
    facts = {"config": config, "out": str(out), "experiments": _facts(states)}
    screen.result("reproduce", facts, _overview(states) if len(results) != 1 else _markdown(results[0]))
    where = f"results are in {out}" + ("" if page is None else f", all of them on one page: {page}")
    screen.note(f"{where}; '{_command(names or [], config, out, quick, seed)}' shows them beside the paper's")


def _command(names: Sequence[str], config: str, out: Path, quick: bool, seed: int) -> str:
    """The command that shows these results."""
    words = ["tensigma", "reproduce", "--table", *names]
    words += ["--config", config] if config != _CONFIG else []
    words += ["--quick"] if quick else []
    words += ["--out", str(out)] if out != _OUT else []
    words += ["--seed", str(seed)] if seed else []
    return shlex.join(words)


def _page(
    screen: Screen, results: list[ts.experiments.Results], config: str, out: Path, quick: bool, seed: int
) -> Path | None:
    """Write one page about all results of this config in the folder, also those of earlier runs."""
    experiments = ts.experiments
    if config in experiments.CONFIGS:
        known = [name for name in experiments.NAMES if config in experiments.configs_of(name)]
        results = [experiments.Results.open(out, _config(name, config, quick), seed) for name in known]
    page = out / "report.html"
    try:
        experiments.write_html([result for result in results if result.cells], page)
    except MissingExtra as error:
        screen.warn(f"{page} is not written: {error}")
        return None
    return page


def _chosen(names: Sequence[str], config: str, *, listing: bool) -> Sequence[str]:
    experiments = ts.experiments
    if not names and not listing:
        raise InputError("name an experiment, or all; --list shows their names")
    if config not in experiments.CONFIGS and len(names) != 1:
        raise InputError(f"{config} is the config of one experiment; name that one")
    if not names:
        return [name for name in experiments.NAMES if config in experiments.configs_of(name)]
    return list(dict.fromkeys(name for word in names for name in (experiments.PAPER if word == ALL else (word,))))


class _Display:
    """Shows the progress of a run, and within long cells what they are doing."""

    def __init__(self, show: Callable[[Any], None]) -> None:
        self._show = show
        self._last: ts.experiments.ReproductionProgress | None = None

    def cell(self, state: ts.experiments.ReproductionProgress) -> None:
        self._last = state
        self._show(state)

    def within(self, state: ts.running.Progress) -> None:
        if self._last is None or self._last.done == self._last.total:
            return
        whole = step_of(self._last)
        self._show(replace(whole, text=f"{whole.text} ({state.title}, {state})"))


def _config(name: str, config: str, quick: bool) -> ts.experiments.Config:
    loaded = ts.experiments.load_config(name, config)
    return ts.experiments.quick_form(loaded) if quick else loaded


def _pairs(option: str, values: Sequence[str] | None) -> dict[str, str]:
    pairs = {}
    for text in values or ():
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise InputError(f"got {option} {text}; write {option} NAME=VALUE")
        pairs[name] = value
    return pairs


def _ready(
    screen: Screen,
    configs: list[ts.experiments.Config],
    out: Path,
    data: Path | None,
    seed: int,
    overrides: ts.experiments.Overrides,
) -> list[ts.experiments.Config]:
    """The experiments that can run; of several, the others are left out with a note."""
    ready = []
    for config in configs:
        needs = ts.experiments.state_of(config, out, data, seed).needs
        if needs is None or overrides.sources:
            ready.append(config)
        elif len(configs) == 1:
            folders = ", ".join(config.needs)
            raise InputError(f"{config.name} needs {needs}, which is not in the folder of --data ({folders}/)")
        else:
            screen.note(f"{config.name} is left out: it needs {needs}")
    return ready


def _states(
    configs: Sequence[ts.experiments.Config], out: Path, data: Path | None, seed: int
) -> list[ts.experiments.State]:
    return [ts.experiments.state_of(config, out, data, seed) for config in configs]


def _overview(states: Sequence[ts.experiments.State]) -> Columns:
    rows = [
        [
            state.name,
            f"{state.kind} {state.shown}",
            str(state.total),
            state.text,
            duration(state.seconds) if state.done else "",
        ]
        for state in states
    ]
    return Columns(["experiment", "shown", ">cells", "state", ">computed in"], rows)


def _facts(states: Sequence[ts.experiments.State]) -> list[dict[str, object]]:
    return [{**vars(state), "configs": ts.experiments.configs_of(state.name), "state": state.text} for state in states]


def _show_results(screen: Screen, configs: list[ts.experiments.Config], out: Path, to: Path | None, seed: int) -> None:
    results = [ts.experiments.Results.open(out, config, seed) for config in configs]
    if to is not None:
        _write(results, to)
    data = {
        "experiments": {result.config.name: ts.experiments.current_cells(result) for result in results},
        "to": None if to is None else str(to),
    }
    screen.result("reproduce", data, *(map(_markdown, results) if to is None else [f"written to {to}"]))


def _write(results: list[ts.experiments.Results], to: Path) -> None:
    figures = ts.report.SUFFIXES
    if to.suffix in figures:
        if len(results) != 1:
            raise InputError(f"{to}: a figure shows one experiment; name one instead of all")
        section = ts.experiments.section_of(results[0])
        if not section.panels:
            raise InputError(f"{section.name} has no figure to show; give --to the name of a .md or .html file")
        ts.report.draw(section.panels, to, title=section.figure_title)
    elif to.suffix == ".html":
        ts.experiments.write_html(results, to)
    elif to.suffix != ".md":
        raise InputError(f"{to}: a table is written to .md or .html, a figure to {' or '.join(figures)}")
    elif len(results) == 1:
        write_text(to, ts.experiments.markdown(ts.experiments.section_of(results[0]), alone=True))
    else:
        ts.experiments.write_page(results, to)


def _markdown(results: ts.experiments.Results) -> str:
    return ts.experiments.markdown(ts.experiments.section_of(results))

"""``tensigma reproduce``: the paper's tables and figures, from configs to results to pages."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tensigma.cli.command import command
from tensigma.cli.options import Device, Seed
from tensigma.cli.outputs import write_text
from tensigma.cli.progress import duration, step_of
from tensigma.cli.screen import Screen
from tensigma.cli.tables import Columns
from tensigma.errors import InputError, MissingExtra
from tensigma.experiments import (
    CONFIGS,
    NAMES,
    PAPER,
    Config,
    Overrides,
    ReproductionProgress,
    Results,
    State,
    configs_of,
    current_cells,
    load_config,
    markdown,
    quick_form,
    section_of,
    state_of,
    write_html,
    write_page,
)
from tensigma.experiments import reproduce as run
from tensigma.report import SUFFIXES, draw

ALL = "all"
_CONFIG, _OUT = "substitute", Path("results/paper")
_DATA, _MODE = "Models and data", "What to do"

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME…", show_default=False, help="Of those that --list shows, or all: the paper's."),
]
ConfigName = Annotated[
    str, typer.Option("--config", metavar="NAME|FILE", help="substitute, paper, or a TOML file.", rich_help_panel=_MODE)
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="DIR", help="Folder of models and images, {data} in the configs.", rich_help_panel=_DATA
    ),
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model", metavar="NAME=MODEL", help="Another model in place of one in the config.", rich_help_panel=_DATA
    ),
]
Weights = Annotated[
    list[str] | None,
    typer.Option("--weights", metavar="NAME=FILE", help="Weights of a model in the config.", rich_help_panel=_DATA),
]
Sources = Annotated[
    list[str] | None,
    typer.Option(
        "--source", metavar="NAME=DATA", help="Other images in place of a source in the config.", rich_help_panel=_DATA
    ),
]
Out = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Folder of results, one JSON each.", rich_help_panel=_MODE)
]
Cache = Annotated[
    Path,
    typer.Option(
        "--cache", metavar="DIR", help="Folder of statistics and solutions that runs share.", rich_help_panel=_DATA
    ),
]
Quick = Annotated[
    bool, typer.Option("--quick", help="A tiny form of the same, to see that it runs.", rich_help_panel=_MODE)
]
List = Annotated[bool, typer.Option("--list", help="Show all with their state; run nothing.", rich_help_panel=_MODE)]
Table = Annotated[
    bool,
    typer.Option("--table", help="Show results as a table beside the paper's; run nothing.", rich_help_panel=_MODE),
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
    source: Sources = None,
    out: Out = _OUT,
    cache: Cache = Path(".cache/reproduce"),
    quick: Quick = False,
    list_: List = False,
    table: Table = False,
    to: To = None,
    seed: Seed = 0,
    device: Device = None,
) -> None:
    """Run the paper's experiments, and turn their results into tables and figures.

    Each has two configs. 'substitute' runs on small models and says so in every
    output. 'paper' has the paper's own models, data and settings: give a folder
    with torchvision's checkpoints and the data sets as --data, or name what lies
    elsewhere with --weights and --source. Patterns such as '*' match any name.

    Every result is written at once: a run that was stopped goes on where it was.

    [bold]Examples[/bold]

      tensigma reproduce --list
      tensigma reproduce fisher Activation --data DIR
      tensigma reproduce all --data DIR --quick --out quick/
      tensigma reproduce --table fisher
      tensigma reproduce --table all --to docs/paper.md
      tensigma reproduce alexnet --config paper --data DIR \\
          --weights alexnet=alexnet.pth --source 'imagenet-val=imagefolder:val'
    """
    if to is not None and not table:
        raise InputError("--to says where a table is written; add --table")
    configs = [_config(each, config, quick) for each in _chosen(names or [], config, listing=list_)]
    if list_:
        _list(screen, [state_of(each, out, data, seed) for each in configs], config)
        return
    if table:
        _table(screen, configs, out, to, seed)
        return
    overrides = Overrides(
        models=_pairs("--model", model), weights=_pairs("--weights", weights), sources=_pairs("--source", source)
    )
    ready = _ready(screen, configs, out, data, seed, overrides)
    with screen.progress("reproducing") as progress:
        display = _Display(progress)
        found = run(
            ready,
            data=data,
            out=out,
            cache=cache,
            overrides=overrides,
            seed=seed,
            device=device,
            progress=display.cell,
            detail=display.within,
        )
    page = _page(screen, found, config, out, quick, seed)
    states = [state_of(each, out, data, seed) for each in ready]
    facts = {"config": config, "out": str(out), "experiments": [_facts(state) for state in states]}
    screen.result("reproduce", facts, _overview(states) if len(found) != 1 else _markdown(found[0]))
    where = f"results are in {out}" + ("" if page is None else f", all of them on one page: {page}")
    screen.note(f"{where}; {_command(names or [], config, out, quick, seed)} shows them beside the paper's")


def _command(names: Sequence[str], config: str, out: Path, quick: bool, seed: int) -> str:
    """What to type to see these very results."""
    words = ["tensigma", "reproduce", "--table", *names]
    words += ["--config", config] if config != _CONFIG else []
    words += ["--quick"] if quick else []
    words += ["--out", str(out)] if out != _OUT else []
    words += ["--seed", str(seed)] if seed else []
    return shlex.join(words)


def _page(screen: Screen, found: list[Results], config: str, out: Path, quick: bool, seed: int) -> Path | None:
    """One page: about everything in the folder that was made with this config, not only by this run."""
    results = found
    if config in CONFIGS:
        known = [name for name in NAMES if config in configs_of(name)]
        results = [Results.open(out, _config(name, config, quick), seed) for name in known]
    page = out / "report.html"
    try:
        write_html([each for each in results if each.cells], page)
    except MissingExtra as error:
        screen.warn(f"{page} is left out: {error}")
        return None
    return page


def _chosen(names: Sequence[str], config: str, *, listing: bool) -> Sequence[str]:
    if not names and not listing:
        raise InputError("name an experiment, or all; --list shows them")
    if config not in CONFIGS and len(names) != 1:
        raise InputError(f"{config} is the config of one experiment; name that one")
    if not names:
        return [each for each in NAMES if config in configs_of(each)]
    return list(dict.fromkeys(each for name in names for each in (PAPER if name == ALL else (name,))))


class _Display:
    """How far the run is, and within long cells what is going on."""

    def __init__(self, show: Callable[[Any], None]) -> None:
        self._show = show
        self._last: ReproductionProgress | None = None

    def cell(self, state: ReproductionProgress) -> None:
        self._last, self._begin = state, time.perf_counter()
        self._show(state)

    def within(self, state: Any) -> None:
        if self._last is None or self._last.done == self._last.total:
            return
        whole = step_of(self._last, 0.0)
        detail = step_of(state, time.perf_counter() - self._begin)
        title = getattr(state, "title", "")
        self._show(replace(whole, text=f"{whole.text} ({title + ', ' if title else ''}{detail.text})"))


def _config(name: str, config: str, quick: bool) -> Config:
    found = load_config(name, config)
    return quick_form(found) if quick else found


def _pairs(option: str, given: Sequence[str] | None) -> dict[str, str]:
    pairs = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise InputError(f"{option} {text!r} came; write {option} NAME=VALUE")
        pairs[name] = value
    return pairs


def _ready(
    screen: Screen, configs: list[Config], out: Path, data: Path | None, seed: int, overrides: Overrides
) -> list[Config]:
    """Those that can run; of several, the others are left out with a remark."""
    ready = []
    for config in configs:
        needs = state_of(config, out, data, seed).needs
        if needs is None or overrides.sources:
            ready.append(config)
        elif len(configs) == 1:
            folders = ", ".join(config.needs)
            raise InputError(f"{config.name} needs {needs}, which is not in the folder of --data ({folders}/)")
        else:
            screen.note(f"{config.name} is left out: it needs {needs}")
    return ready


def _list(screen: Screen, states: Sequence[State], config: str) -> None:
    screen.result(
        "reproduce", {"config": config, "experiments": [_facts(state) for state in states]}, _overview(states)
    )


def _overview(states: Sequence[State]) -> Columns:
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


def _facts(state: State) -> dict[str, object]:
    return {**vars(state), "configs": configs_of(state.name), "state": state.text}


def _table(screen: Screen, configs: list[Config], out: Path, to: Path | None, seed: int) -> None:
    results = [Results.open(out, config, seed) for config in configs]
    if to is not None:
        _write(results, to)
    data = {
        "experiments": {each.config.name: current_cells(each) for each in results},
        "to": None if to is None else str(to),
    }
    screen.result("reproduce", data, *([_markdown(each) for each in results] if to is None else [f"written to {to}"]))


def _write(results: list[Results], to: Path) -> None:
    if to.suffix in SUFFIXES:
        if len(results) != 1:
            raise InputError(f"{to}: a figure shows one experiment; name it instead of all")
        section = section_of(results[0])
        if not section.panels:
            raise InputError(f"{section.name} has no figure to show; give --to the name of a .md or .html file")
        draw(section.panels, to, title=section.figure_title)
    elif to.suffix == ".html":
        write_html(results, to)
    elif to.suffix != ".md":
        raise InputError(f"{to}: a table is written to .md or .html, a figure to {' or '.join(SUFFIXES)}")
    elif len(results) == 1:
        write_text(to, markdown(section_of(results[0]), alone=True))
    else:
        write_page(results, to)


def _markdown(results: Results) -> str:
    return markdown(section_of(results))

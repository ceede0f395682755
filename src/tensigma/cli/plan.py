"""``tensigma plan``: which layers, which format, which ranks, before anything is solved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from tensigma.calibration import Calibration
from tensigma.running import process_group, rank_and_size
from tensigma.cli.calibrate import run_calibration
from tensigma.cli.command import command
from tensigma.cli.loading import data_of, first_of, model_of
from tensigma.cli.options import BatchSize, BudgetOption, DataNames, Device, Force, Holdout, Layers, MaxSamples, MethodName, ModelName, NormName, RanksOption, Seed, Skip, Stats, Weigh, Weights, Workers
from tensigma.cli.outputs import check_file
from tensigma.cli.parsing import which_layers, which_skipped
from tensigma.cli.screen import Screen
from tensigma.cli.tables import plan_table
from tensigma.errors import InputError
from tensigma.layers import find_layers
from tensigma.planning import Budget, Drop, Plan, RankRule, SetAside
from tensigma.solving import norm_of
from tensigma.planning import plan as make_plan
from tensigma.layers import select
from tensigma.planning import in_words
from tensigma.report import percent

Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write the plan as JSON, to be kept or edited by hand.")
]


@command
def plan(
    screen: Screen,
    model: ModelName,
    budget: BudgetOption = None,
    ranks: RanksOption = None,
    method: MethodName = "auto",
    norm: NormName = "centred",
    layers: Layers = None,
    skip: Skip = None,
    weights: Weights = None,
    stats: Stats = None,
    data: DataNames = None,
    weigh: Weigh = None,
    holdout: Holdout = None,
    max_samples: MaxSamples = None,
    batch_size: BatchSize = 64,
    workers: Workers = 1,
    device: Device = None,
    seed: Seed = 0,
    out: Out = None,
    force: Force = False,
) -> None:
    """Decide what becomes of every layer, and show it. Nothing is compressed yet.

    Give one of --budget and --ranks, and the statistics to decide by: --stats,
    or --data to gather them now. Only --norm frobenius needs neither.

    [bold]Examples[/bold]

      tensigma plan torchvision:resnet18 --weights r18.pth --stats stats/ \\
          --budget params=0.5 --out plan.json
      tensigma plan zoo:digits-cnn --weights digits.pth \\
          --norm frobenius --ranks vbmf=0.8 --layers spatial

    As small as it can be without losing more than 1 % of the answers, or as much
    as it takes to need 60 % of the time on this machine:

      tensigma plan torchvision:resnet18 --weights r18.pth --stats stats/ \\
          --budget drop=0.01 --holdout imagefolder:others
      tensigma plan torchvision:resnet18 --weights r18.pth --stats stats/ \\
          --budget latency=0.6

    In the file, ranks, methods and norms may be changed by hand before
    'tensigma compress --plan plan.json' carries it out.
    """
    check_choice(budget=budget, ranks=ranks)
    if out is not None:
        check_file(out, force=force)
    network = model_of(screen, model, weights, device, seed)
    check_layers(network, layers, skip)
    images, tried = apart(budget, stats, data_of(data, batch_size, workers), data_of(holdout, batch_size, workers))
    check_weigh(weigh, budget, images if tried is None else tried)
    known = statistics(screen, network, stats, images, [norm], max_samples, device, seed)
    at_hand = trial_data(tried, first_of(images, max_samples))
    made = plan_as_asked(screen, network, known, budget, ranks, method, norm, layers, skip, seed, at_hand, weigh)
    if out is not None and screen.speaks:
        out.parent.mkdir(parents=True, exist_ok=True)
        made.save(out)
        screen.note(f"written to {out}")
    for note in plan_notes(made):
        screen.note(note)
    screen.result(
        "plan", {"model": model, "out": None if out is None else str(out), **plan_facts(made)}, plan_table(made)
    )


def check_choice(**given: Any) -> None:
    """Exactly one of the options must have been given."""
    names = " or ".join(f"--{name}" for name in given)
    came = [f"--{name}" for name, value in given.items() if value is not None]
    if len(came) != 1:
        raise typer.BadParameter(f"give exactly one of {names}; {' and '.join(came) or 'none'} came")


def check_absent(context: typer.Context, *names: str) -> None:
    """Nothing may be asked for that a plan has decided already."""
    came = [name for name in names if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if came:
        raise typer.BadParameter(
            f"--plan has decided what {' and '.join(f'--{name}' for name in came)} would; leave out one or the other, "
            "or edit the plan's file"
        )


def check_layers(model: nn.Module, layers: list[str] | None, skip: list[str] | None) -> None:
    """Refuse names and patterns that mean no layer, before long work starts."""
    names = [layer.name for layer in find_layers(model)]
    for option, asked in (("--layers", which_layers(layers)), ("--skip", which_skipped(skip))):
        if asked and asked not in ("all", "spatial"):
            select(asked, names, what=option)


def apart(budget: Budget | None, stats: Path | None, images: Any, holdout: Any) -> tuple[Any, Any]:
    """Data to calibrate with, and data on which ``--budget drop=X`` is searched."""
    if not isinstance(budget, Drop):
        if holdout is not None:
            raise typer.BadParameter("--holdout goes with --budget drop=X, which is searched on it")
        return images, None
    if holdout is not None:
        return images, holdout
    if stats is not None or images is None:
        raise InputError(
            "--budget drop=X is searched on images that had no part in calibration: give them with --holdout DATA, or "
            "give --data instead of --stats, of which every fifth batch is then held out"
        )
    aside = SetAside(images)
    return aside, aside


def check_weigh(weigh: bool | None, budget: Budget | None, images: Any) -> None:
    """Refuse ``--weigh`` where there is nothing to weigh or nothing to measure with."""
    if weigh and budget is None:
        raise typer.BadParameter("--weigh goes with --budget, which is shared out among the layers")
    if weigh and rank_and_size()[1] > 1:
        raise typer.BadParameter("--weigh works in one process; run it without torchrun")
    if weigh and images is None:
        raise typer.BadParameter("--weigh reads images, without their labels: name them with --data")


def trial_data(tried: Any, images: Any) -> Any:
    """What plans are tried on: the held-out data of a search, or the images at hand."""
    return tried.held if isinstance(tried, SetAside) else images if tried is None else tried


def statistics(
    screen: Screen,
    model: nn.Module,
    folder: Path | None,
    data: Any,
    norms: list[str],
    max_samples: int | None,
    device: Any,
    seed: int,
) -> Calibration | None:
    """Statistics from a folder, or gathered now where the norms need any; None where nothing is needed."""
    if folder is not None:
        found = Calibration.load(folder)
        found.check_model(model)
        return found
    if data is not None:
        fisher = next((norm_of(norm).fisher for norm in norms if norm_of(norm).fisher), None)
        with process_group(device):
            return run_calibration(screen, model, data, max_samples=max_samples, fisher=fisher, seed=seed)
    needy = [norm for norm in norms if norm_of(norm).needs_stats]
    if needy:
        raise InputError(
            f"the norm {needy[0]!r} needs statistics: give --stats DIR (from 'tensigma calibrate') or --data to gather "
            "them now; only --norm frobenius does without"
        )
    return None


def plan_as_asked(
    screen: Screen,
    model: nn.Module,
    stats: Calibration | None,
    budget: Budget | None,
    ranks: RankRule | None,
    method: str,
    norm: str,
    layers: list[str] | None,
    skip: list[str] | None,
    seed: int,
    data: Any = None,
    weigh: bool | None = None,
) -> Plan:
    """The plan that the options of a command line ask for; ``data`` is what plans are tried on."""
    with screen.progress("planning") as progress:
        return make_plan(
            model,
            stats,
            budget=budget,
            ranks=ranks,
            method=method,
            norm=norm,
            layers=which_layers(layers),
            skip=which_skipped(skip),
            options={"seed": seed},
            weights=None if weigh is False else "auto",
            data=data,
            progress=progress,
        )


def plan_notes(made: Plan) -> list[str]:
    """What was measured on the way to a plan, in words."""
    found = []
    if "latency" in made.notes:
        note = made.notes["latency"]
        before, after = (1000 * seconds for seconds in note["seconds"])
        found.append(
            f"the layers take {after:.3g} of {before:.3g} ms, a share of {after / before:.2f}, "
            f"in {note['runtime']} at batch {note['batch']}"
        )
    if "weighing" in made.notes:
        found.append(in_words(made.notes["weighing"]))
    if "drop" in made.notes:
        note = made.notes["drop"]
        beside = "" if note["measure"] == "agreement" else f", the original {percent(note['original'])}"
        found.append(f"{note['measure']} {percent(note['kept'])}{beside} on {note['samples']:,} held-out samples")
    return found


def plan_facts(made: Plan) -> dict[str, Any]:
    """Plain data about a plan."""
    return {
        "rate": made.rate,
        "params": [made.before.params, made.after.params],
        "macs": [made.before.macs, made.after.macs] if made.before.macs else None,
        "notes": made.notes,
        "layers": {name: entry.to_json() for name, entry in made.items()},
    }

"""``tensigma plan``: which layers, which format, which ranks, before anything is solved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from tensigma.calibration import Calibration
from tensigma.cli.calibrate import run_calibration
from tensigma.cli.command import command
from tensigma.cli.loading import data_of, first_of, model_of
from tensigma.cli.options import (
    BatchSize,
    BudgetOption,
    DataNames,
    Device,
    Force,
    Holdout,
    Layers,
    MaxSamples,
    MethodName,
    ModelName,
    NormName,
    RanksOption,
    Seed,
    Skip,
    Stats,
    Weigh,
    Weights,
    Workers,
)
from tensigma.cli.outputs import check_file
from tensigma.cli.parsing import which_layers, which_skipped
from tensigma.cli.screen import Screen
from tensigma.cli.tables import plan_table
from tensigma.planning import Budget, Drop, Plan, Prepared, RankRule, Recipe, plan_prepared, prepare, weighing_in_words
from tensigma.report import percent
from tensigma.running import process_group, rank_and_size

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
    recipe = recipe_of(budget, ranks, method, norm, layers, skip, seed, weigh)
    network = model_of(screen, model, weights, device, seed)
    images, tried = data_of(data, batch_size, workers), data_of(holdout, batch_size, workers)
    check_holdout(recipe, tried)
    check_weigh(weigh, recipe, images if tried is None else tried)
    sources = Sources(stats, images, tried, max_samples, seed, check=not force)
    prepared = sources.prepare(screen, network, recipe, device)
    chosen = make_plan(screen, network, recipe, prepared)
    if out is not None and screen.speaks:
        out.parent.mkdir(parents=True, exist_ok=True)
        chosen.save(out)
        screen.note(f"written to {out}")
    for note in plan_notes(chosen):
        screen.note(note)
    screen.result(
        "plan", {"model": model, "out": None if out is None else str(out), **plan_facts(chosen)}, plan_table(chosen)
    )


def check_choice(**choices: Any) -> None:
    """Exactly one of the options must have been given."""
    names = " or ".join(f"--{name}" for name in choices)
    present = [f"--{name}" for name, value in choices.items() if value is not None]
    if len(present) != 1:
        raise typer.BadParameter(f"give exactly one of {names}, not {' and '.join(present) or 'none'}")


def check_absent(context: typer.Context, *names: str) -> None:
    """Nothing may be asked for that a plan has decided already."""
    typed = [name for name in names if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if typed:
        raise typer.BadParameter(
            f"--plan has decided what {' and '.join(f'--{name}' for name in typed)} would; leave out one or the other, "
            "or edit the plan's file"
        )


def check_holdout(recipe: Recipe, holdout: Any) -> None:
    """Refuse ``--holdout`` where nothing is searched."""
    if holdout is not None and not isinstance(recipe.budget, Drop):
        raise typer.BadParameter("--holdout goes with --budget drop=X, which is searched on it")


def check_weigh(weigh: bool | None, recipe: Recipe, images: Any) -> None:
    """Refuse ``--weigh`` where there is nothing to weigh or nothing to measure with."""
    if weigh and recipe.budget is None:
        raise typer.BadParameter("--weigh goes with --budget, which is shared out among the layers")
    if weigh and rank_and_size()[1] > 1:
        raise typer.BadParameter("--weigh works in one process; run it without torchrun")
    if weigh and images is None:
        raise typer.BadParameter("--weigh reads images, without their labels: name them with --data")


def recipe_of(
    budget: Budget | None,
    ranks: RankRule | None,
    method: str,
    norm: str,
    layers: list[str] | None,
    skip: list[str] | None,
    seed: int,
    weigh: bool | None,
) -> Recipe:
    """The recipe that the options of a command line stand for."""
    return Recipe(
        budget=budget,
        ranks=ranks,
        method=method,
        norm=norm,
        layers=which_layers(layers),
        skip=which_skipped(skip),
        options={"seed": seed},
        weights=None if weigh is False else "auto",
    )


@dataclass(frozen=True)
class Sources:
    """Where statistics and images come from."""

    folder: Path | None
    images: Any
    holdout: Any
    max_samples: int | None
    seed: int
    check: bool

    @cached_property
    def stats(self) -> Calibration | None:
        """Statistics from a folder, where one was named."""
        return None if self.folder is None else Calibration.load(self.folder)

    def prepare(self, screen: Screen, model: nn.Module, recipe: Recipe, device: Any) -> Prepared:
        """What the library needs for ``recipe``, with calibration shown on the screen."""
        with process_group(device):
            return prepare(
                model,
                recipe,
                stats=self.stats,
                batches=self.images if self.max_samples is None else first_of(self.images, self.max_samples),
                trial_data=self.holdout,
                check=self.check,
                gather=self._gather(screen),
            )

    def gathered(self, screen: Screen, model: nn.Module, plan: Plan, device: Any) -> Calibration | None:
        """Statistics for carrying out ``plan``: from the folder, or gathered on the images where its norms need any."""
        norms = [entry.norm for entry in plan.compressed]
        if self.stats is not None or self.images is None:
            return self.stats
        fisher = next((norm.fisher for norm in norms if norm.fisher), None)
        with process_group(device):
            return self._gather(screen)(model, first_of(self.images, self.max_samples), fisher=fisher)

    def _gather(self, screen: Screen) -> Callable[..., Calibration]:
        def gather(model: nn.Module, batches: Any, *, fisher: Any, **_: Any) -> Calibration:
            return run_calibration(screen, model, batches, fisher=fisher, seed=self.seed)

        return gather


def make_plan(screen: Screen, model: nn.Module, recipe: Recipe, prepared: Prepared) -> Plan:
    """The plan that ``recipe`` asks for, with progress on the screen."""
    with screen.progress("planning") as progress:
        return plan_prepared(model, recipe, prepared, progress=progress)


def plan_notes(plan: Plan) -> list[str]:
    """What was measured on the way to a plan, in words."""
    notes = []
    if "latency" in plan.notes:
        note = plan.notes["latency"]
        before, after = (1000 * seconds for seconds in note["seconds"])
        notes.append(
            f"the layers take {after:.3g} of {before:.3g} ms, a share of {after / before:.2f}, "
            f"in {note['runtime']} at batch {note['batch']}"
        )
    if "weighing" in plan.notes:
        notes.append(weighing_in_words(plan.notes["weighing"]))
    if "drop" in plan.notes:
        note = plan.notes["drop"]
        beside = "" if note["measure"] == "agreement" else f", the original {percent(note['original'])}"
        notes.append(f"{note['measure']} {percent(note['kept'])}{beside} on {note['samples']:,} held-out samples")
    return notes


def plan_facts(plan: Plan) -> dict[str, Any]:
    """Plain data about a plan."""
    return {
        "rate": plan.rate,
        "params": [plan.before.params, plan.after.params],
        "macs": [plan.before.macs, plan.after.macs] if plan.before.macs else None,
        "notes": plan.notes,
        "layers": {name: entry.to_json() for name, entry in plan.items()},
    }

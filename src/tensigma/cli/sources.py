"""From the options of ``plan`` and ``compress`` to a plan: the recipe, the statistics and the images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import typer

import tensigma as ts
from tensigma.cli.calibrate import run_calibration
from tensigma.cli.loading import Network, first_of, name_of, own_share
from tensigma.cli.parsing import which_layers, which_skipped
from tensigma.cli.screen import Screen


def check_choice(**choices: Any) -> None:
    """Refuse none or several of these options."""
    names = ", ".join(f"--{name}" for name in choices)
    present = [f"--{name}" for name, value in choices.items() if value is not None]
    if len(present) != 1:
        raise typer.BadParameter(f"give exactly one of {names}; got {' and '.join(present) or 'none'}")


def check_absent(context: typer.Context, *names: str) -> None:
    """Refuse options that have no meaning beside ``--plan``."""
    typed = [name for name in names if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if typed:
        raise typer.BadParameter(
            f"--plan has decided what {' and '.join(f'--{name}' for name in typed)} would decide; leave one of them "
            "out, or edit the file of the plan"
        )


def check_resumable(cache: Path | None) -> None:
    """Refuse to resume without a folder that holds anything."""
    if cache is None:
        raise typer.BadParameter("--resume needs the --cache of the command that was interrupted")
    if not cache.is_dir() or not any(cache.iterdir()):
        raise typer.BadParameter(f"--resume: {cache} holds nothing to go on from; leave out --resume to start")


@contextmanager
def saying_how_to_resume(screen: Screen, cache: Path | None) -> Iterator[None]:
    """If the block fails or is interrupted, say what was kept."""
    try:
        yield
    except BaseException:
        if cache is not None and cache.exists():
            screen.note(f"{cache} holds what was computed so far; the same command goes on from there")
        raise


def with_bits(budget: ts.planning.Budget | None, bits: tuple[int, ...] | None) -> ts.planning.Budget | None:
    """``budget`` with the bits of ``--bits``.

    >>> with_bits(ts.Bytes(0.2) & ts.Macs(0.5), (4, 8)).parts[0]
    Bytes(share=0.2, bits=(4, 8))
    """
    if bits is None:
        return budget
    parts = budget.parts if isinstance(budget, ts.planning.CostBudget | ts.planning.AllOf) else ()
    changed = tuple(replace(part, bits=bits) if isinstance(part, ts.Bytes) else part for part in parts)
    if not any(isinstance(part, ts.Bytes) for part in parts):
        raise typer.BadParameter("--bits goes with --budget bytes=X, under which weights may take fewer bits")
    return changed[0] if len(changed) == 1 else ts.planning.AllOf(changed)


def recipe_of(
    budget: ts.planning.Budget | None,
    ranks: ts.planning.RankRule | None,
    method: str,
    norm: str,
    layers: list[str] | None,
    skip: list[str] | None,
    seed: int,
    weigh: bool | None,
    answers: ts.running.Kind | None = None,
) -> ts.Recipe:
    """The recipe that the options describe."""
    return ts.Recipe(
        budget=budget,
        ranks=ranks,
        method=method,
        norm=norm,
        layers=which_layers(layers),
        skip=which_skipped(skip),
        options={"seed": seed},
        weights=None if weigh is False else "auto",
        answers=answers,
    )


@dataclass(frozen=True)
class Planned:
    """A plan, and what it can be carried out with."""

    plan: ts.Plan
    stats: ts.Calibration | None
    #: Images on which layers may be fitted; None if there are none.
    fit_data: Any
    #: The name of the data on which plans were tried by a search; None without a search.
    searched_on: str | None

    @property
    def data_names(self) -> set[str]:
        """The names of all data that had a part in the plan and its statistics."""
        names = [
            None if self.stats is None else self.stats.data,
            None if self.fit_data is None else name_of(self.fit_data),
            self.searched_on,
            self.plan.notes.get("weighing", {}).get("data"),
        ]
        return {str(name) for name in names if name}


@dataclass(frozen=True)
class Sources:
    """The statistics and images of a command."""

    folder: Path | None
    images: Any
    holdout: Any
    max_samples: int | None
    seed: int
    device: Any
    #: Whether to refuse statistics and plans of other weights.
    check: bool
    #: Bytes that calibration may take.
    memory: int | None = None
    #: A folder for statistics, curves and solved layers; None to keep none.
    cache: Path | None = None

    @cached_property
    def stats(self) -> ts.Calibration | None:
        """The statistics in the folder; None without a folder."""
        return None if self.folder is None else ts.Calibration.load(self.folder)

    def plan(self, screen: Screen, model: Network, recipe: ts.Recipe, weigh: bool | None) -> Planned:
        """The plan that ``recipe`` asks for, after calibration if that is needed."""
        self._check_holdout(recipe)
        self._check_weigh(weigh, recipe)
        with ts.running.process_group(self.device):
            prepared = ts.planning.prepare(
                model,
                recipe,
                stats=self.stats,
                batches=first_of(self.images, self.max_samples),
                trial_data=self.holdout,
                check=self.check,
                gather=self._gather(screen),
            )
        prepared = replace(prepared, trial_data=own_share(screen, prepared.trial_data))
        with screen.progress("planning") as progress:
            solutions = None if self.cache is None else ts.solving.Solutions(self.cache)
            plan = ts.planning.plan_prepared(model, recipe, prepared, progress=progress, solutions=solutions)
        for note in _measured(plan):
            screen.note(note)
        searched = prepared.fit_data if isinstance(prepared.fit_data, ts.running.SetAside) else self.holdout
        fit_data = own_share(screen, prepared.fit_data)
        return Planned(plan, prepared.stats, fit_data, None if searched is None else name_of(searched))

    def load(self, screen: Screen, model: Network, plan: ts.Plan) -> Planned:
        """What ``plan`` can be carried out with, after calibration if there are images but no statistics."""
        plan.check_model(model, weights=self.check)
        images = first_of(self.images, self.max_samples)
        stats = self.stats
        if stats is None and images is not None:
            fisher = next((entry.norm.fisher for entry in plan.compressed if entry.norm.fisher), None)
            with ts.running.process_group(self.device):
                stats = self._gather(screen)(model, images, fisher=fisher)
        return Planned(plan, stats, own_share(screen, images), plan.notes.get("drop", {}).get("data"))

    def _gather(self, screen: Screen) -> Callable[..., ts.Calibration]:
        def gather(model: Network, batches: Any, *, fisher: Any, **_: Any) -> ts.Calibration:
            return run_calibration(
                screen, model, batches, fisher=fisher, seed=self.seed, memory=self.memory, cache=self.cache
            )

        return gather

    def _check_holdout(self, recipe: ts.Recipe) -> None:
        searches = isinstance(recipe.budget, ts.Drop)
        if self.holdout is not None and not searches:
            raise typer.BadParameter("--holdout goes with --budget drop=X, which is measured on it")
        if searches and self.holdout is None and (self.images is None or self.folder is not None):
            raise typer.BadParameter(
                "--budget drop=X is measured on images that had no part in calibration; name them with --holdout, or "
                "give --data without --stats, of which every fifth batch is then held out"
            )

    def _check_weigh(self, weigh: bool | None, recipe: ts.Recipe) -> None:
        if not weigh:
            return
        if recipe.budget is None:
            raise typer.BadParameter("--weigh goes with --budget, which is shared out among the layers")
        if self.images is None and self.holdout is None:
            raise typer.BadParameter("--weigh needs images, without labels; name them with --data")


def _measured(plan: ts.Plan) -> list[str]:
    """What was measured for a plan, and what it folds, in words."""
    notes = plan.folding.in_words()
    if "latency" in plan.notes:
        note = plan.notes["latency"]
        before, after = (1000 * seconds for seconds in note["seconds"])
        notes.append(
            f"the layers take {after:.3g} of {before:.3g} ms, a share of {after / before:.2f}, "
            f"in {note['runtime']} at batch {note['batch']}"
        )
    if "weighing" in plan.notes:
        notes.append(ts.planning.weighing_in_words(plan.notes["weighing"]))
    if "drop" in plan.notes:
        note = plan.notes["drop"]
        kept, samples = ts.report.percent(note["kept"]), f"{note['samples']:,} held-out samples"
        original = ts.report.percent(note["original"])
        beside = "" if note["measure"] == "agreement" else f" (original: {original})"
        notes.append(f"{note['measure']} {kept}{beside} on {samples}")
    if plan.compared:
        notes.append(f"compared: {plan.compared}")
    return notes

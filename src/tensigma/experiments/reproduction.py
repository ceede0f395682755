"""Running experiments cell by cell, going on where an earlier run stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

import torch

from tensigma.errors import InputError
from tensigma.experiments.accuracy import Accuracy
from tensigma.experiments.beyond import Beyond
from tensigma.experiments.kinds import Cell, Kind
from tensigma.experiments.layer_errors import LayerErrors
from tensigma.experiments.reconstruction import Reconstruction
from tensigma.experiments.results import Results
from tensigma.experiments.settings import Config
from tensigma.experiments.workshop import Overrides, Workshop
from tensigma.running import Progress

KINDS: dict[str, Kind] = {
    "accuracy": Accuracy(),
    "layers": LayerErrors(),
    "reconstruction": Reconstruction(),
    "beyond": Beyond(),
}


@dataclass(frozen=True, kw_only=True)
class ReproductionProgress(Progress):
    """A cell has begun or ended; steps are the cells of all experiments of this run.

    >>> print(ReproductionProgress(experiment="fisher", cell="α=0.5", done=3, total=9, computed=2, seconds=60.0))
    cell 3 of 9, 2.0 a minute, fisher: α=0.5
    """

    title: ClassVar[str] = "reproduction"

    experiment: str
    cell: str
    #: Cells computed by this run itself.
    computed: int

    @property
    def remaining(self) -> float | None:
        """Seconds to go, by the mean of the cells so far."""
        assert self.total is not None
        return self.seconds / self.computed * (self.total - self.done) if self.computed else None

    def __str__(self) -> str:
        rate = f", {60 * self.computed / self.seconds:.1f} a minute" if self.computed else ""
        return f"cell {self.done} of {self.total}{rate}, {self.experiment}: {self.cell}"


@dataclass(frozen=True, kw_only=True)
class State:
    """How far an experiment is."""

    name: str
    config: str
    kind: str
    title: str
    shown: str
    done: int
    total: int
    #: What is missing before it can run at all.
    needs: str | None
    seconds: float

    @property
    def text(self) -> str:
        """In words.

        >>> State(name="a", config="b", kind="c", title="d", shown="e", done=2, total=9, needs=None, seconds=0.0).text
        '2 of 9 cells'
        """
        if self.done == self.total:
            return "done"
        if self.done:
            return f"{self.done} of {self.total} cells"
        return "not run" if self.needs is None else f"needs {self.needs}"


def kind_of(config: Config) -> Kind:
    """The kind of an experiment, after checking that its config has what that needs."""
    if config.kind not in KINDS:
        raise InputError(f"{config.name} ({config.config}): kind {config.kind!r} is unknown; use {', '.join(KINDS)}")
    kind = KINDS[config.kind]
    kind.check(config)
    return kind


def state_of(config: Config, out: Path, data: Path | None = None, seed: int = 0) -> State:
    """How far an experiment is, by the results in ``out``."""
    cells = kind_of(config).cells(config, seed)
    results = Results.open(out, config, seed)
    missing = [] if data is None else [what for folder, what in config.needs.items() if not (data / folder).exists()]
    if data is None:
        missing = list(config.needs.values())
    return State(
        name=config.name,
        config=config.config,
        kind=config.kind,
        title=config.title,
        shown=config.shown,
        done=sum(map(results.has, cells)),
        total=len(cells),
        needs=", ".join(missing) or None,
        seconds=results.seconds,
    )


def current_cells(results: Results) -> dict[str, dict[str, Any]]:
    """The cells that were computed with the settings of the config as it is now, in its order."""
    cells = kind_of(results.config).cells(results.config, results.seed)
    return {cell.key: results.cells[cell.key] for cell in cells if results.has(cell)}


def reproduce(
    configs: list[Config],
    *,
    data: Path | None,
    out: Path,
    cache: Path,
    overrides: Overrides | None = None,
    only: str = "*",
    seed: int = 0,
    device: torch.device | None = None,
    progress: Callable[[ReproductionProgress], None] = lambda state: None,
    detail: Callable[[Any], None] | None = None,
) -> list[Results]:
    """Compute what is missing of several experiments, and write each cell as soon as it is there.

    Args:
        data: The folder that ``{data}`` stands for in the configs.
        out: Where results are written, one JSON file for each experiment.
        cache: Where statistics, solutions and accuracies are kept for other experiments and later runs.
        only: A pattern of the names of cells; others are left for another run.
        progress: Called before and after each cell; ``detail`` with what the library reports in between.
    """
    results = [Results.open(out, config, seed) for config in configs]
    todo: list[list[Cell]] = []
    total = 0
    for config, found in zip(configs, results, strict=True):
        wanted = [cell for cell in kind_of(config).cells(config, seed) if fnmatchcase(cell.key, only)]
        todo.append([cell for cell in wanted if not found.has(cell)])
        total += len(wanted)
    if configs and not total:
        example = kind_of(configs[0]).cells(configs[0], seed)[-1].key
        raise InputError(
            f"{{only}} matches no cell; they have names such as {example!r}", parameters=(f"only={only!r}",)
        )
    done, computed, start = total - sum(map(len, todo)), 0, time.perf_counter()

    def tell(experiment: str, cell: str) -> None:
        progress(
            ReproductionProgress(
                experiment=experiment,
                cell=cell,
                done=done,
                total=total,
                computed=computed,
                seconds=time.perf_counter() - start,
            )
        )

    for config, found, cells in zip(configs, results, todo, strict=True):
        kind = kind_of(config)
        workshop = Workshop(data, cache, overrides=overrides, limit=config.limit, device=device, report=detail)
        for cell in cells:
            tell(config.name, cell.key)
            begin = time.perf_counter()
            found.add(cell, kind.run(config, cell, workshop), time.perf_counter() - begin)
            done, computed = done + 1, computed + 1
            tell(config.name, cell.key)
        found.arrange(kind.cells(config, seed))
    return results

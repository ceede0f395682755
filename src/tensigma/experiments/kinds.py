"""What every kind of experiment offers: cells, each computed on its own, and how they become a table or a figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tensigma.experiments.settings import Config, Study
from tensigma.experiments.workshop import Workshop
from tensigma.report import Panel, Table
from tensigma.running import Digest

Cells = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One result to be computed. ``settings`` is all it depends on, as plain data."""

    key: str
    #: Which of the studies of the config it belongs to.
    study: int
    settings: Mapping[str, Any]

    @property
    def stamp(self) -> str:
        """A hash of the settings: a stored cell counts only while it still has the same one."""
        return Digest(8).add(self.settings).text


class Kind(Protocol):
    """One kind of experiment."""

    def check(self, config: Config) -> None:
        """Refuse a config that lacks what this kind needs."""
        ...

    def cells(self, config: Config, seed: int) -> list[Cell]:
        """What is to be computed, in order."""
        ...

    def run(self, config: Config, cell: Cell, workshop: Workshop) -> dict[str, Any]:
        """Compute one cell: plain data."""
        ...

    def tables(self, config: Config, cells: Cells) -> list[Table]:
        """The table."""
        ...

    def panels(self, config: Config, cells: Cells) -> list[Panel]:
        """The figure."""
        ...


def facts_of(config: Config, study: Study) -> dict[str, Any]:
    """What all cells of a study depend on."""
    model = config.models[study.model]
    train = model.train and {**vars(model.train), "source": config.sources[model.train.source]}
    return {
        "model": [model.spec, model.weights, train],
        "evaluation": study.evaluation and config.sources[study.evaluation],
        "layers": config.layers,
        "limit": config.limit,
        **({} if model.runtime is None else {"runtime": model.runtime}),
    }

"""Results on disk: one JSON file for each experiment, complete after every cell."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tensigma.errors import StoreError
from tensigma.experiments.catalogue import plain
from tensigma.experiments.kinds import Cell
from tensigma.experiments.settings import Config
from tensigma.files import read_json, whole_file

FORMAT = "tensigma-experiment"
VERSION = 1


@dataclass
class Results:
    """The cells of one experiment that are there already."""

    file: Path
    config: Config
    seed: int = 0
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0

    def has(self, cell: Cell) -> bool:
        """Whether a cell is there, computed with the settings it has now."""
        return self.cells.get(cell.key, {}).get("stamp") == cell.stamp

    def add(self, cell: Cell, found: Mapping[str, Any], seconds: float) -> None:
        """Put a cell in its place and write the file."""
        self.cells[cell.key] = {**found, "took": round(seconds, 2), "stamp": cell.stamp}
        self.seconds += seconds
        self.write()

    def arrange(self, cells: list[Cell]) -> None:
        """Cells in the order of the config, without those that it no longer has."""
        self.cells = {cell.key: self.cells[cell.key] for cell in cells if self.has(cell)}
        self.write()

    def write(self) -> None:
        """Write all that is there, in one step."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "name": self.config.name,
            "config": self.config.config,
            "substitute": self.config.substitute,
            "quick": self.config.quick,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "versions": {name: version(name) for name in ("tensigma", "torch", "numpy")},
            "machine": {
                "processor": platform.machine(),
                "cpus": os.cpu_count(),
                "threads": torch.get_num_threads(),
                "python": platform.python_version(),
            },
            "settings": plain(self.config),
            "cells": self.cells,
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(self.file) as partial:
            partial.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def open(cls, folder: Path, config: Config, seed: int = 0) -> Results:
        """What is there of an experiment; refused where the file holds results of something else."""
        parts = [config.name, *([] if config.config == "substitute" else [config.config]), *(["quick"] * config.quick)]
        file = folder / f"{'.'.join(parts)}.json"
        if not file.exists():
            return cls(file, config, seed)
        content = read_results(file)
        for key, own in (("config", config.config), ("quick", config.quick), ("seed", seed)):
            if content.get(key) != own:
                stored = f"{key} {content.get(key)!r}"
                raise StoreError(
                    f"{file} holds results with {stored}, not {own!r}; choose another {{out}}",
                    parameters=("out",),
                )
        return cls(file, config, seed, content["cells"], content["seconds"])


def read_results(file: Path) -> dict[str, Any]:
    """The content of a file of results."""
    content = read_json(file)
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("version") != VERSION:
        raise StoreError(
            f"{file} holds no results of an experiment (version {VERSION}); choose another {{out}}", parameters=("out",)
        )
    return content

"""Unfinished calibrations on disk, so that a killed run can resume."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tensigma.calibration.layer_stats import LayerStats
from tensigma.calibration.stats import Calibration, StoredLayers
from tensigma.calibration.store import MANIFEST, read_manifest, write_store
from tensigma.errors import StoreError
from tensigma.files import sweep
from tensigma.layers import first_difference


@dataclass(frozen=True, kw_only=True)
class State:
    """State of a calibration: statistics of the finished passes and of the first ``batches`` of the current one."""

    layers: Mapping[str, LayerStats] = field(default_factory=dict)
    finished_passes: int = 0
    batches: int = 0
    samples: int = 0
    #: Digest of these batches or, between two passes, of all; None if unknown.
    inputs: str | None = None
    #: State of torch's generator before the first batch, so that a shuffling loader repeats its order.
    rng: Tensor = field(default_factory=torch.get_rng_state)


class Checkpoint:
    """A folder that holds the latest state of one calibration, always complete."""

    def __init__(self, folder: str | Path, *, fingerprint: Mapping[str, str], options: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.fingerprint = dict(fingerprint)
        #: Settings that must be the same when the run resumes.
        self.options = dict(options)

    def save(self, state: State) -> None:
        """Write the state next to the previous one, then remove the previous one."""
        older = self._steps()
        step = int(older[-1].name.partition("-")[2]) + 1 if older else 1
        manifest = {
            **Calibration(state.layers, fingerprint=self.fingerprint)._manifest(),
            "kind": "checkpoint",
            "options": self.options,
            "finished_passes": state.finished_passes,
            "batches": state.batches,
            "samples": state.samples,
            "rng": state.rng.tolist(),
            **({} if state.inputs is None else {"inputs": state.inputs}),
        }
        parts = Calibration(state.layers)._parts()
        write_store(self.folder / f"step-{step:06d}", manifest, parts)
        for folder in older:
            shutil.rmtree(folder, ignore_errors=True)

    def load(self, *, resume: bool) -> State | None:
        """The latest state, or None if there is none. Raises if there is one and ``resume`` is not set."""
        steps = self._steps()
        if not steps:
            return None
        if not resume:
            raise StoreError(
                f"{self.folder} holds a checkpoint; pass {{resume}} to continue from it, or remove the folder",
                parameters=("resume=True",),
            )
        manifest = read_manifest(steps[-1])
        missing = [key for key in ("options", "finished_passes", "batches", "rng") if key not in manifest]
        if manifest["kind"] != "checkpoint" or missing:
            raise StoreError(f"{steps[-1]} is not a checkpoint of a calibration; remove the folder to start over")
        difference = first_difference(manifest["fingerprint"], self.fingerprint, "the checkpoint", "the model")
        if difference:
            raise StoreError(f"the checkpoint {steps[-1]} belongs to another architecture: {difference}")
        for key, value in self.options.items():
            if manifest["options"].get(key) != value:
                raise StoreError(
                    f"the checkpoint {steps[-1]} was made with {key}={manifest['options'].get(key)!r}, this run has"
                    f" {key}={value!r}; resume with the same settings, or remove the folder"
                )
        rng = torch.tensor(manifest["rng"], dtype=torch.uint8)
        try:
            torch.Generator().set_state(rng)
        except RuntimeError as error:
            raise StoreError(f"{steps[-1]} is damaged: its state of torch's generator is none: {error}") from error
        layers = StoredLayers(steps[-1], manifest["layers"])
        return State(
            # The next step takes the place of this one.
            layers={name: stats.in_memory() for name, stats in layers.items()},
            finished_passes=manifest["finished_passes"],
            batches=manifest["batches"],
            samples=manifest["samples"],
            inputs=manifest.get("inputs"),
            rng=rng,
        )

    def other_batches(self) -> StoreError:
        """The error of a run that is resumed with other data."""
        return StoreError(
            f"the checkpoint {self.folder} was made with other batches than those of this run; resume with the same "
            "data in the same order, or remove the folder"
        )

    def _steps(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step-*") if path.is_dir())


def remove_checkpoint(folder: str | os.PathLike[str]) -> None:
    """Remove the state of an unfinished calibration, and the folder if nothing else is in it."""
    place = Path(folder)
    # One of each process, where several have calibrated together.
    for part in (*place.glob("rank-*-of-*"), place):
        for step in part.glob("step-*"):
            if (step / MANIFEST).is_file():
                shutil.rmtree(step, ignore_errors=True)
        sweep(part)
        # Of a process that was killed while it wrote a step; the next step would have taken it over.
        for claim in part.glob(".step-*.claim"):
            with suppress(OSError):
                claim.unlink()
        with suppress(OSError):
            part.rmdir()

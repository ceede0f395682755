"""Solutions on disk, one small file each, found again by what went into them.

The key of a solution is a hash of the weights, the statistics and everything that tells the solver what to do, so a
file is never out of date: whatever changes gives another name. A folder can be shared by runs, also at the same time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tensigma.calibration import LayerStats
from tensigma.errors import StoreError
from tensigma.planning import Entry
from tensigma.planning.solve import Solution, solve

logger = logging.getLogger(__name__)

# Raised when what is stored, or what solvers make of the same input, changes.
_VERSION = 1


class Cache:
    """A folder of solutions."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"the cache {self.folder} cannot be made: {error.strerror or error}") from error

    def get_or_solve(self, entry: Entry, module: nn.Module, stats: LayerStats | None) -> tuple[Solution, bool]:
        """The solution for a layer, and whether it was there already."""
        file = self.folder / f"{key_of(entry, module, stats)}.safetensors"
        found = _read(file, entry)
        if found is not None:
            return found, True
        solution = solve(entry, module, stats)
        _write(file, solution)
        return solution, False


def key_of(entry: Entry, module: nn.Module, stats: LayerStats | None) -> str:
    """A hash of all that a solution depends on."""
    assert entry.geometry is not None
    assert entry.method is not None
    facts = {
        "cache": _VERSION,
        "library": version("tensigma"),
        "geometry": asdict(entry.geometry),
        "method": entry.method.name,
        "ranks": entry.ranks,
        "norm": entry.norm.name,
        "options": {key: repr(value) for key, value in sorted(entry.options.items())},
        "input_shape": None if stats is None else stats.input_shape,
    }
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=20)
    tensors: list[Tensor | None] = [module.weight, module.bias]  # type: ignore[list-item]
    if stats is not None:
        tensors += [stats.mean, stats.rows if stats.rows is not None else stats.covariance]
        if entry.norm.weighs_entries:
            tensors += [stats.fisher, stats.output_abs_mean]
    for tensor in tensors:
        _update(digest, tensor)
    return digest.hexdigest()


def _update(digest: hashlib.blake2b, tensor: Tensor | None) -> None:
    if tensor is None:
        digest.update(b"none")
        return
    plain = tensor.detach().cpu().contiguous()
    digest.update(f"{plain.dtype} {tuple(plain.shape)}".encode())
    digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)


def _write(file: Path, solution: Solution) -> None:
    # Of its own for every thread and process, so that two who solve the same layer do not meet.
    partial = file.with_suffix(f".partial-{os.getpid()}-{threading.get_ident()}")
    tensors = {key: tensor.cpu() for key, tensor in solution.tensors().items()}
    try:
        save_file(tensors, partial, metadata={"solution": json.dumps(solution.facts())})
        partial.replace(file)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise StoreError(f"the cache cannot be written to: {error}") from error


def _read(file: Path, entry: Entry) -> Solution | None:
    """The solution in ``file``; None where there is none, or none that can be read."""
    if not file.is_file():
        return None
    try:
        with safe_open(file, framework="pt") as stored:
            facts = json.loads(stored.metadata()["solution"])
            tensors = {key: stored.get_tensor(key) for key in stored.keys()}
        return Solution.rebuilt(entry, tensors, facts)
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError, TypeError) as error:
        logger.warning("%s: the cached solution %s cannot be read (%s); solving again", entry.name, file.name, error)
        return None

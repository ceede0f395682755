"""Solutions, looked up by what they were computed from, in memory and optionally on disk.

The key of a solution is a digest of the weights, the statistics and everything that tells the solver what to do, so a
stored solution is never out of date: any change gives another key. On disk each solution is one small file, and runs
can share a folder, even at the same time.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from weakref import WeakKeyDictionary

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tensigma.calibration import LayerStats
from tensigma.errors import InputError, StoreError
from tensigma.files import (
    SEAL,
    check_seal,
    flag,
    mapping,
    number,
    optional,
    parse_json,
    record,
    seal,
    sweep,
    text,
    whole_file,
)
from tensigma.layers import Format
from tensigma.running import Digest, content_digests
from tensigma.solving.solution import Solution, frobenius_error, rounded, solve
from tensigma.solving.treatment import Treatment

logger = logging.getLogger(__name__)

# Increased when the stored data changes, or what solvers return for the same input.
_VERSION = 4


class Solutions:
    """Solved layers, so that none is solved twice.

    >>> from tensigma.layers import Geometry
    >>> from tensigma.solving import method_of, norm_of
    >>> layer, svd = nn.Linear(8, 6), method_of("svd")
    >>> treatment = Treatment(
    ...     geometry=Geometry.of(layer), method=svd, norm=norm_of("frobenius"), format=svd.format((2,))
    ... )
    >>> solutions = Solutions()
    >>> [solutions.get_or_solve(treatment, layer, None)[1] for _ in range(2)]
    [False, True]
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self._memory: dict[str, Solution] = {}
        # By layer, method and format: the latest modules.
        self._starts: dict[tuple[str | None, str, Format], nn.Sequential] = {}
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(f"the cache {self.folder} cannot be created: {error.strerror or error}") from error
            sweep(self.folder)

    def get_or_solve(
        self,
        treatment: Treatment,
        module: nn.Module,
        stats: LayerStats | None,
        *,
        name: str | None = None,
        keep: bool = True,
    ) -> tuple[Solution, bool]:
        """The solution for a layer, and whether it was known already; the caller owns its modules.

        A solver starts from an earlier solution for the layer ``name`` in the same format, computed for other weights
        or with fewer steps, if there is one. Without ``keep`` the solution is written to the folder but not kept in
        memory.
        """
        start = self._starts.get((name, treatment.method.name, treatment.format)) if name is not None else None
        if not keep and not self._memory and self.folder is None:
            return solve(treatment, module, stats, start), False
        key = key_of(treatment, module, stats)
        if key in self._memory:
            return _copy(self._memory[key]), True
        solution = None if self.folder is None else _read(self._file(key), treatment, module)
        cached = solution is not None
        if solution is None:
            if treatment.bits is None:
                solution = solve(treatment, module, stats, start)
            else:
                # The factors before rounding serve for other bits too, and as a start.
                plain, _ = self.get_or_solve(treatment.unrounded(), module, stats, name=name, keep=keep)
                solution = rounded(plain, treatment, module, stats)
            if self.folder is not None:
                _write(self._file(key), solution)
        if keep:
            self._memory[key] = kept = _copy(solution)
            if name is not None and treatment.bits is None:
                self._starts[name, treatment.method.name, treatment.format] = kept.modules
        return solution, cached

    def on_disk(self, folder: str | os.PathLike[str]) -> Solutions:
        """The same solutions, from now on also kept in a folder."""
        other = Solutions(folder)
        other._memory, other._starts = self._memory, self._starts
        return other

    def _file(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{key}.safetensors"


def _copy(solution: Solution) -> Solution:
    # Putting modules into a model moves them to its device and precision.
    return replace(solution, modules=copy.deepcopy(solution.modules))


def key_of(treatment: Treatment, module: nn.Module, stats: LayerStats | None) -> str:
    """A digest of the problem; the start of the solver is not part of it."""
    facts = {
        "cache": _VERSION,
        "library": version("tensigma"),
        "geometry": asdict(treatment.geometry),
        "method": treatment.method.name,
        "ranks": treatment.ranks,
        "norm": treatment.norm.name,
        **({} if treatment.bits is None else {"bits": treatment.bits}),
        "options": {key: repr(value) for key, value in sorted(treatment.options.items())},
        "stats": None if stats is None else stats_digest(stats, weighs_entries=treatment.norm.weighs_entries),
    }
    digest = Digest(20).add(facts)
    for tensor in (module.weight, module.bias):
        assert tensor is None or isinstance(tensor, Tensor)
        digest.add(tensor)
    return digest.text


# Hashing the moments of a wide layer takes as long as solving a small layer.
_digests: WeakKeyDictionary[LayerStats, dict[bool, str]] = WeakKeyDictionary()


def stats_digest(stats: LayerStats, *, weighs_entries: bool) -> str:
    """A digest of the moments of a layer, and of what weighs single entries if that matters."""
    digests = _digests.setdefault(stats, {})
    if weighs_entries not in digests:
        digest = Digest(20).add(stats.input_shape).add((stats.count, stats.samples)).add(stats.mean)
        digest.add(stats.rows if stats.rows is not None else stats.covariance)
        if weighs_entries:
            digest.add(stats.fisher).add(stats.output_abs_mean)
        digests[weighs_entries] = digest.text
    return digests[weighs_entries]


def _write(file: Path, solution: Solution) -> None:
    tensors = {key: tensor.cpu() for key, tensor in solution.tensors().items()}
    # Not waiting for the disk: a solution cut short by a power cut is noticed and solved again.
    with whole_file(file, durable=False) as partial:
        sealed = seal({**solution.facts(), "tensors": content_digests(tensors)})
        save_file(tensors, partial, metadata={"solution": json.dumps(sealed)})


_FACTS = record(
    {
        "error": optional(number(0)),
        "frobenius_error": number(0),
        "converged": flag,
        "seconds": number(0),
        "tensors": mapping(text()),
        SEAL: text(),
    }
)
# Errors are computed in the precision of the solver, which may be higher than that of the stored weights.
_ERROR_TOLERANCE = {"rel_tol": 1e-2, "abs_tol": 1e-3}


def _check_error(solution: Solution, treatment: Treatment, module: nn.Module) -> None:
    """Refuse a solution whose error on the weights is not the one it was stored with."""
    error = frobenius_error(treatment, module, solution.modules)
    if not math.isclose(error, solution.frobenius_error, **_ERROR_TOLERANCE):
        raise StoreError(f"its error is {error:.4g}, and {solution.frobenius_error:.4g} was noted")


def _read(file: Path, treatment: Treatment, module: nn.Module) -> Solution | None:
    """The solution in ``file``; None if it is missing, damaged or not a solution of this layer."""
    if not file.is_file():
        return None
    try:
        with safe_open(file, framework="pt") as stored:
            facts = _FACTS(parse_json((stored.metadata() or {}).get("solution", "null")), "its header")
            tensors = {key: stored.get_tensor(key) for key in stored.keys()}
        check_seal(facts, "its header")
        if content_digests(tensors) != facts["tensors"]:
            raise StoreError("its tensors do not match their digests")
        solution = Solution.rebuilt(
            treatment, tensors, {key: facts[key] for key in facts if key not in (SEAL, "tensors")}
        )
        _check_error(solution, treatment, module)
        return solution
    # RuntimeError: torch, where tensors do not fit the modules.
    except (OSError, SafetensorError, StoreError, InputError, RuntimeError) as error:
        logger.warning(
            "the cached solution %s (%s) cannot be read and is solved again: %s", file.name, treatment.label, error
        )
        return None

"""Solving many layers: small ones in parallel, large ones in turn with all threads."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from tensigma.calibration import LayerStats
from tensigma.errors import InputError, TensigmaError
from tensigma.layers import Geometry, replace_
from tensigma.running import Listener, WeightedProgress, copied, silent
from tensigma.solving.parallel import side_by_side, work_of
from tensigma.solving.solution import Solution
from tensigma.solving.solution_store import Solutions
from tensigma.solving.treatment import Treatment


@dataclass(frozen=True, kw_only=True)
class CompressionProgress(WeightedProgress):
    """A layer has been solved.

    >>> print(CompressionProgress(layer="conv1", done=1, total=4, work=0.1, seconds=2.0, error=0.25))
    layer 1 of 4, conv1, error 0.250
    """

    title: ClassVar[str] = "compression"

    layer: str
    error: float | None = None
    cached: bool = False

    def __str__(self) -> str:
        error = "" if self.error is None else f", error {self.error:.3f}"
        return f"layer {self.done} of {self.total}, {self.layer}{error}{' (cached)' if self.cached else ''}"


@dataclass(frozen=True, eq=False)
class Job:
    """One layer to solve."""

    name: str
    treatment: Treatment
    module: nn.Module = field(repr=False)
    stats: LayerStats | None = field(repr=False)

    @property
    def geometry(self) -> Geometry:
        return self.treatment.geometry

    @property
    def work(self) -> int:
        """A rough count of operations, for sharing out work and estimating time."""
        return work_of(self.geometry)

    def run(self, solutions: Solutions, *, keep: bool = True) -> tuple[Solution, bool]:
        """The solution, and whether it was known already."""
        try:
            return solutions.get_or_solve(self.treatment, self.module, self.stats, name=self.name, keep=keep)
        except TensigmaError as error:
            raise error.prefixed(f"{self.name}: ") from error


def jobs_for(
    model: nn.Module, treatments: Mapping[str, Treatment], stats: Mapping[str, LayerStats] | None
) -> list[Job]:
    """The layers of ``model`` to be solved, each with its own statistics."""
    jobs = []
    for name, treatment in treatments.items():
        layer_stats = None if stats is None else stats.get(name)
        if layer_stats is None and treatment.norm.needs_stats:
            raise InputError(
                f"{name}: the plan's norm {treatment.norm.name!r} needs statistics of this layer, and there are none; "
                "calibrate with data that reaches it"
            )
        jobs.append(Job(name, treatment, model.get_submodule(name), layer_stats))
    return jobs


def run_jobs(
    jobs: Sequence[Job],
    *,
    solutions: Solutions,
    keep: bool = True,
    workers: int | None = None,
    report: Listener = silent,
) -> dict[str, tuple[Solution, bool]]:
    """Solve all jobs; solutions in the order of the jobs, each with whether it was known already.

    Without ``keep`` they are not kept in memory for later.
    """
    solved: dict[str, tuple[Solution, bool]] = {}
    total_work = sum(job.work for job in jobs)
    start = time.perf_counter()
    done_work = 0

    def done(job: Job, result: tuple[Solution, bool]) -> None:
        nonlocal done_work
        solved[job.name] = result
        done_work += job.work
        report(
            CompressionProgress(
                layer=job.name,
                done=len(solved),
                total=len(jobs),
                work=done_work / total_work,
                seconds=time.perf_counter() - start,
                error=result[0].error,
                cached=result[1],
            )
        )

    def run(job: Job) -> tuple[Solution, bool]:
        return job.run(solutions, keep=keep)

    side_by_side(jobs, run, geometry=lambda job: job.geometry, workers=workers, done=done)
    return {job.name: solved[job.name] for job in jobs}


def compressed_copy(
    model: nn.Module,
    treatments: Mapping[str, Treatment],
    stats: Mapping[str, LayerStats] | None,
    solutions: Solutions,
    *,
    workers: int | None = None,
) -> nn.Module:
    """A copy of ``model`` with these layers compressed, each fitted on its own."""
    solved = run_jobs(jobs_for(model, treatments, stats), solutions=solutions, workers=workers)
    small = copied(model, shared=solved)
    replace_(small, {name: solution.modules for name, (solution, _) in solved.items()})
    return small

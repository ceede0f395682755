"""Solving many layers: small ones side by side, large ones one after the other with all threads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from tensigma.calibration import LayerStats
from tensigma.errors import TensigmaError
from tensigma.layers import Geometry
from tensigma.pipeline.cache import Cache
from tensigma.pipeline.progress import CompressionProgress, Reporter
from tensigma.planning import Entry
from tensigma.planning.parallel import side_by_side, work_of
from tensigma.planning.solve import Solution, solve


@dataclass(frozen=True, eq=False)
class Job:
    """One layer to solve."""

    entry: Entry
    module: nn.Module = field(repr=False)
    stats: LayerStats | None = field(repr=False)

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def geometry(self) -> Geometry:
        assert self.entry.geometry is not None
        return self.entry.geometry

    @property
    def work(self) -> int:
        """A rough count of operations, for sharing and for estimates of time."""
        return work_of(self.geometry)

    def run(self, cache: Cache | None) -> tuple[Solution, bool]:
        """The solution, and whether it was found in the cache."""
        try:
            if cache is None:
                return solve(self.entry, self.module, self.stats), False
            return cache.get_or_solve(self.entry, self.module, self.stats)
        except TensigmaError as error:
            raise type(error)(f"{self.name}: {error}") from error


def run_jobs(
    jobs: Sequence[Job], *, cache: Cache | None, workers: int | None, report: Reporter
) -> dict[str, tuple[Solution, bool]]:
    """Solve all jobs; solutions in the order of the jobs."""
    solved: dict[str, tuple[Solution, bool]] = {}
    total_work = sum(job.work for job in jobs)
    start = time.perf_counter()
    done_work = 0

    def done(job: Job, found: tuple[Solution, bool]) -> None:
        nonlocal done_work
        solved[job.name] = found
        done_work += job.work
        report(
            CompressionProgress(
                layer=job.name,
                done=len(solved),
                total=len(jobs),
                work=done_work / total_work,
                seconds=time.perf_counter() - start,
                error=found[0].error,
                cached=found[1],
            )
        )

    side_by_side(jobs, lambda job: job.run(cache), geometry=lambda job: job.geometry, threads=workers, done=done)
    return {job.name: solved[job.name] for job in jobs}

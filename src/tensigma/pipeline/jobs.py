"""Solving many layers: small ones side by side, large ones one after the other with all threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from tensigma.calibration import LayerStats
from tensigma.errors import TensigmaError
from tensigma.pipeline.cache import Cache
from tensigma.pipeline.progress import CompressionProgress, Reporter
from tensigma.planning import Entry
from tensigma.planning.solve import Solution, solve

# Products of matrices up to this size gain little from more than one thread.
_SMALL = 1024


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
    def work(self) -> int:
        """A rough count of operations, for sharing and for estimates of time."""
        geometry = self.entry.geometry
        assert geometry is not None
        t, d = geometry.kernel_shape[0], geometry.patch_size
        return geometry.groups * d**2 * (t + d) + 10**6

    @property
    def is_small(self) -> bool:
        geometry = self.entry.geometry
        assert geometry is not None
        return geometry.patch_size <= _SMALL and geometry.kernel_shape[0] <= _SMALL

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

    threads = torch.get_num_threads() if workers is None else workers
    small = [job for job in jobs if job.is_small]
    if min(threads, len(small)) > 1:
        _side_by_side(small, min(threads, len(small)), lambda job: job.run(cache), done)
        rest = [job for job in jobs if not job.is_small]
    else:
        rest = list(jobs)
    for job in rest:
        done(job, job.run(cache))
    return {job.name: solved[job.name] for job in jobs}


def _side_by_side(
    jobs: Sequence[Job],
    threads: int,
    run: Callable[[Job], tuple[Solution, bool]],
    done: Callable[[Job, tuple[Solution, bool]], None],
) -> None:
    # The heaviest first, so that no thread ends alone with a long one.
    ordered = sorted(jobs, key=lambda job: -job.work)
    with _kept_threads(), ThreadPoolExecutor(threads, "tensigma-solve", lambda: torch.set_num_threads(1)) as pool:
        pending = {pool.submit(run, job): job for job in ordered}
        try:
            for future in as_completed(pending):
                done(pending[future], future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def _kept_threads() -> Iterator[None]:
    """Leave the number of threads that torch uses as it was found."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)

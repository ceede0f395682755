"""One compression by many processes: each solves its share of the layers, and all receive all solutions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from tensigma.errors import TensigmaError
from tensigma.running import Digest, Listener, common_device, everyone, process_group, rank_and_size, silent
from tensigma.solving.jobs import Job, run_jobs
from tensigma.solving.solution import Solution
from tensigma.solving.solution_store import Solutions


def run_shared(
    jobs: Sequence[Job],
    *,
    solutions: Solutions,
    keep: bool = True,
    workers: int | None = None,
    report: Listener = silent,
) -> dict[str, tuple[Solution, bool]]:
    """:func:`run_jobs`, shared out where several processes work together under ``torchrun``."""
    if rank_and_size()[1] == 1:
        return run_jobs(jobs, solutions=solutions, keep=keep, workers=workers, report=report)
    device = next((next(job.module.parameters()).device for job in jobs), None)
    with process_group(device):
        rank, size = rank_and_size()
        owners = share_out([job.work for job in jobs], size)
        own_jobs = [job for job, owner in zip(jobs, owners, strict=True) if owner == rank]
        solved: dict[str, tuple[Solution, bool]] = {}
        failure: Exception | None = None
        try:
            solved = run_jobs(own_jobs, solutions=solutions, keep=keep, workers=workers, report=report)
        except Exception as error:  # on any error, the other processes must not wait forever
            failure = error
        return _exchange(jobs, owners, solved, failure)


def run_first(job: Job, solutions: Solutions, *, keep: bool = True) -> tuple[Solution, bool]:
    """:meth:`Job.run` in the first process; under ``torchrun`` all call this, and all receive its solution."""
    if rank_and_size()[1] == 1:
        return job.run(solutions, keep=keep)
    with process_group(next(job.module.parameters()).device):
        solved: dict[str, tuple[Solution, bool]] = {}
        failure: Exception | None = None
        if rank_and_size()[0] == 0:
            try:
                solved = {job.name: job.run(solutions, keep=keep)}
            except Exception as error:  # on any error, the other processes must not wait forever
                failure = error
        return _exchange([job], [0], solved, failure)[job.name]


def share_out(work: Sequence[int], size: int) -> list[int]:
    """The process that takes each job: the heaviest first, each to the process with the least work so far.

    >>> share_out([5, 1, 4, 3], 2)
    [0, 0, 1, 1]
    """
    loads, owners = [0] * size, [0] * len(work)
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += work[index]
    return owners


def _exchange(
    jobs: Sequence[Job], owners: Sequence[int], solved: dict[str, tuple[Solution, bool]], failure: Exception | None
) -> dict[str, tuple[Solution, bool]]:
    """Send all solutions to all processes. If any process failed, all raise, so that none waits for the others."""
    facts = {
        name: (solution.facts(), cached, {key: (tuple(t.shape), t.dtype) for key, t in solution.tensors().items()})
        for name, (solution, cached) in solved.items()
    }
    message = None if failure is None else f"{type(failure).__name__}: {failure}"
    notes = everyone((message, _digest(jobs), facts))
    if failure is not None:
        raise failure
    for rank, (other_message, digest, _) in enumerate(notes):
        if other_message is not None:
            raise TensigmaError(f"process {rank} of {len(notes)} failed, so nothing was compressed: {other_message}")
        if digest != _digest(jobs):
            raise TensigmaError(f"process {rank} of {len(notes)} has another plan; pass the same plan to all")
    device = common_device()
    solutions = {}
    for job, owner in zip(jobs, owners, strict=True):
        plain, cached, shapes = notes[owner][2][job.name]
        local = solved[job.name][0].tensors() if job.name in solved else {}
        tensors: dict[str, Tensor] = {}
        for key, (shape, dtype) in shapes.items():
            tensors[key] = local[key].to(device) if local else torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(tensors[key], src=owner)
        solutions[job.name] = solved.get(job.name) or (Solution.rebuilt(job.treatment, tensors, plain), cached)
    return solutions


def _digest(jobs: Sequence[Job]) -> str:
    """A digest of what is to be solved, which processes compare."""
    return Digest().add([[job.name, job.treatment.label, job.treatment.norm.name] for job in jobs]).text

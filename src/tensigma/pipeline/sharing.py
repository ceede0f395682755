"""One compression by many processes: each solves its share of the layers, and all end with all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from tensigma.calibration.distributed import process_group, rank_and_size
from tensigma.errors import TensigmaError
from tensigma.pipeline.cache import Cache
from tensigma.pipeline.jobs import Job, run_jobs
from tensigma.pipeline.progress import Reporter
from tensigma.planning.solve import Solution


def run_shared(
    jobs: Sequence[Job], *, cache: Cache | None, workers: int | None, report: Reporter
) -> dict[str, tuple[Solution, bool]]:
    """:func:`run_jobs`, shared out where several processes work together under ``torchrun``."""
    if rank_and_size()[1] == 1:
        return run_jobs(jobs, cache=cache, workers=workers, report=report)
    device = next((next(job.module.parameters()).device for job in jobs), None)
    with process_group(device):
        rank, size = rank_and_size()
        owners = share_out([job.work for job in jobs], size)
        own = [job for job, owner in zip(jobs, owners, strict=True) if owner == rank]
        solved: dict[str, tuple[Solution, bool]] = {}
        failure: Exception | None = None
        try:
            solved = run_jobs(own, cache=cache, workers=workers, report=report)
        except Exception as error:  # whatever it is, the others must not wait for ever
            failure = error
        return _exchange(jobs, owners, solved, failure)


def share_out(work: Sequence[int], size: int) -> list[int]:
    """Who takes which job: the heaviest first, each to whoever has least so far.

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
    """Everybody's solutions for everybody. If any process failed, all raise, so that none waits for the others."""
    facts = {
        name: (solution.facts(), cached, {key: (tuple(t.shape), t.dtype) for key, t in solution.tensors().items()})
        for name, (solution, cached) in solved.items()
    }
    trouble = None if failure is None else f"{type(failure).__name__}: {failure}"
    notes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(notes, (trouble, _digest(jobs), facts))
    if failure is not None:
        raise failure
    for rank, (text, digest, _) in enumerate(notes):
        if text is not None:
            raise TensigmaError(f"process {rank} of {len(notes)} failed, so nothing was compressed: {text}")
        if digest != _digest(jobs):
            raise TensigmaError(f"process {rank} of {len(notes)} came with another plan; give the same one to all")
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    found = {}
    for job, owner in zip(jobs, owners, strict=True):
        plain, cached, shapes = notes[owner][2][job.name]
        mine = solved[job.name][0].tensors() if job.name in solved else {}
        tensors: dict[str, Tensor] = {}
        for key, (shape, dtype) in shapes.items():
            tensors[key] = mine[key].to(device) if mine else torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(tensors[key], src=owner)
        found[job.name] = solved.get(job.name) or (Solution.rebuilt(job.entry, tensors, plain), cached)
    return found


def _digest(jobs: Sequence[Job]) -> str:
    """What was planned, so that processes can compare."""
    text = json.dumps([[job.name, job.entry.to_json()] for job in jobs], sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

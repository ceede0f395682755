"""Solving small layers in parallel, each with one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

import torch

from tensigma.layers import Geometry
from tensigma.running import threads

Task = TypeVar("Task")
Result = TypeVar("Result")

# Products of matrices up to this size gain little from more than one thread.
_SMALL = 1024


def is_small(geometry: Geometry) -> bool:
    """Whether a layer is better solved in parallel with others than with all threads."""
    return geometry.patch_size <= _SMALL and geometry.kernel_shape[0] <= _SMALL


def work_of(geometry: Geometry) -> int:
    """A rough count of the operations that solving a layer takes, for sharing out work and estimating time."""
    t, d = geometry.kernel_shape[0], geometry.patch_size
    return geometry.groups * d**2 * (t + d) + 10**6


def side_by_side(
    tasks: Sequence[Task],
    run: Callable[[Task], Result],
    *,
    geometry: Callable[[Task], Geometry],
    workers: int | None = None,
    done: Callable[[Task, Result], None],
) -> None:
    """Run all tasks, one per layer: small ones by ``workers`` threads, then the others with all threads each.

    ``done`` is called in the caller's thread, in the order in which tasks end. By default there are as many
    ``workers`` as torch has threads.

    >>> from torch import nn
    >>> ends = {}
    >>> side_by_side([1, 2], str, geometry=lambda _: Geometry.of(nn.Linear(2, 2)), done=ends.__setitem__)
    >>> sorted(ends.items())
    [(1, '1'), (2, '2')]
    """
    # Heaviest first, so that no thread is left alone with a long task.
    small = sorted((task for task in tasks if is_small(geometry(task))), key=lambda task: -work_of(geometry(task)))
    workers = min(torch.get_num_threads() if workers is None else workers, len(small))
    if workers > 1:
        with threads(None), ThreadPoolExecutor(workers, "tensigma-solve", lambda: torch.set_num_threads(1)) as pool:
            pending = {pool.submit(run, task): task for task in small}
            try:
                for future in as_completed(pending):
                    done(pending[future], future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    for task in tasks:
        if workers <= 1 or not is_small(geometry(task)):
            done(task, run(task))

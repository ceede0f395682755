"""Several processes that work together under ``torchrun``: their ranks, and the share of the data of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from tensigma.errors import TensigmaError
from tensigma.running.batches import count_batches, is_one_shot, iterate

T = TypeVar("T")


def rank_and_size() -> tuple[int, int]:
    """Rank of this process and number of processes: from torch.distributed, from torchrun's variables, or (0, 1)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if dist.is_available() and {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


class shard:
    """Every n-th batch, for the process that iterates; the same loader must be built in the same order by all.

    >>> tuple(int(batch) for batch in shard(list(torch.arange(5)), rank=1, size=2))
    (1, 3)
    """

    def __init__(self, batches: Any, *, rank: int | None = None, size: int | None = None) -> None:
        own_rank, n_processes = rank_and_size()
        self.batches = batches
        self.rank = own_rank if rank is None else rank
        self.size = n_processes if size is None else size

    def __iter__(self) -> Iterator[Any]:
        return islice(iterate(self.batches), self.rank, None, self.size)

    def __len__(self) -> int:
        total = count_batches(self.batches)
        if total is None:
            raise TypeError("the number of batches is not known before they are read")
        return max(0, (total - self.rank + self.size - 1) // self.size)

    @property
    def is_one_shot(self) -> bool:
        """Whether a second pass would find nothing."""
        return is_one_shot(self.batches)

    @property
    def name(self) -> str:
        """The name of the batches in results, if they have one."""
        return str(self.batches.name)


@contextmanager
def process_group(device: torch.device | None) -> Iterator[bool]:
    """Whether several processes work together; under torchrun, their group is open inside the block."""
    _, size = rank_and_size()
    if size == 1:
        yield False
    elif dist.is_initialized():
        yield True
    else:
        _open("nccl" if device is not None and device.type == "cuda" else "gloo")
        try:
            yield True
        finally:
            dist.destroy_process_group()


_stores: list[dist.Store] = []
_openings = count()


def _open(backend: str) -> None:
    """Open a process group on torchrun's store, under a new prefix: otherwise it would use the addresses that an
    earlier group left there."""
    rank, size = rank_and_size()
    if not _stores:
        store, _, _ = next(iter(dist.rendezvous("env://")))
        _stores.append(store)
    group_store = dist.PrefixStore(f"tensigma-{next(_openings)}", _stores[0])
    dist.init_process_group(backend, store=group_store, rank=rank, world_size=size)


def everyone(note: Any) -> list[Any]:
    """The notes of all processes, by rank; each must call this inside :func:`process_group`."""
    notes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(notes, note)
    return notes


def together(work: Callable[[], T], *, alike: tuple[type[Exception], ...] = ()) -> T:
    """What ``work`` returns; under ``torchrun`` all processes call this, and if it fails in one, all raise.

    An error of a type in ``alike`` is raised as such by all, unless another error was raised as well.

    >>> together(lambda: 3)
    3
    """
    if rank_and_size()[1] == 1:
        return work()
    value: T | None = None
    failure: Exception | None = None
    try:
        value = work()
    except Exception as error:  # on any error, the other processes must not wait forever
        failure = error
    with process_group(None):
        notes = everyone(None if failure is None else (_which(failure, alike), f"{type(failure).__name__}: {failure}"))
    failed = {rank: note for rank, note in enumerate(notes) if note is not None}
    if not failed:
        return value  # type: ignore[return-value]
    kinds = {which for which, _ in failed.values()}
    if failure is not None and (None not in kinds or _which(failure, alike) is None):
        raise failure
    rank, (which, text) = next(item for item in failed.items() if None not in kinds or item[1][0] is None)
    message = f"process {rank} of {len(notes)} failed: {text}"
    raise TensigmaError(message) if which is None else alike[which](message)


def _which(error: Exception, types: tuple[type[Exception], ...]) -> int | None:
    return next((index for index, kind in enumerate(types) if isinstance(error, kind)), None)


def all_notes(note: T) -> list[T]:
    """The notes of all processes, by rank; of this one alone if it is the only one.

    >>> all_notes(3)
    [3]
    """
    if rank_and_size()[1] == 1:
        return [note]
    with process_group(None):
        return everyone(note)


def share_of(number: int) -> int:
    """The part of ``number`` samples that falls to this process; at least 1.

    >>> share_of(10)
    10
    """
    rank, size = rank_and_size()
    return max(1, (number + size - 1 - rank) // size)


def common_device() -> torch.device:
    """Where tensors must be to be sent to the other processes."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

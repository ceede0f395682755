"""One calibration by many processes: each sees its share of the data, and all end with the statistics of the whole.

Start any script that calls :func:`tensigma.calibrate` with ``torchrun --nproc_per_node=2 script.py``, giving every
process its own share of the batches, for example ``shard(loader)``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from tensigma.calibration.batches import iterate
from tensigma.calibration.layer_stats import LayerStats
from tensigma.errors import TensigmaError


def rank_and_size() -> tuple[int, int]:
    """Number of this process and how many there are: from torch.distributed, from torchrun's variables, or (0, 1)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if dist.is_available() and {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


class shard:
    """Every n-th batch, for the process that iterates; the same loader must be built in the same order by all.

    >>> [int(batch) for batch in shard(list(torch.arange(5)), rank=1, size=2)]
    [1, 3]
    """

    def __init__(self, batches: Any, *, rank: int | None = None, size: int | None = None) -> None:
        own, many = rank_and_size()
        self.batches = batches
        self.rank = own if rank is None else rank
        self.size = many if size is None else size

    def __iter__(self) -> Iterator[Any]:
        return islice(iterate(self.batches), self.rank, None, self.size)


@contextmanager
def process_group(device: torch.device | None) -> Iterator[bool]:
    """Whether several processes work together; a group that torchrun prepared is opened for as long as it is needed."""
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
    """A process group on torchrun's store, under a name of its own: addresses that an earlier group left there would be
    taken for those of this one."""
    rank, size = rank_and_size()
    if not _stores:
        store, _, _ = next(iter(dist.rendezvous("env://")))
        _stores.append(store)
    own = dist.PrefixStore(f"tensigma-{next(_openings)}", _stores[0])
    dist.init_process_group(backend, store=own, rank=rank, world_size=size)


def reduce_stats(found: Mapping[str, LayerStats], failure: BaseException | None = None) -> dict[str, LayerStats]:
    """Statistics of all processes together. If any of them failed, all raise, so that none waits for the others."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    own = {name: _facts(stats) for name, stats in found.items()}
    notes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(notes, (None if failure is None else f"{type(failure).__name__}: {failure}", own))
    if failure is not None:
        raise failure
    for rank, (trouble, _) in enumerate(notes):
        if trouble is not None:
            raise TensigmaError(f"process {rank} of {len(notes)} failed, so no statistics were gathered: {trouble}")
    # The same order everywhere, whichever process reached which layer.
    names = list(dict.fromkeys(name for _, layers in notes for name in layers))
    facts = {name: [layers.get(name) for _, layers in notes] for name in names}
    return {name: _reduce(found.get(name), facts[name], device) for name in names}


def _facts(stats: LayerStats) -> dict[str, Any]:
    return {
        "count": stats.count,
        "samples": stats.samples,
        "output_count": stats.output_count,
        "fisher_samples": stats.fisher_samples,
        "input_shape": stats.input_shape,
        "output_shape": stats.output_shape,
        "mean_shape": tuple(stats.mean.shape),
        "dtype": stats.dtype,
        "n_rows": None if stats.rows is None else len(stats.rows),
        "outputs": None if stats.output_abs_mean is None else len(stats.output_abs_mean),
        "fisher_shape": None if stats.fisher is None else tuple(stats.fisher.shape),
    }


def _reduce(stats: LayerStats | None, facts: list[dict[str, Any] | None], device: torch.device) -> LayerStats:
    present = [fact for fact in facts if fact is not None]
    first = present[0]
    home = device if stats is None else stats.mean.device
    total = {key: sum(fact[key] for fact in present) for key in ("count", "samples", "output_count", "fisher_samples")}

    def weighted(value: Tensor | None, shape: tuple[int, ...], own: int, everyone: int) -> Tensor:
        """Mean over all processes of a mean over the rows of each."""
        share = torch.zeros(shape, dtype=torch.float64, device=device)
        if value is not None:
            share += value.to(device, torch.float64) * (own / max(everyone, 1))
        dist.all_reduce(share)
        return share

    shape = first["mean_shape"]
    d = shape[-1]
    count = 0 if stats is None else stats.count
    mean = weighted(None if stats is None else stats._mean, shape, count, total["count"])
    moments: dict[str, Tensor] = {}
    if all(fact["n_rows"] is not None for fact in present) and total["count"] < d:
        moments["rows"] = _gather_rows(None if stats is None else stats.rows, facts, d, first["dtype"], device).to(home)
    else:
        covariance = None
        if stats is not None:
            step = stats._mean.to(device) - mean
            covariance = stats.covariance.to(device, torch.float64)
            covariance = torch.addcmul(covariance, step[..., :, None], step[..., None, :])
        moments["covariance"] = weighted(covariance, (*shape, d), count, total["count"]).to(home, first["dtype"])
    outputs = fisher = None
    if all(fact["outputs"] is not None for fact in present):
        own_count = 0 if stats is None else stats.output_count
        value = None if stats is None else stats.output_abs_mean
        outputs = weighted(value, (first["outputs"],), own_count, total["output_count"]).to(home, first["dtype"])
    if all(fact["fisher_shape"] is not None for fact in present):
        own_count = 0 if stats is None else stats.fisher_samples
        value = None if stats is None else stats.fisher
        fisher = weighted(value, first["fisher_shape"], own_count, total["fisher_samples"]).to(home, torch.float32)
    return LayerStats(
        mean=mean.to(home),
        **moments,  # type: ignore[arg-type]
        count=total["count"],
        samples=total["samples"],
        input_shape=first["input_shape"],
        output_shape=first["output_shape"],
        output_abs_mean=outputs,
        output_count=total["output_count"],
        fisher=fisher,
        fisher_samples=total["fisher_samples"],
    )


def _gather_rows(
    rows: Tensor | None, facts: list[dict[str, Any] | None], d: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    counts = [0 if fact is None else fact["n_rows"] for fact in facts]
    # Every process must send as much as the longest.
    padded = torch.zeros(max(counts), d, dtype=dtype, device=device)
    if rows is not None:
        padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])

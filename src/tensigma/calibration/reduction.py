"""One calibration by several processes: each sees its share of the data, all end with the statistics of all shares.

Start any script that calls :func:`tensigma.calibrate` with ``torchrun --nproc_per_node=2 script.py``, giving every
process its own share of the batches, for example ``shard(loader)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from tensigma.calibration.layer_stats import LayerStats
from tensigma.errors import TensigmaError
from tensigma.running import common_device, everyone


def reduce_stats(layers: Mapping[str, LayerStats], failure: BaseException | None = None) -> dict[str, LayerStats]:
    """Statistics of all processes together. If any of them failed, all raise, so that none waits for the others."""
    device = common_device()
    trouble = None if failure is None else f"{type(failure).__name__}: {failure}"
    reports = everyone((trouble, {name: _facts(stats) for name, stats in layers.items()}))
    if failure is not None:
        raise failure
    for rank, (trouble, _) in enumerate(reports):
        if trouble is not None:
            raise TensigmaError(f"process {rank} of {len(reports)} failed, so no statistics were gathered: {trouble}")
    # The same order in every process, whichever layers it reached.
    names = list(dict.fromkeys(name for _, facts in reports for name in facts))
    by_name = {name: [facts.get(name) for _, facts in reports] for name in names}
    return {name: _reduce(layers.get(name), by_name[name], device) for name in names}


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

    def weighted(value: Tensor | None, shape: tuple[int, ...], n_here: int, n_total: int) -> Tensor:
        """Mean over all processes of a mean over the rows of each."""
        share = torch.zeros(shape, dtype=torch.float64, device=device)
        if value is not None:
            share += value.to(device, torch.float64) * (n_here / max(n_total, 1))
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
        n_here = 0 if stats is None else stats.output_count
        value = None if stats is None else stats.output_abs_mean
        outputs = weighted(value, (first["outputs"],), n_here, total["output_count"]).to(home, first["dtype"])
    if all(fact["fisher_shape"] is not None for fact in present):
        n_here = 0 if stats is None else stats.fisher_samples
        value = None if stats is None else stats.fisher
        fisher = weighted(value, first["fisher_shape"], n_here, total["fisher_samples"]).to(home, torch.float32)
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
    # Every process must send as many rows as the longest.
    padded = torch.zeros(max(counts), d, dtype=dtype, device=device)
    if rows is not None:
        padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])

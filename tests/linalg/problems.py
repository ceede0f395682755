"""Problems for solver tests: kernels, grams and ranks made from seeds."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tensigma.linalg import CP, SVD, Deflation, Metric, Tucker2, max_rank

SOLVERS = {
    "svd": lambda ranks: SVD(ranks["svd"]),
    "tucker2-varpro": lambda ranks: Tucker2(*ranks["tucker2"]),
    "tucker2-als": lambda ranks: Tucker2(*ranks["tucker2"], solver="als", init="data"),
    "tucker2-hosvd": lambda ranks: Tucker2(*ranks["tucker2"], init="hosvd"),
    "cp-varpro": lambda ranks: CP(ranks["cp"]),
    "cp-als": lambda ranks: CP(ranks["cp"], solver="als", max_sweeps=30),
    "cp-random": lambda ranks: CP(ranks["cp"], init="random", seed=3),
    "cp-joint": lambda ranks: CP(ranks["joint"], joint=True),
    "deflation": lambda ranks: Deflation(ranks["cp"]),
}


def ranks_for(shape: tuple[int, ...], share: float) -> dict[str, Any]:
    """Ranks at ``share`` of the largest, at least 1."""
    t, s, *taps = shape

    def part(largest: int) -> int:
        return max(1, math.floor(share * largest))

    return {
        "svd": part(min(t, math.prod(shape[1:]))),
        "tucker2": (part(t), part(s)),
        "cp": part(max_rank(shape)),
        "joint": part(max_rank((t, s, math.prod(taps)))),
    }


def kernel(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def gram(size: int, seed: int, *, rows: int | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    """Σ of correlated inputs with a falling spectrum, as real ones have; singular where ``rows`` < ``size``."""
    generator = torch.Generator().manual_seed(1000 + seed)
    mixing = torch.randn(size, size, generator=generator, dtype=torch.float64)
    mixing *= torch.arange(1.0, size + 1, dtype=torch.float64).pow(-0.7)
    count = 4 * size if rows is None else rows
    inputs = torch.randn(count, size, generator=generator, dtype=torch.float64) @ mixing.T
    return (inputs.T @ inputs / count).to(dtype)


def metric(size: int, seed: int, **options: Any) -> Metric:
    return Metric.from_gram(gram(size, seed, **options))

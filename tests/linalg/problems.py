"""Problems for solver tests: kernels, grams and ranks made from seeds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import cases
from tensigma.linalg import CP, SVD, CPJoint, Deflation, Metric, Solver, SpatialSVD, TensorTrain, Tucker2, max_rank

#: Kernels that solvers must master, with the names of the cases.
KERNELS: list[tuple[Any, Any]] = [(param.values[0], param.id) for param in cases.KERNELS]


@dataclass(frozen=True)
class SolverCase:
    """A solver for given ranks, the kernels it takes, and the unfolding of a kernel that has rank one at rank one."""

    make: Callable[[dict[str, Any]], Solver]
    takes: Callable[[tuple[int, ...]], bool] = lambda shape: True
    unfold: Callable[[Tensor], Tensor] = lambda kernel: kernel.flatten(1)
    #: Whether the largest ranks give the kernel itself. Greedy terms add up to it at no finite rank.
    exact: bool = True


def _two_axes(shape: tuple[int, ...]) -> bool:
    return len(shape) == 4


def _rows_by_columns(kernel: Tensor) -> Tensor:
    """(t, s, h, w) as (s·h, t·w)."""
    return kernel.permute(1, 2, 0, 3).flatten(2).flatten(0, 1)


SOLVERS = {
    "svd": SolverCase(lambda ranks: SVD(ranks["svd"])),
    "tucker2-varpro": SolverCase(lambda ranks: Tucker2(*ranks["tucker2"])),
    "tucker2-als": SolverCase(lambda ranks: Tucker2(*ranks["tucker2"], solver="als", init="data")),
    "tucker2-hosvd": SolverCase(lambda ranks: Tucker2(*ranks["tucker2"], init="hosvd")),
    "cp-varpro": SolverCase(lambda ranks: CP(ranks["cp"])),
    "cp-als": SolverCase(lambda ranks: CP(ranks["cp"], solver="als", max_sweeps=30)),
    "cp-random": SolverCase(lambda ranks: CP(ranks["cp"], init="random", seed=3)),
    "cp-joint": SolverCase(lambda ranks: CPJoint(ranks["joint"])),
    "deflation": SolverCase(lambda ranks: Deflation(ranks["cp"]), exact=False),
    "spatial-svd-varpro": SolverCase(lambda ranks: SpatialSVD(ranks["spatial"]), _two_axes, _rows_by_columns),
    "spatial-svd-als": SolverCase(
        lambda ranks: SpatialSVD(ranks["spatial"], solver="als", init="data"), _two_axes, _rows_by_columns
    ),
    "tensor-train": SolverCase(lambda ranks: TensorTrain(*ranks["train"]), _two_axes),
    "tensor-train-hosvd": SolverCase(lambda ranks: TensorTrain(*ranks["train"], init="hosvd"), _two_axes),
}


def solvers_and_kernels(*, taken: bool = True) -> list[Any]:
    """Every solver with every kernel that it takes; or, with ``taken=False``, with every one that it refuses."""
    return [
        pytest.param(case, shape, id=f"{name}-{label}")
        for name, case in SOLVERS.items()
        for shape, label in KERNELS
        if case.takes(shape) == taken
    ]


def ranks_for(shape: tuple[int, ...], share: float) -> dict[str, Any]:
    """Ranks at ``share`` of the largest, at least 1."""
    t, s, *taps = shape

    def part(largest: int) -> int:
        return max(1, math.floor(share * largest))

    ranks = {
        "svd": part(min(t, math.prod(shape[1:]))),
        "tucker2": (part(t), part(s)),
        "cp": part(max_rank(shape)),
        "joint": part(max_rank((t, s, math.prod(taps)))),
    }
    # Shapes without two spatial axes are refused whatever the rank.
    h, w = taps if len(taps) == 2 else (1, 1)
    middle = part(min(s * h, t * w))
    return ranks | {"spatial": middle, "train": (part(t), min(middle, part(s) * h, part(t) * w), part(s))}


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


def image_gram(channels: int, taps: tuple[int, int], seed: int) -> Tensor:
    """Σ of patches of smooth images with correlated channels: structured over channels and taps, as real ones are."""
    generator = torch.Generator().manual_seed(2000 + seed)
    noise = torch.randn(20, channels, 24, 24, generator=generator, dtype=torch.float64)
    smooth = functional.avg_pool2d(noise, 3, stride=1) + 0.3 * noise[:, :, 1:-1, 1:-1]
    mixing = torch.randn(channels, channels, generator=generator, dtype=torch.float64)
    mixing *= torch.arange(1.0, channels + 1, dtype=torch.float64).pow(-0.7)
    images = torch.einsum("cd,ndhw->nchw", mixing, smooth).relu()
    rows = functional.unfold(images, taps).transpose(0, 1).flatten(1)
    return rows @ rows.T / rows.shape[1]


def metric(size: int, seed: int, **options: Any) -> Metric:
    return Metric.from_gram(gram(size, seed, **options))

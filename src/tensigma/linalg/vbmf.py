"""Ranks from the weights alone: empirical variational Bayesian matrix factorisation, and the paper's rule built on it.

The global solution of Nakajima, Sugiyama, Babacan and Tomioka (2013) is analytic once the noise variance σ² is known,
and σ² is the minimiser of a function of one variable. Notation: Y (n, m) matrix with n ≤ m, α = n/m, γ singular values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tensigma.errors import InputError

# A signal of strength τ emerges from the noise at τ ≈ 2.5129 √α: the constant of the analytic solution.
_THRESHOLD = 2.5129
_GRID = 512
_REFINEMENTS = 4


def vbmf_rank(matrix: Tensor) -> int:
    """The number of singular values of ``matrix`` that stand out from its noise; 0 if none does.

    >>> generator = torch.Generator().manual_seed(0)
    >>> signal = torch.randn(60, 5, generator=generator) @ torch.randn(5, 200, generator=generator)
    >>> vbmf_rank(signal + torch.randn(60, 200, generator=generator))
    5
    """
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise InputError(f"VBMF works on a matrix, got shape {tuple(matrix.shape)}")
    if not torch.isfinite(matrix).all():
        raise InputError("the matrix contains NaN or infinite entries")
    wide = matrix.detach().double()
    if wide.shape[0] > wide.shape[1]:
        wide = wide.T
    n, m = wide.shape
    energies = torch.linalg.eigvalsh(wide @ wide.T).flip(0).clamp_min(0)  # γ², descending
    # Energies below the rounding error of the largest are zero.
    energies = torch.where(energies > n * torch.finfo(torch.float64).eps * energies[0], energies, 0.0)
    if energies[0] == 0:
        return 0
    alpha = n / m
    tau = _THRESHOLD * math.sqrt(alpha)
    edge = (1 + tau) * (1 + alpha / tau)  # γ²/(m σ²) beyond which a component survives
    variance = _noise_variance(energies, m, alpha, edge)
    return int((energies > m * variance * edge).sum())


def _noise_variance(energies: Tensor, m: int, alpha: float, edge: float) -> float:
    """σ² by a search on a shrinking grid of logarithms, which local minima cannot trap."""
    n = len(energies)
    upper = energies.sum().item() / (n * m)
    # At most this many components can survive; σ² is at least what the rest implies.
    most = min(math.ceil(n / (1 + alpha)) - 1, n - 1)
    tail = energies[most:]
    lower = max(tail[0].item() / (m * edge), tail.mean().item() / m, upper * torch.finfo(torch.float64).eps ** 2)
    low, high = math.log(min(lower, upper)), math.log(upper)
    best = low
    for _ in range(_REFINEMENTS):
        grid = torch.linspace(low, high, _GRID, dtype=torch.float64)
        index = int(_free_energy(energies, m, alpha, edge, grid).argmin())
        best = grid[index].item()
        low, high = grid[max(index - 1, 0)].item(), grid[min(index + 1, _GRID - 1)].item()
    return math.exp(best)


def _free_energy(energies: Tensor, m: int, alpha: float, edge: float, log_variance: Tensor) -> Tensor:
    """The objective in σ², for a grid of log σ², up to constants. The term −log γ² is left out everywhere: it does not
    depend on σ², and singular values of zero are then no special case."""
    ratio = energies[None, :] / (m * log_variance.exp()[:, None])  # x = γ²/(m σ²), (grid, n)
    survives = ratio > edge
    shifted = torch.where(survives, ratio - (1 + alpha), 2 * math.sqrt(alpha))
    tau = (shifted + (shifted.square() - 4 * alpha).clamp_min(0).sqrt()) / 2
    gain = torch.where(survives, -tau + (tau + 1).log() + alpha * (tau / alpha + 1).log(), 0.0)
    return (ratio + gain).sum(1) + len(energies) * log_variance


def alpha_rank(rank_vbmf: int, rank_max: int, alpha: float) -> int:
    """The paper's R_α = R_VBMF + (1 − α)(R_max − R_VBMF), truncated, between 1 and R_max. α may exceed 1.

    >>> alpha_rank(24, 576, 0.8), alpha_rank(307, 4608, 0.8), alpha_rank(24, 576, 1.2)
    (134, 1167, 1)
    """
    if not alpha >= 0:
        raise InputError(f"alpha is 0 or more (0 keeps every rank, 1 is VBMF's own), got {alpha!r}")
    # Rounded first: 0.8 has no exact binary form, and 24 + 0.2·555 must not become 134.99999.
    rank = math.floor(round(rank_vbmf + (1 - alpha) * (rank_max - rank_vbmf), 9))
    return min(max(rank, 1), rank_max)

"""Errors of many ranks at once, without solving for any: what a choice of ranks is made from. Squared and relative.

Notation: M (t, d) kernel, S (d, d) damped gram, X (s, s) input directions, best first, B = I_k ⊗ X.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tensigma.errors import RankError
from tensigma.linalg.metric import Metric
from tensigma.linalg.problem import Problem, check_kernel, psd_cholesky
from tensigma.linalg.svd import output_basis
from tensigma.linalg.tucker2 import input_basis


def svd_errors(weight: Tensor, metric: Metric) -> Tensor:
    """Squared relative errors of the best approximations of rank 1, 2, … min(t, d): exact, in float64.

    >>> svd_errors(torch.diag(torch.tensor([2.0, 2.0, 0.0])), Metric.identity(3)).tolist()
    [0.5, 0.0, 0.0]
    """
    kernel = check_kernel(weight, metric)
    matrix = kernel.flatten(1)
    energies = output_basis(matrix, metric.to(kernel))[0][: min(matrix.shape)]
    return _lost(energies, energies.sum())


def tucker2_errors(weight: Tensor, metric: Metric, ranks_in: Sequence[int]) -> Tensor:
    """Squared relative errors of Tucker-2 from its data-aware start, (len(ranks_in), t): row by rank_in, column by
    rank_out − 1. A solver that starts there ends a few per cent lower.

    The input directions are nested, so one Cholesky factor of the full normal matrix, ordered direction by direction,
    contains that of every rank_in; and for each of them one eigendecomposition serves every rank_out.

    >>> weight = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    >>> errors = tucker2_errors(weight, Metric.identity(36), [2, 4])
    >>> errors.shape, errors[1, 5].item() < 1e-6, bool((errors[0] >= errors[1]).all())
    (torch.Size([2, 6]), True, True)
    """
    p = Problem(weight, metric)
    t, s, k = p.n_out, p.n_in, p.n_taps
    if list(ranks_in) != sorted(set(ranks_in)) or not ranks_in or not 1 <= ranks_in[0] <= ranks_in[-1] <= s:
        raise RankError(f"ranks_in rise from at least 1 to at most {s} for this kernel, got {list(ranks_in)}")
    basis = input_basis(p, t, data=True)
    if p.gram is None:
        inner = torch.einsum("kl,rq->krlq", torch.eye(k).to(basis), basis.T @ basis)
    else:
        image = (p.gram.view(-1, s) @ basis).view(k, s, k * s)  # S B, rows (k, s), columns (k, r)
        inner = (basis.T @ image).view(k, s, k, s)  # Bᵀ S B as (k, r, k, r)
    # Direction-major: leading blocks then belong to the leading directions.
    normal = inner.permute(1, 0, 3, 2).reshape(s * k, s * k).double()
    cross = (p.kernel_gram.view(-1, s) @ basis).view(t, k, s).transpose(1, 2).reshape(t, s * k).double()  # M S B
    lower = psd_cholesky((normal + normal.T) / 2)
    whitened = torch.linalg.solve_triangular(lower, cross.T, upper=False)  # (s·k, t)
    total = torch.tensor(p.damped_norm2, dtype=torch.float64, device=basis.device)
    explained = torch.zeros(t, t, dtype=torch.float64, device=basis.device)
    rows, done = [], 0
    for rank in ranks_in:
        block = whitened[done * k : rank * k]
        explained = explained + block.T @ block
        done = rank
        energies = torch.linalg.eigvalsh(explained).flip(0).clamp_min(0)
        rows.append(_lost(energies, total))
    return torch.stack(rows)


def _lost(energies: Tensor, total: Tensor) -> Tensor:
    """The share of ``total`` beyond the first 1, 2, … energies; nothing where there is no energy at all."""
    if not total > 0:
        return torch.zeros_like(energies)
    return (1 - energies.cumsum(0) / total).clamp_min(0)

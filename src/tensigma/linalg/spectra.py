"""How much of a kernel's energy each channel direction carries: ranks follow from it without a solution.

Notation: M (t, d) kernel, Σ (d, d) metric. The output spectrum, the eigenvalues of M Σ Mᵀ, is exact: what lies beyond
the first r is the squared error of the best rank r. The input spectrum is that of the kernel under Σ ≈ C ⊗ D (C between
channels, D between taps), the model from which Tucker-2 starts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tensigma.linalg.metric import Metric
from tensigma.linalg.problem import Problem, check_kernel, psd_cholesky


@dataclass(frozen=True, eq=False)
class Spectra:
    """Energies, descending, by output and by input direction; one row for each group.

    >>> spectra = Spectra(torch.tensor([[8.0, 1.0, 1.0]]), torch.tensor([[6.0, 4.0]]))
    >>> spectra.rank_out(tail=0.1), spectra.rank_in(tail=0.1), round(spectra.svd_error(2), 4)
    (2, 2, 0.3162)
    """

    outs: Tensor  # (groups, t)
    ins: Tensor | None  # (groups, s); None if the format has no rank for inputs

    @classmethod
    def of(cls, views: Sequence[tuple[Tensor, Metric]], *, inputs: bool) -> Spectra:
        """The spectra of the kernels of a layer, each with its metric."""
        outs = []
        for weight, metric in views:
            kernel = check_kernel(weight, metric)
            outs.append(output_spectrum(kernel.flatten(1), metric.to(kernel)).cpu())
        ins = torch.stack([input_spectrum(*view).cpu() for view in views]) if inputs else None
        return cls(torch.stack(outs), ins)

    def rank_out(self, tail: float) -> int:
        """The smallest rank that loses at most the share ``tail`` of the energy, in the worst group."""
        return _rank(self.outs, tail)

    def rank_in(self, tail: float) -> int:
        """The same for input directions."""
        assert self.ins is not None
        return _rank(self.ins, tail)

    def svd_error(self, rank: int) -> float:
        """The relative error of the best approximation of this rank."""
        total = self.outs.sum().item()
        return math.sqrt(self.outs[:, rank:].sum().item() / total) if total > 0 else 0.0


def output_spectrum(matrix: Tensor, metric: Metric) -> Tensor:
    """Eigenvalues, descending, of M Σ Mᵀ; of Lᵀ MᵀM L with Σ = L Lᵀ if that is smaller, which are the same.

    >>> output_spectrum(torch.diag(torch.tensor([1.0, 3.0])), Metric.identity(2)).round(decimals=4).tolist()
    [9.0, 1.0]
    """
    t, d = matrix.shape
    if t <= d:
        return torch.linalg.eigvalsh(metric.outputs(matrix).double()).flip(0).clamp_min(0)
    moment = (matrix.T @ matrix).double()
    if not metric.is_identity:
        lower = psd_cholesky(metric.dense().double())
        moment = lower.T @ moment @ lower
    values = torch.linalg.eigvalsh(moment).flip(0).clamp_min(0)
    return torch.cat([values, values.new_zeros(t - d)])


def input_spectrum(kernel: Tensor, metric: Metric) -> Tensor:
    """Eigenvalues, descending, of Lᵀ (Σ_t m_t D m_tᵀ) L with C = L Lᵀ and m_t the (s, k) slices of the kernel.

    >>> input_spectrum(torch.diag(torch.tensor([1.0, 3.0]))[..., None], Metric.identity(2)).round(decimals=4).tolist()
    [9.0, 1.0]
    """
    problem = Problem(kernel, metric)
    slices = problem.kernel.view(problem.n_out, problem.n_taps, problem.n_in).double()
    weighted = torch.einsum("kl,tls->tks", problem.tap_gram.double(), slices)
    moment = slices.flatten(0, 1).T @ weighted.flatten(0, 1)
    lower = psd_cholesky(problem.channel_gram.double())
    return torch.linalg.eigvalsh(lower.T @ moment @ lower).flip(0).clamp_min(0)


def _rank(energies: Tensor, tail: float) -> int:
    lost = energies.flip(1).cumsum(1).flip(1)  # lost[r] = energy beyond the first r
    return max(1, int((lost > tail * lost[:, :1]).sum(1).max()))

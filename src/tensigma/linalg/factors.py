"""What a decomposition leaves behind: small factors that know their dense tensor and their size.

Axes: ``t`` output channels, ``s`` input channels, ``k1, k2, …`` spatial taps, ``r`` rank.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Factors(Protocol):
    """The factors of one kernel, whatever their format."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense kernel, (t, s, *taps)."""
        ...

    @property
    def n_params(self) -> int:
        """Numbers stored, the bias of the layer not counted."""
        ...

    def to_dense(self) -> Tensor:
        """The kernel these factors stand for, shape (t, s, *taps)."""
        ...


def _count(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


@dataclass(frozen=True, eq=False)
class SVDFactors:
    """``kernel ≈ left · right``: a full-size convolution into r channels, then a pointwise one.

    >>> factors = SVDFactors(torch.ones(4, 1), torch.ones(1, 3, 3, 3))
    >>> factors.shape, factors.n_params, factors.to_dense().sum().item()
    ((4, 3, 3, 3), 31, 108.0)
    """

    left: Tensor  # (t, r)
    right: Tensor  # (r, s, *taps)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.left.shape[0], *self.right.shape[1:])

    @property
    def n_params(self) -> int:
        return _count((self.left, self.right))

    @property
    def rank(self) -> int:
        return self.left.shape[1]

    def to_dense(self) -> Tensor:
        return (self.left @ self.right.flatten(1)).reshape(self.shape)


@dataclass(frozen=True, eq=False)
class Tucker2Factors:
    """``kernel = core ×₁ out_basis ×₂ in_basis``: pointwise, small spatial core, pointwise.

    >>> factors = Tucker2Factors(torch.eye(4, 2), torch.ones(2, 3, 3, 3), torch.eye(5, 3))
    >>> factors.shape, factors.n_params
    ((4, 5, 3, 3), 77)
    """

    out_basis: Tensor  # (t, r_t)
    core: Tensor  # (r_t, r_s, *taps)
    in_basis: Tensor  # (s, r_s)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.out_basis.shape[0], self.in_basis.shape[0], *self.core.shape[2:])

    @property
    def n_params(self) -> int:
        return _count((self.out_basis, self.core, self.in_basis))

    @property
    def rank_out(self) -> int:
        return self.out_basis.shape[1]

    @property
    def rank_in(self) -> int:
        return self.in_basis.shape[1]

    def to_dense(self) -> Tensor:
        core = self.core.reshape(self.rank_out, self.rank_in, -1)  # (r_t, r_s, k)
        return torch.einsum("ta,abk,sb->tsk", self.out_basis, core, self.in_basis).reshape(self.shape)


@dataclass(frozen=True, eq=False)
class CPFactors:
    """``kernel = Σ_r out[:, r] ⊗ in[:, r] ⊗ spatial₁[:, r] ⊗ …``: pointwise, depthwise per spatial factor, pointwise.

    With ``joint=True`` there is one spatial factor over all taps together, (k1·k2·…, r), in row-major order;
    otherwise there is one for each spatial axis.

    >>> ones = lambda n: torch.ones(n, 2)
    >>> CPFactors(ones(4), ones(5), (ones(3), ones(3)), taps=(3, 3)).n_params
    30
    >>> CPFactors(ones(4), ones(5), (ones(9),), taps=(3, 3), joint=True).n_params
    36
    """

    out_factor: Tensor  # (t, r)
    in_factor: Tensor  # (s, r)
    spatial: tuple[Tensor, ...]  # (k_i, r) each
    taps: tuple[int, ...]
    joint: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.out_factor.shape[0], self.in_factor.shape[0], *self.taps)

    @property
    def n_params(self) -> int:
        return _count((self.out_factor, self.in_factor, *self.spatial))

    @property
    def rank(self) -> int:
        return self.out_factor.shape[1]

    def to_dense(self) -> Tensor:
        letters = string.ascii_lowercase.replace("r", "")[: 2 + len(self.spatial)]
        equation = ",".join(f"{letter}r" for letter in letters) + "->" + letters
        return torch.einsum(equation, self.out_factor, self.in_factor, *self.spatial).reshape(self.shape)

    def balanced(self) -> CPFactors:
        """The same kernel with the columns of all factors equally long, so that none overflows or quantises badly."""
        factors = (self.out_factor, self.in_factor, *self.spatial)
        lengths = torch.stack([factor.norm(dim=0) for factor in factors])  # (modes, r)
        # A column that is zero anywhere contributes nothing: make it zero everywhere.
        alive = (lengths > 0).all(0)
        log_lengths = lengths.clamp_min(torch.finfo(lengths.dtype).tiny).log()
        common = log_lengths.mean(0)
        out_factor, in_factor, *spatial = (
            factor * torch.where(alive, (common - own).exp(), torch.zeros_like(own))
            for factor, own in zip(factors, log_lengths, strict=True)
        )
        return CPFactors(out_factor, in_factor, tuple(spatial), self.taps, self.joint)

"""The factors of one kernel as a chain of stages, and the least-squares problem of each stage.

Notation: K (o, c, *taps) kernel of a stage, A (c·q, d) what the stages before it make of the layer's patch, E (t, o,
*taps) the stages after it, M (t, d) the kernel that the layer should have, S (d, d) damped gram of its patch.

Factors of a layer are linear and no two of them have taps on the same axis, so that kernels of stages are multiplied
over channels and spread over taps. With all other stages fixed, the kernel of the whole layer is linear in K, and

    tr((M − M̃) S (M − M̃)ᵀ) = vec(K)ᵀ H vec(K) − 2 hᵀ vec(K) + const

is a quadratic form. H follows from N = A S Aᵀ, the gram of what the stage sees, and from P = EᵀE, what its outputs
count. The patch of a stage has c channels and q = taps of its own and of later stages, since it is applied at all of
the positions that these read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tensigma.linalg import Metric


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage of a chain: the kernel (groups, o, c, *taps), with one group, or one channel in each group."""

    kernel: Tensor

    @property
    def is_depthwise(self) -> bool:
        return len(self.kernel) > 1

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(self.kernel.shape[3:])

    def dense(self) -> Tensor:
        """The kernel without groups, (o, c, *taps)."""
        if not self.is_depthwise:
            return self.kernel[0]
        n = len(self.kernel)
        full = self.kernel.new_zeros(n, n, *self.taps)
        full[torch.arange(n), torch.arange(n)] = self.kernel[:, 0, 0]
        return full


def composed(stages: Sequence[Stage]) -> Tensor | None:
    """The kernel (t, s, *taps) of stages that run one after the other; None for no stage.

    >>> first, second = Stage(torch.ones(1, 2, 3, 3, 1)), Stage(torch.ones(1, 4, 2, 1, 5))
    >>> composed([first, second]).shape
    torch.Size([4, 3, 3, 5])
    """
    whole: Tensor | None = None
    for stage in stages:
        if whole is None:
            whole = stage.dense()
        elif stage.is_depthwise:
            whole = stage.kernel[:, 0] * whole
        else:
            whole = torch.einsum("to...,os...->ts...", stage.dense(), whole)
    return whole


class StageProblem:
    """How the loss of a layer depends on the kernel of one of its stages, all others being fixed.

    ``target`` is the kernel (t, s, *taps) that the layer should have, under ``metric``.
    """

    def __init__(self, stages: Sequence[Stage], place: int, target: Tensor, metric: Metric) -> None:
        self.stage = stages[place]
        before, after = composed(stages[:place]), composed(stages[place + 1 :])
        taps = tuple(target.shape[2:])
        self._own = self.stage.taps
        later = (1,) * len(taps) if after is None else tuple(after.shape[2:])
        self.n_own, self.n_later = math.prod(self._own), math.prod(later)
        self.is_last = after is None
        self._after = None if after is None else after.reshape(*after.shape[:2], -1)  # E, (t, o, q_later)
        patch = None if before is None else _patch_map(before, taps)  # A
        moment = metric.times(target.flatten(1), damped=True)  # M S
        if patch is None:
            gram, cross = metric.dense().to(target), moment
            gram = gram + metric.epsilon * torch.eye(len(gram)).to(gram)
        else:
            gram = metric.times(patch, damped=True) @ patch.T
            cross = moment @ patch.T
        n_channels = self.stage.dense().shape[1]
        self._gram = _split(_split(gram, n_channels, self._own, later).mT, n_channels, self._own, later).mT
        self._cross = _split(cross, n_channels, self._own, later)
        self._channels = n_channels

    @property
    def size(self) -> int:
        """How many weights the stage has."""
        return self.stage.kernel.numel()

    def input_gram(self) -> Tensor:
        """N between the inputs of one output, (c·q_own, c·q_own), with later taps weighed as all outputs weigh them."""
        if self.n_later == 1:
            return self._gram
        assert self._after is not None
        weights = torch.einsum("tok,tol->kl", self._after, self._after)
        width = self._channels * self.n_own
        blocks = self._gram.reshape(width, self.n_later, width, self.n_later)
        return torch.einsum("akbl,kl->ab", blocks, weights / weights.trace().clamp_min(_tiny(weights)))

    def hessian(self) -> Tensor:
        """H, (n, n) for the n weights of the stage, in the order of its kernel."""
        n_out = self.stage.dense().shape[0]
        after = torch.eye(n_out).to(self._gram)[:, :, None] if self._after is None else self._after
        counts = torch.einsum("tok,tpl->okpl", after, after)  # P
        shape = (self._channels, self.n_own, self.n_later)
        gram = self._gram.reshape(*shape, *shape)
        if self.stage.is_depthwise:
            form = torch.einsum("okpl,oakpbl->oapb", counts, gram)
        else:
            width = self._channels * self.n_own
            form = torch.einsum("okpl,akbl->oapb", counts, gram.reshape(width, self.n_later, width, self.n_later))
        return form.reshape(self.size, self.size)

    def refitted(self, ridge: float) -> Tensor:
        """The kernel that is best with all other stages as they are, drawn towards the present one by ``ridge``."""
        former = self.stage.kernel
        if self.n_later == 1 and not self.stage.is_depthwise:
            return self._separately(former[0].flatten(1), ridge).reshape(former.shape)
        form, flat = self.hessian().double(), former.flatten().double()
        aim = self._aim().double()
        return _ridged_solve(form, aim, flat, ridge).to(former).reshape(former.shape)

    def _aim(self) -> Tensor:
        """h, (n)."""
        assert self._after is not None
        cross = self._cross.reshape(-1, self._channels, self.n_own, self.n_later)
        equation = "tok,toak->oa" if self.stage.is_depthwise else "tok,tcak->oca"
        return torch.einsum(equation, self._after, cross).flatten()

    def _separately(self, former: Tensor, ridge: float) -> Tensor:
        """Without later taps H is P ⊗ N, so that K = P⁻¹ Eᵀ (M S Aᵀ) N⁻¹."""
        pulled = self._cross.double()
        if self._after is not None:
            after = self._after[:, :, 0].double()
            pulled = torch.linalg.lstsq(after, pulled).solution
        return _ridged_solve(self._gram.double(), pulled.mT, former.double().mT, ridge).mT.to(former)


def _ridged_solve(form: Tensor, aim: Tensor, former: Tensor, ridge: float) -> Tensor:
    """(F + λI)⁻¹ (aim + λ former), λ relative to the mean of the diagonal."""
    level = ridge * form.diagonal().mean().clamp_min(_tiny(form))
    damped = form + level * torch.eye(len(form)).to(form)
    return torch.linalg.solve(damped, aim + level * former)


def _tiny(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).tiny


def _patch_map(before: Tensor, taps: tuple[int, ...]) -> Tensor:
    """A, (c·q, d): the patch of a stage from that of the layer; q are the taps that ``before`` does not have."""
    n_spatial = len(taps)
    n_channels, n_in = before.shape[:2]
    used = before.shape[2:]
    grown = before.reshape(n_channels, *(1,) * n_spatial, n_in, *used)
    for axis, size in enumerate(taps):
        if used[axis] == 1 and size > 1:
            shape = [1] * grown.ndim
            shape[1 + axis] = shape[2 + n_spatial + axis] = size
            grown = grown * torch.eye(size).to(before).reshape(shape)
    # An axis that ``before`` has taps on is gone; on the others, input and output taps are the same.
    return grown.reshape(-1, n_in * math.prod(taps))


def _split(matrix: Tensor, n_channels: int, own: tuple[int, ...], later: tuple[int, ...]) -> Tensor:
    """Columns (c, *taps) in the order (c, own taps, later taps)."""
    shape: list[int] = []
    order_own: list[int] = []
    order_later: list[int] = []
    for mine, theirs in zip(own, later, strict=True):
        (order_later if theirs > 1 else order_own).append(2 + len(shape))
        shape.append(max(mine, theirs))
    spread = matrix.reshape(len(matrix), n_channels, *shape)
    return spread.permute(0, 1, *order_own, *order_later).reshape(len(matrix), -1)

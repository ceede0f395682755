"""Zeros around the input of a convolution that a plain PyTorch layer cannot add itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn import functional

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Padding:
    """Zeros before and after each spatial axis: fixed, or as many as make the output ⌈input ÷ stride⌉ long.

    >>> Padding("NOTSET", ((0, 1), (2, 3))).pairs((8, 8)), Padding("SAME_UPPER", (), (3,), (2,), (1,)).pairs((8,))
    (((0, 1), (2, 3)), ((0, 1),))
    """

    kind: Literal["NOTSET", "SAME_UPPER", "SAME_LOWER"]
    fixed: Pairs = ()
    kernel_size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()

    def pairs(self, sizes: Sequence[int]) -> Pairs:
        """Zeros (before, after) on each axis of an input of these spatial sizes."""
        if self.kind == "NOTSET":
            return self.fixed
        pairs = []
        for size, k, step, dilation in zip(sizes, self.kernel_size, self.stride, self.dilation, strict=True):
            total = max((-(-size // step) - 1) * step + (k - 1) * dilation + 1 - size, 0)
            less = total // 2
            pairs.append((less, total - less) if self.kind == "SAME_UPPER" else (total - less, less))
        return tuple(pairs)

    def apply(self, x: Tensor) -> Tensor:
        """The padded input."""
        pairs = self.pairs(x.shape[-len(self.fixed or self.kernel_size) :])
        return functional.pad(x, [zeros for pair in reversed(pairs) for zeros in pair]) if any(map(any, pairs)) else x

    @property
    def simplest(self) -> Padding:
        """Fixed zeros where they do not depend on the input: a stride of 1, or one tap."""
        axes = zip(self.kernel_size, self.stride, strict=True)
        if self.kind == "NOTSET" or not all(step == 1 or k == 1 for k, step in axes):
            return self
        # One tap is never padded, and with a stride of 1 any size gives the same zeros.
        return Padding("NOTSET", self.pairs([1] * len(self.kernel_size)))

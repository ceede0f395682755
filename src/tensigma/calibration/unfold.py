"""Sums of patch products by unfolding blocks of images: for every geometry, and best for small maps and 1×1 kernels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from tensigma.calibration.scratch import Scratch, accumulate
from tensigma.calibration.window import Window

# Patch matrices are at most this large. Affects speed and memory, and the result only by rounding.
BLOCK_BYTES = 24 * 2**20
# Narrower blocks of the upper triangle save more products but lose the speed of a large matrix product.
BLOCK_WIDTH = 256


class UnfoldSums:
    """Σ over rows of u uᵀ, kept as the upper block triangle in float64, one (d, d) matrix per group."""

    def __init__(self, window: Window, device: torch.device, scratch: Scratch) -> None:
        self.window = window
        self.scratch = scratch
        g, d = window.groups, window.d
        self.sums = torch.zeros(g, d, d, dtype=torch.float64, device=device)
        n_blocks = max(1, d // BLOCK_WIDTH)
        self.edges = [d * i // n_blocks for i in range(n_blocks + 1)]

    @staticmethod
    def n_bytes(window: Window) -> int:
        return 8 * window.groups * window.d**2

    @staticmethod
    def block_bytes(window: Window, itemsize: int) -> int:
        """The largest product that is computed before it is added."""
        n_blocks = max(1, window.d // BLOCK_WIDTH)
        return itemsize * window.groups * -(-window.d // n_blocks) * window.d

    @staticmethod
    def flops(window: Window, size: Sequence[int]) -> float:
        """Work for one map, in multiply-adds worth of a large matrix product."""
        n_blocks = max(1, window.d // BLOCK_WIDTH)
        rows = window.n_rows(size)
        # The copy of one number costs about as much as 40 multiply-adds.
        return rows * window.groups * window.d * (window.d * (1 + 1 / n_blocks) / 2 + 40)

    def add(self, maps: Tensor) -> None:
        """Add the patches of ``maps`` (n, channels, *size), zero-padded as the window requires."""
        window = self.window
        if not window.n_spatial:
            self._add_rows(maps.reshape(len(maps), window.groups, window.s).permute(1, 2, 0), self.sums)
            return
        # The patches of one map and one group are the least that can be added.
        least = max(1, window.n_rows(maps.shape[2:]) * window.d * maps.element_size())
        n_groups = max(1, min(window.groups, BLOCK_BYTES // least))
        step = max(1, BLOCK_BYTES // (least * n_groups))
        for first in range(0, window.groups, n_groups):
            groups = slice(first, first + n_groups)
            part = maps[:, window.s * first : window.s * (first + n_groups)]
            for start in range(0, len(maps), step):
                self._add_rows(self._patches(part[start : start + step]), self.sums[groups])

    def _patches(self, maps: Tensor) -> Tensor:
        """Patch matrix (groups, d, rows) of a few maps, of all groups or some."""
        window = self.window
        if window.is_padded:
            maps = functional.pad(maps, [p for pads in reversed(window.pads) for p in pads])
        out = window.output_size([n - sum(p) for n, p in zip(maps.shape[2:], window.pads, strict=True)])
        by_channel = maps.transpose(0, 1)  # (channels, n, *size)
        shape = (len(by_channel), window.n_taps, len(maps), *out)
        patches = self.scratch.get("patches", shape, maps.dtype, maps.device)
        for tap, offsets in enumerate(product(*map(range, window.taps))):
            axes = zip(offsets, window.dilation, window.stride, out, strict=True)
            reads = tuple(slice(o * dil, o * dil + step * (n - 1) + 1, step) for o, dil, step, n in axes)
            patches[:, tap].copy_(by_channel[(slice(None), slice(None), *reads)])
        return patches.reshape(len(by_channel) // window.s, window.d, -1)

    def _add_rows(self, patches: Tensor, sums: Tensor) -> None:
        for start, stop in zip(self.edges, self.edges[1:], strict=False):
            # Only blocks on and above the diagonal: the rest is their mirror image.
            shape = (len(patches), stop - start, patches.shape[1] - start)
            block = self.scratch.get("block", shape, patches.dtype, patches.device)
            torch.bmm(patches[:, start:stop], patches[:, start:].mT, out=block)
            accumulate(sums[:, start:stop, start:], block, self.scratch)

    def rows(self, tap: int, out: Tensor) -> Tensor:
        """Write the sums of one tap with all taps, (groups, k, s, s) in float64, to ``out``."""
        window = self.window
        if tap == 0:
            for start, stop in zip(self.edges, self.edges[1:], strict=False):
                self.sums[:, stop:, start:stop] = self.sums[:, start:stop, stop:].mT
        by_taps = self.sums.view(window.groups, window.s, window.n_taps, window.s, window.n_taps)
        return out.copy_(by_taps[:, :, tap].permute(0, 3, 1, 2))

"""How the rows of a layer are cut from its input: taps, strides and paddings, and where the padding shows.

Notation: ``s`` input channels of one group, ``k`` taps, ``d = s·k``; a row is indexed channel · k + tap, the order of
:func:`torch.nn.functional.unfold`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tensigma.layers import Geometry


@dataclass(frozen=True, kw_only=True)
class Window:
    """The patches a layer sees: ``channels`` maps, zero-padded by ``pads``, read at ``taps`` with stride and dilation.

    A Linear layer has no spatial axes. Paddings other than zeros are applied to the map beforehand and do not appear
    here. A transposed convolution multiplies the channel vector at each position by its kernel, so its rows are those
    vectors: one tap, ``d = in_channels / groups``.

    >>> from torch import nn
    >>> window = Window.of(Geometry.of(nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2)))
    >>> window.d, window.n_taps, window.output_size((7, 7))
    (36, 9, (4, 4))
    >>> Window.of(Geometry.of(nn.ConvTranspose2d(8, 4, 3, stride=2))).d
    8
    """

    channels: int
    groups: int
    taps: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, geometry: Geometry) -> Window:
        n = geometry.n_spatial
        ones = (1,) * n
        no_pads = ((0, 0),) * n
        if geometry.kind == "conv":
            return cls(
                channels=geometry.in_channels,
                groups=geometry.groups,
                taps=geometry.kernel_size,
                stride=geometry.stride,
                dilation=geometry.dilation,
                pads=geometry.pads if geometry.padding_mode == "zeros" else no_pads,
            )
        return cls(
            channels=geometry.in_channels, groups=geometry.groups, taps=ones, stride=ones, dilation=ones, pads=no_pads
        )

    @property
    def n_spatial(self) -> int:
        return len(self.taps)

    @property
    def n_taps(self) -> int:
        return math.prod(self.taps)

    @property
    def s(self) -> int:
        return self.channels // self.groups

    @property
    def d(self) -> int:
        return self.s * self.n_taps

    @property
    def is_padded(self) -> bool:
        return any(before or after for before, after in self.pads)

    def output_size(self, size: Sequence[int]) -> tuple[int, ...]:
        axes = zip(size, self.taps, self.stride, self.dilation, self.pads, strict=True)
        return tuple((n + sum(pad) - dilation * (k - 1) - 1) // step + 1 for n, k, step, dilation, pad in axes)

    def n_rows(self, size: Sequence[int]) -> int:
        """Rows that one map of this size gives."""
        return math.prod(self.output_size(size))

    def visibility(self, axis: int, size: int) -> Tensor:
        """Which map positions tap ``a`` reads while tap ``b`` also reads inside the map: (k, k, size) of 0 and 1.

        Entry (a, b, y) is 1 where some output position puts tap ``a`` on position ``y`` of the map and tap ``b`` on
        the map too, not on its padding. Every position is read at most once, so sums over ``y`` count output positions.
        """
        k, step, dilation, (before, after) = self.taps[axis], self.stride[axis], self.dilation[axis], self.pads[axis]
        n_out = (size + before + after - dilation * (k - 1) - 1) // step + 1
        starts = torch.arange(n_out) * step - before  # map position of tap 0
        reads = starts[None, :] + dilation * torch.arange(k)[:, None]  # (k, n_out)
        inside = (reads >= 0) & (reads < size)
        seen = torch.zeros(k, k, size, dtype=torch.float64)
        for a in range(k):
            here = inside[a]
            seen[a][:, reads[a, here]] = inside[:, here].double()
        return seen

    def border_sums(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of the map over what each pair of taps sees, and the number of output positions where both see the map.

        ``total`` (channels, *size) is the sum of all maps. Returns ``sums`` (channels, k, k), where entry (c, a, b)
        adds channel c under tap a over the output positions where tap b lies inside the map, and ``counts`` (k, k) for
        one map.
        """
        size = total.shape[1:]
        if not self.n_spatial:
            return total[:, None, None], torch.ones(1, 1, dtype=torch.float64, device=total.device)
        sums = total.double()
        counts = torch.ones(1, 1, dtype=torch.float64)
        for axis in range(self.n_spatial):
            seen = self.visibility(axis, size[axis])
            # Contract the first spatial axis left and append its pair of taps: (c, y, …, a…, b…) is kept in order.
            sums = torch.tensordot(sums, seen.to(sums.device), dims=([1], [2]))
            pair = seen.sum(2)
            counts = (counts[:, None, :, None] * pair[None, :, None, :]).flatten(2).flatten(0, 1)
        n = self.n_spatial
        # After the loop: (c, a1, b1, a2, b2, …) → (c, a1 a2 …, b1 b2 …).
        order = [0, *range(1, 2 * n + 1, 2), *range(2, 2 * n + 1, 2)]
        sums = sums.permute(order).reshape(total.shape[0], self.n_taps, self.n_taps)
        return sums, counts.to(total.device)

"""Work space that is allocated once: fresh pages for every large product cost more than the product itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

PIECE = 2**17


class Scratch:
    """Named buffers that grow as needed. Asking for a name again invalidates the tensor returned before.

    >>> scratch = Scratch()
    >>> first = scratch.get("a", (2, 3), torch.float32, torch.device("cpu"))
    >>> scratch.get("a", (3,), torch.float32, torch.device("cpu")).data_ptr() == first.data_ptr()
    True
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        size = math.prod(shape)
        key = (name, dtype, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            self._buffers[key] = buffer = torch.empty(size, dtype=dtype, device=device)
        return buffer[:size].view(shape)

    def free(self, name: str) -> None:
        """Free what is kept under this name."""
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key[0] != name}

    @property
    def n_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())


def accumulate(total: Tensor, part: Tensor, scratch: Scratch) -> None:
    """``total += part`` in float64, without the fresh temporary that adding across precisions makes."""
    if part.dtype == total.dtype:
        total += part
        return
    if total.dim() > 2 and total[0].numel() >= PIECE:
        for total_slice, part_slice in zip(total, part, strict=True):
            accumulate(total_slice, part_slice, scratch)
        return
    rows = max(1, PIECE // max(1, part[0].numel()))
    for start in range(0, len(part), rows):
        block = part[start : start + rows]
        total[start : start + rows] += scratch.get("wide", tuple(block.shape), total.dtype, total.device).copy_(block)

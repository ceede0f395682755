"""Types and shapes of values, as ONNX Runtime names them and as PyTorch has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

#: Names of types in ONNX Runtime → type of a tensor, number of the type in ONNX.
TYPES = {
    "tensor(float)": (torch.float32, 1),
    "tensor(uint8)": (torch.uint8, 2),
    "tensor(int8)": (torch.int8, 3),
    "tensor(int16)": (torch.int16, 5),
    "tensor(int32)": (torch.int32, 6),
    "tensor(int64)": (torch.int64, 7),
    "tensor(bool)": (torch.bool, 9),
    "tensor(float16)": (torch.float16, 10),
    "tensor(double)": (torch.float64, 11),
}


def sizes_of(shape: Sequence[Any] | None) -> tuple[int | None, ...]:
    """A shape in which names, −1 and unknown sizes are None: they may vary.

    >>> sizes_of(["batch", 3, -1, None])
    (None, 3, None, None)
    """
    return tuple(size if isinstance(size, int) and size > 0 else None for size in shape or ())

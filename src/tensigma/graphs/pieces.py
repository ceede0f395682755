"""Batches in pieces, for networks that take one batch size only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def joined(results: Sequence[Any], sizes: Sequence[int]) -> Any:
    """One answer from those to pieces of these sizes. Answers without an axis for samples get one.

    >>> joined([torch.ones(1, 4), torch.ones(1, 4)], [1, 1]).shape, joined([torch.ones(9, 4)] * 2, [1, 1]).shape
    (torch.Size([2, 4]), torch.Size([2, 9, 4]))
    """
    if len(results) == 1:
        return results[0]
    rows = [len(result) if result.ndim else None for result in results]
    return torch.cat(list(results)) if rows == list(sizes) else torch.stack(list(results))


def repeated(array: np.ndarray, shape: Sequence[int | None], count: int) -> Tensor:
    """A fixed input for ``count`` samples: one row for all, where the number of rows may vary.

    >>> repeated(np.ones((1, 2)), (None, 2), 3).shape, repeated(np.ones((1, 2)), (1, 2), 3).shape
    (torch.Size([3, 2]), torch.Size([1, 2]))
    """
    tensor = torch.from_numpy(array)
    if shape and shape[0] is None and len(tensor) == 1:
        return tensor.expand(count, *tensor.shape[1:]).contiguous()
    return tensor

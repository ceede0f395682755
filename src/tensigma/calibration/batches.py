"""Model inputs out of whatever people iterate over: tensors, tuples, dicts, and several loaders in a row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensigma.errors import InputError

LABEL_KEYS = ("label", "labels", "target", "targets", "y")


def is_batch(item: Any) -> bool:
    """Whether an item is one batch, rather than a loader of batches."""
    if isinstance(item, Tensor | np.ndarray | Mapping):
        return True
    return isinstance(item, tuple | list) and bool(item) and isinstance(item[0], Tensor | np.ndarray)


def iterate(batches: Any) -> Iterator[Any]:
    """All batches of one loader, or of several given as a list.

    A list that begins with a tensor is one batch, so a list of lists of tensors is read as batches, not as loaders.

    >>> [len(b) for b in iterate([torch.zeros(2, 3), torch.zeros(1, 3)])]
    [2, 1]
    >>> first, second = [torch.zeros(2, 3)], [(torch.zeros(4, 3), torch.zeros(4))]
    >>> [len(b[0]) for b in iterate([second, second])]
    [4, 4]
    """
    if isinstance(batches, Tensor | np.ndarray):
        raise InputError(
            f"batches is one array of shape {tuple(batches.shape)}; pass an iterable of batches, such as [batch] or a"
            " DataLoader"
        )
    if isinstance(batches, Mapping):
        raise InputError(
            f"batches is one dict with keys {sorted(map(str, batches))}; pass an iterable of batches, such as [batch]"
        )
    if not isinstance(batches, Iterable):
        raise InputError(f"batches is a {type(batches).__name__}; pass an iterable of tensors, tuples or dicts")
    for item in batches:
        if is_batch(item) or not isinstance(item, Iterable) or isinstance(item, str | bytes):
            yield item
        else:
            yield from iterate(item)


def count_batches(batches: Any) -> int | None:
    """How many batches there will be, where that can be known without iterating."""
    if isinstance(batches, tuple | list) and batches and not is_batch(batches[0]) and not isinstance(batches[0], str):
        counts = [count_batches(item) for item in batches]
        return None if None in counts else sum(c for c in counts if c is not None)
    try:
        return len(batches)
    except TypeError:
        return None


def is_one_shot(batches: Any) -> bool:
    """Whether a second iteration would find nothing."""
    if isinstance(batches, tuple | list):
        return any(is_one_shot(item) for item in batches if not is_batch(item))
    return isinstance(batches, Iterator) or bool(getattr(batches, "is_one_shot", False))


def input_of(batch: Any, key: str | int | None, index: int) -> Tensor:
    """The model input of one batch: the tensor itself, the first item of a tuple, or the entry ``key``."""
    if isinstance(batch, Mapping):
        if key is None and len(batch) == 1:
            key = next(iter(batch))
        if key is None:
            raise InputError(
                f"batch {index} is a dict; name the model input with input=, one of {sorted(map(str, batch))}"
            )
        if key not in batch:
            raise InputError(f"batch {index} has no entry {key!r}; it has {sorted(map(str, batch))}")
        found = batch[key]
    elif isinstance(batch, tuple | list):
        position = key if isinstance(key, int) else 0
        if not -len(batch) <= position < len(batch):
            raise InputError(f"batch {index} has {len(batch)} items, so input={position} does not exist")
        found = batch[position]
    else:
        found = batch
    if isinstance(found, np.ndarray):
        found = torch.from_numpy(found)
    if not isinstance(found, Tensor):
        raise InputError(f"batch {index}: the model input is a {type(found).__name__}; a tensor is needed (see input=)")
    if found.dim() == 0:
        raise InputError(f"batch {index}: the model input is a single number; a batch of samples is needed")
    return found


def labels_of(batch: Any, index: int) -> Tensor:
    """The labels of one batch: the second item of a tuple, or the entry called label(s), target(s) or y of a dict."""
    found: Any = None
    if isinstance(batch, Mapping):
        found = next((batch[key] for key in LABEL_KEYS if key in batch), None)
    elif isinstance(batch, tuple | list) and len(batch) > 1:
        found = batch[1]
    if isinstance(found, np.ndarray):
        found = torch.from_numpy(found)
    if not isinstance(found, Tensor):
        raise InputError(
            f'batch {index} holds no labels; fisher="labels" needs (input, labels) pairs, fisher="model" does not'
        )
    return found

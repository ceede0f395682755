"""Batches of model inputs from any iterable: of tensors, tuples or dicts, or several loaders in a row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensigma.errors import InputError
from tensigma.running.inputs import Inputs, Several, is_images, n_samples, taken, tensors_in

#: Which entry or entries of a batch the model is called with.
Key = str | int | Sequence[str | int] | None
LABEL_KEYS = ("label", "labels", "target", "targets", "y")


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch: its place in the pass, the input of the model, and the item that holds it.

    >>> batch = Batch(0, torch.zeros(2, 3), (torch.zeros(2, 3), torch.tensor([1, 0])))
    >>> len(batch), batch.labels
    (2, tensor([1, 0]))
    """

    index: int
    #: One tensor, or a list of images or several arguments.
    inputs: Any = field(repr=False)
    item: Any = field(repr=False)
    #: Samples in the item, if some of them were cut off.
    n_whole: int | None = None

    def __len__(self) -> int:
        return n_samples(self.inputs)

    @property
    def targets(self) -> Any:
        """What the batch holds in place of labels, in any form with one entry per input; None if there is nothing.

        >>> Batch(0, torch.zeros(1, 3, 4, 4), (torch.zeros(1, 3, 4, 4), torch.ones(1, 4, 4).long())).targets.shape
        torch.Size([1, 4, 4])
        """
        labels = self.labels
        if labels is not None:
            return labels
        targets = _labels(self.item)
        if isinstance(targets, np.ndarray):
            targets = torch.from_numpy(targets)
        n_inputs = len(self) if self.n_whole is None else self.n_whole
        if not isinstance(targets, Tensor | list | tuple) or (isinstance(targets, Tensor) and not targets.dim()):
            return None
        return targets[: len(self)] if len(targets) == n_inputs else None

    @property
    def labels(self) -> Tensor | None:
        """Class numbers, one per input; None if the batch has none."""
        labels = class_labels(self.item)
        if labels is None:
            return None
        n_inputs = len(self) if self.n_whole is None else self.n_whole
        if len(labels) != n_inputs:
            raise InputError(f"batch {self.index} has {n_inputs} inputs and {len(labels)} labels")
        return labels[: len(self)]


class Batches:
    """Batches of model inputs, pass after pass.

    Args:
        source: Any iterable of tensors, tuples (the first item is the input) or dicts, or a list of such iterables.
        input: The key or position of the model's input in a batch. Several in a tuple are passed together: those at
            positions in order, those under keys by name; ``"*"`` passes all items of a tuple, ``"**"`` all of a dict.
        max_samples: Stop after this many samples, cutting the last batch.
        name: The name of the source in messages.
        allow_empty: Accept a source without any sample instead of refusing it.

    Empty batches are skipped.

    >>> batches = Batches([(torch.zeros(4, 3), torch.arange(4)), (torch.ones(4, 3), torch.arange(4))], max_samples=6)
    >>> [(batch.index, len(batch), batch.labels.tolist()) for batch in batches], len(batches)
    ([(0, 4, [0, 1, 2, 3]), (1, 2, [0, 1])], 2)
    >>> list(Batches([], name="data"))
    Traceback (most recent call last):
    ...
    tensigma.errors.InputError: no batches: the iterable given as data is empty
    """

    def __init__(
        self,
        source: Any,
        *,
        input: Key = None,
        max_samples: int | None = None,
        name: str = "batches",
        allow_empty: bool = False,
    ) -> None:
        self.source, self.input, self.max_samples, self.name = source, input, max_samples, name
        self.allow_empty = allow_empty

    def __iter__(self) -> Iterator[Batch]:
        samples = 0
        for index, item in enumerate(iterate(self.source)):
            whole = input_of(item, self.input, index)
            inputs = whole if self.max_samples is None else taken(whole, slice(self.max_samples - samples))
            if n_samples(inputs):
                samples += n_samples(inputs)
                yield Batch(index, inputs, item, n_samples(whole))
            if samples == self.max_samples:
                return
        if not samples and not self.allow_empty:
            raise InputError(f"no batches: the iterable given as {self.name} is empty")

    def __len__(self) -> int:
        total = self.n_batches
        if total is None:
            raise TypeError("the number of batches is not known before they are read")
        return total

    @property
    def n_batches(self) -> int | None:
        """How many batches the source has, if that can be known without reading it."""
        return count_batches(self.source)

    def check_rereadable(self, why: str) -> None:
        """Refuse a source that can be read only once; ``why`` names what reads it more than once."""
        if is_one_shot(self.source):
            raise InputError(
                f"{why} reads {self.name} more than once, but it is a {type(self.source).__name__}, which can be "
                "read only once; pass a list, a DataLoader or another object that can be iterated again"
            )


def is_batch(item: Any) -> bool:
    """Whether an item is one batch, rather than a loader of batches.

    A list of images with their targets, or a tuple that begins with a list of images, is a batch for a detector.

    >>> image = torch.zeros(3, 8, 8)
    >>> is_batch((image, image)), is_batch(([image, image],)), is_batch([[image], [{"labels": 1}]]), is_batch([[image]])
    (True, True, True, False)
    """
    if isinstance(item, Tensor | np.ndarray | Mapping | Several):
        return True
    if not isinstance(item, tuple | list) or not item:
        return False
    tensors = [isinstance(part, Tensor | np.ndarray | Several) for part in item]
    if tensors[0] or (isinstance(item, tuple) and any(tensors)):
        return True
    targets = item[1] if len(item) > 1 and isinstance(item[1], tuple | list) else ()
    return is_images(item[0]) and (isinstance(item, tuple) or bool(targets and isinstance(targets[0], Mapping)))


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
    """How many batches there will be, if that can be known without iterating."""
    if isinstance(batches, tuple | list) and batches and not is_batch(batches[0]) and not isinstance(batches[0], str):
        counts = [count_batches(item) for item in batches]
        return None if None in counts else sum(c for c in counts if c is not None)
    try:
        return len(batches)
    except TypeError:
        return None


def not_ended(batches: Any, name: str) -> Any:
    """``batches`` as they are; an iterator that has already ended is refused, instead of counting as no data.

    >>> not_ended(iter([]), "data")
    Traceback (most recent call last):
    tensigma.errors.InputError: data is an iterator that has ended, so it gives no samples; pass a list or a DataLoader
    """
    if not isinstance(batches, Iterator):
        return batches
    missing = object()
    first = next(batches, missing)
    if first is missing:
        raise InputError(f"{name} is an iterator that has ended, so it gives no samples; pass a list or a DataLoader")
    return chain([first], batches)


def is_one_shot(batches: Any) -> bool:
    """Whether a second iteration would find nothing."""
    if isinstance(batches, tuple | list):
        return any(is_one_shot(item) for item in batches if not is_batch(item))
    return isinstance(batches, Iterator) or bool(getattr(batches, "is_one_shot", False))


def input_of(batch: Any, key: Key, index: int) -> Inputs:
    """The model input of one batch: the tensor itself, the first item of a tuple, or what ``key`` names.

    >>> several = input_of({"image": torch.zeros(2, 3), "mask": torch.ones(2), "id": [4, 7]}, ("image", "mask"), 0)
    >>> list(several.kwargs), len(several)
    (['image', 'mask'], 2)
    """
    if isinstance(key, tuple | list) or key in ("*", "**"):
        return _several(batch, key, index)
    if isinstance(batch, Mapping):
        if key is None and len(batch) == 1:
            key = next(iter(batch))
        if key is None:
            raise InputError(
                f"batch {index} is a dict; name the model input with input=, one of {sorted(map(str, batch))}, or "
                'pass all of it with input="**"'
            )
        assert isinstance(key, str | int)
        inputs = _entry(batch, key, index)
    elif isinstance(batch, tuple | list):
        inputs = _entry(batch, key if isinstance(key, int) else 0, index)
    else:
        inputs = batch
    inputs = _tensors(inputs)
    if isinstance(inputs, Several):
        return inputs
    if is_images(inputs):
        return list(inputs)
    if not isinstance(inputs, Tensor):
        raise InputError(
            f"batch {index}: the model input is a {type(inputs).__name__}; a tensor or a list of images is needed (see "
            "input=)"
        )
    if inputs.dim() == 0:
        raise InputError(f"batch {index}: the model input is a single number; a batch of samples is needed")
    return inputs


def _several(batch: Any, key: str | Sequence[str | int], index: int) -> Several:
    """Several arguments: those under keys by name, those at positions in order."""
    if isinstance(key, str):
        wanted = Mapping if key == "**" else tuple | list
        if not isinstance(batch, wanted):
            form = "a dict" if key == "**" else "a tuple"
            raise InputError(f"batch {index} is a {type(batch).__name__}; input={key!r} takes the items of {form}")
        key = tuple(batch) if isinstance(batch, Mapping) else tuple(range(len(batch)))
    if not isinstance(batch, Mapping | tuple | list):
        raise InputError(f"batch {index} is a {type(batch).__name__}; input={key!r} names entries of a dict or tuple")
    entries = {name: _tensors(_entry(batch, name, index)) for name in key}
    by_name = isinstance(batch, Mapping)
    named = {str(name): value for name, value in entries.items()} if by_name else {}
    inputs = Several(() if by_name else tuple(entries.values()), named)
    if not tensors_in(inputs) or not n_samples(inputs):
        raise InputError(f"batch {index}: none of input={key!r} is a tensor with one entry a sample")
    return inputs


def _entry(batch: Any, key: str | int, index: int) -> Any:
    if isinstance(batch, Mapping):
        if key not in batch:
            raise InputError(f"batch {index} has no entry {key!r}; it has {sorted(map(str, batch))}")
        return batch[key]
    if not isinstance(key, int) or not -len(batch) <= key < len(batch):
        raise InputError(f"batch {index} has {len(batch)} items, so input={key} does not exist")
    return batch[key]


def _tensors(inputs: Any) -> Any:
    if isinstance(inputs, np.ndarray):
        return torch.from_numpy(inputs)
    if isinstance(inputs, tuple | list) and inputs and all(isinstance(item, np.ndarray) for item in inputs):
        return [torch.from_numpy(item) for item in inputs]
    return inputs


def _labels(item: Any) -> Any:
    """What a batch holds in place of labels; None if nothing."""
    if isinstance(item, Mapping):
        return next((item[key] for key in LABEL_KEYS if key in item), None)
    if isinstance(item, tuple | list) and len(item) > 1:
        return item[1]
    return None


def class_labels(item: Any) -> Tensor | None:
    """Class numbers of a batch; None if it has none.

    >>> class_labels((torch.zeros(2, 3), [1, 0])), class_labels(torch.zeros(2, 3))
    (tensor([1, 0]), None)
    """
    labels = _labels(item)
    if labels is not None and not isinstance(labels, Tensor):
        try:
            labels = torch.as_tensor(labels)
        except (TypeError, ValueError, RuntimeError):  # such as the boxes of a detector's targets
            return None
    return None if labels is None or labels.dim() != 1 or labels.is_floating_point() else labels


def target_labels(item: Any, index: int) -> Tensor:
    """The labels of one batch, in any shape: second item of a tuple, or a dict entry under one of ``LABEL_KEYS``."""
    labels = _labels(item)
    if isinstance(labels, np.ndarray):
        labels = torch.from_numpy(labels)
    if not isinstance(labels, Tensor):
        raise InputError(
            f'batch {index} holds no labels; {{fisher}} needs (input, labels) pairs, "model" does not',
            parameters=('fisher="labels"',),
        )
    return labels

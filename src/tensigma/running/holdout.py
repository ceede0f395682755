"""Held-out parts of the data: batches to measure plans on, samples to validate training with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from tensigma.errors import InputError
from tensigma.running.batches import Batches, Key, count_batches, is_one_shot, iterate
from tensigma.running.digests import Digest
from tensigma.running.inputs import joined, n_samples, taken, tensors_in

#: Inputs, and labels in any form with one entry for each sample, None if there are none.
Pair = tuple[Any, Any]
# Of every five batches in a row the second is held out, so that two batches are enough.
_EVERY, _WHICH = 5, 1


class SetAside:
    """Batches without every fifth, which is kept in memory for later: the second, the seventh, the twelfth …

    One pass both gives the rest and keeps :attr:`held`, so that a loader that shuffles cannot mix the two.

    >>> batches = SetAside([torch.full((2, 3), float(n)) for n in range(8)])
    >>> [int(batch[0, 0]) for batch in batches], [int(batch[0, 0]) for batch in batches.held]
    ([0, 2, 3, 4, 5, 7], [1, 6])
    """

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._held: list[Any] = []

    @property
    def is_one_shot(self) -> bool:
        """Whether a second pass would find nothing."""
        return is_one_shot(self._batches)

    @property
    def name(self) -> str:
        """The name of the batches in results, which all of them influenced, held out or not."""
        return str(getattr(self._batches, "name", "batches"))

    @property
    def held(self) -> list[Any]:
        """The batches kept by the first pass, which runs now if there has been none."""
        if not self._held:
            for _ in self:
                pass
        if not self._held:
            raise InputError(
                "every fifth batch is held out, from the second on, but there was no second one; pass smaller batches, "
                "or separate held-out data"
            )
        return self._held

    def __iter__(self) -> Iterator[Any]:
        if self._held:
            # A later pass, for callers that make several: batches stay held out only if the order is the same.
            yield from (batch for index, batch in enumerate(iterate(self._batches)) if index % _EVERY != _WHICH)
            return
        for index, batch in enumerate(iterate(self._batches)):
            if index % _EVERY == _WHICH:
                self._held.append(batch)
            else:
                yield batch

    def __len__(self) -> int:
        total = count_batches(self._batches)
        if total is None:
            raise TypeError("the number of batches is not known before they are read")
        return total - (total + _EVERY - 1 - _WHICH) // _EVERY


class Pairs:
    """Inputs and labels (None if there are none) of all batches, epoch after epoch."""

    def __init__(self, batches: Any, key: Key, name: str = "batches") -> None:
        self._batches = Batches(batches, input=key, name=name)
        self._batches.check_rereadable("training")

    def __iter__(self) -> Iterator[Pair]:
        for batch in self._batches:
            yield batch.inputs, batch.targets


def hold_out(batches: Any, key: Key, *, share: float, seed: int) -> tuple[Iterable[Pair], Iterable[Pair]]:
    """Training and validation samples of ``batches``: of every ``1 / share`` in a row, a random one is held out.

    The samples of a plain DataLoader are split by their place in its data set, so that it may shuffle; those of any
    other source by their place in the pass, which must not change.

    >>> training, validation = hold_out([torch.arange(6.0), torch.arange(6.0, 10)], None, share=0.2, seed=0)
    >>> sorted(torch.cat([x for x, _ in training] + [x for x, _ in validation]).tolist()) == list(range(10))
    True
    >>> sum(len(x) for x, _ in validation)
    2
    """
    if not 0 < share <= 0.5:
        raise InputError(
            "got {validation_share}; pass a share above 0 and up to 0.5, or {validation}",
            parameters=(f"validation_share={share!r}", "validation"),
        )
    if isinstance(batches, DataLoader) and _is_plain(batches):
        n_samples = len(batches.dataset)  # type: ignore[arg-type]
        held = list(itertools.takewhile(lambda position: position < n_samples, _positions(share, seed)))
        kept = sorted(set(range(n_samples)) - set(held))
        return Pairs(_subset(batches, kept), key), Pairs(_subset(batches, held, validation=True), key, "validation")
    split = _Split(batches, key, share, seed)
    return _Side(split, held=False), _Side(split, held=True)


def mixed(batches: Iterable[Pair], count: int, generator: torch.Generator) -> Iterator[Pair]:
    """The same samples, with those of every ``count`` batches in a row in random order."""
    if count == 1:
        yield from batches
        return
    rest = iter(batches)
    while group := list(itertools.islice(rest, count)):
        if len({_form(x, labels) for x, labels in group}) > 1:
            yield from group
            continue
        sizes = [n_samples(x) for x, _ in group]
        order = torch.randperm(sum(sizes), generator=generator)
        inputs = joined([x for x, _ in group])
        labels = None if group[0][1] is None else joined([part for _, part in group])
        for chosen in order.split(sizes):
            yield taken(inputs, chosen), None if labels is None else taken(labels, chosen)


def _form(x: Any, labels: Any) -> Any:
    """What inputs must have in common to be put together."""
    single = isinstance(x, Tensor) or not isinstance(x, list)
    shapes = [(tensor.shape[1:], tensor.dtype) for tensor in tensors_in(x)] if single else []
    return type(x), tuple(shapes), type(labels), labels.shape[1:] if isinstance(labels, Tensor) else None


def _positions(share: float, seed: int) -> Iterator[int]:
    """One random position in every ``1 / share``, without end."""
    generator = torch.Generator().manual_seed(seed)
    for block in itertools.count():
        first, end = math.floor(block / share), math.floor((block + 1) / share)
        yield first + int(torch.randint(end - first, (1,), generator=generator))


class _Split:
    """Samples split by their place in the pass."""

    def __init__(self, batches: Any, key: Key, share: float, seed: int) -> None:
        self._pairs, self._share, self._seed = Pairs(batches, key), share, seed
        self._seen: str | None = None

    def run(self, *, held: bool) -> Iterator[Pair]:
        positions = _positions(self._share, self._seed)
        next_held, n_read = next(positions), 0
        digest = Digest()
        for x, labels in self._pairs:
            size = n_samples(x)
            mask = torch.zeros(size, dtype=torch.bool)
            while next_held < n_read + size:
                mask[next_held - n_read] = True
                next_held = next(positions)
            n_read += size
            if mask.any():
                for tensor in tensors_in(taken(x, mask)):
                    digest.add(tensor)
            chosen = mask if held else ~mask
            if chosen.any():
                yield taken(x, chosen), None if labels is None else taken(labels, chosen)
        # Without this check, a source that shuffles would train on validation samples.
        if self._seen not in (None, digest.text):
            raise InputError(
                "the batches changed, or had another order, in the second pass, so no part of them can be held out for "
                "validation; pass separate data as {validation}, or a DataLoader over a data set with __getitem__",
                parameters=("validation",),
            )
        self._seen = digest.text


class _Side:
    """One of the two parts of a split."""

    def __init__(self, split: _Split, *, held: bool) -> None:
        self._split, self._held = split, held

    def __iter__(self) -> Iterator[Pair]:
        return self._split.run(held=self._held)


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether a loader built over a part of the data set would give the same samples."""
    # A subclass may change batches, which the new loader would not.
    if type(loader) is not DataLoader or loader.batch_size is None or isinstance(loader.dataset, IterableDataset):
        return False
    sampler: Any = loader.sampler
    each_once = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    return each_once and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]


def _subset(loader: DataLoader[Any], indices: list[int], *, validation: bool = False) -> DataLoader[Any]:
    return DataLoader(
        Subset(loader.dataset, indices),
        batch_size=loader.batch_size,
        shuffle=isinstance(loader.sampler, RandomSampler) and not validation,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last and not validation,
        worker_init_fn=loader.worker_init_fn,
    )

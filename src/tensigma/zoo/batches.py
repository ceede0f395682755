"""Batches that can be read repeatedly, always in the same order."""

from __future__ import annotations

import copy
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tensigma.errors import CalibrationWarning, InputError, StoreError
from tensigma.zoo.images import View
from tensigma.zoo.options import DataOptions
from tensigma.zoo.select import permutation
from tensigma.zoo.sources import Source

Batch = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, eq=False)
class Part:
    """One set: the source of its images, how they are prepared, and which are used, in order."""

    name: str
    source: Source
    view: View
    options: DataOptions
    chosen: Tensor  # (n,) indices into the source


class Data:
    """Batches of ``(images, labels or None)``; every pass gives the same batches in the same order.

    ``len`` counts batches, as for a ``DataLoader``; ``n_samples`` counts images.
    """

    def __init__(self, parts: Sequence[Part], *, batch_size: int, workers: int) -> None:
        if batch_size < 1:
            raise InputError(f"batch_size={batch_size!r} is invalid; give a whole number of at least 1")
        self.name = " + ".join(part.name for part in parts)
        self.batch_size = batch_size
        self._parts = tuple(parts)
        self._workers = workers
        # Labels of sets with different classes mean different things, so such a mixture has none.
        classes = {part.source.classes for part in parts}
        labelled = all(part.source.labels is not None for part in parts) and len(classes) == 1
        self.classes: tuple[str, ...] = classes.pop() if labelled else ()
        order = [(index, i) for index, part in enumerate(parts) for i in part.chosen.tolist()]
        if len(parts) > 1 and any(part.options.shuffle for part in parts):
            order = [order[i] for i in permutation(len(order), parts[0].options.seed)]
        self._order = order

    @property
    def n_samples(self) -> int:
        """Number of images."""
        return len(self._order)

    @property
    def n_classes(self) -> int | None:
        """Number of classes that labels may name, or None without labels."""
        return len(self.classes) or None

    @property
    def labels(self) -> Tensor | None:
        """All labels in the order of the batches, without reading an image."""
        if not self.classes:
            return None
        return self._labels(self._order)

    def __len__(self) -> int:
        return math.ceil(self.n_samples / self.batch_size)

    def __repr__(self) -> str:
        return f"Data({self.name!r}, n_samples={self.n_samples}, n_classes={self.n_classes})"

    def __iter__(self) -> Iterator[Batch]:
        chunks = [self._order[i : i + self.batch_size] for i in range(0, self.n_samples, self.batch_size)]
        for images, labels, failures in _ahead(self._load, chunks, self._workers):
            for failure in failures:
                warnings.warn(f"{failure}; skipped", CalibrationWarning, stacklevel=2)
            if len(images):
                yield images, labels

    def take(self, n_samples: int) -> Data:
        """The first ``n_samples`` images."""
        return self._with_order(self._order[:n_samples])

    def shard(self, index: int, count: int) -> Data:
        """Every ``count``-th image from ``index`` on: the share of one process among several."""
        if not 0 <= index < count:
            raise InputError(f"there is no shard {index} of {count}; the index runs from 0 to {count - 1}")
        return self._with_order(self._order[index::count])

    def _with_order(self, order: list[tuple[int, int]]) -> Data:
        other = copy.copy(self)
        other._order = order
        return other

    def _labels(self, positions: Sequence[tuple[int, int]]) -> Tensor:
        sets = [part.source.labels for part in self._parts]
        return torch.tensor([int(sets[part][i]) for part, i in positions], dtype=torch.long)  # type: ignore[index]

    def _load(self, positions: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor | None, list[str]]:
        images: list[Tensor] = []
        kept: list[tuple[int, int]] = []
        reasons: list[str] = []
        for index, part in enumerate(self._parts):
            indices = [i for p, i in positions if p == index]
            if not indices:
                continue
            batch, failures = part.source.read(indices, part.view)
            if failures and part.options.unreadable == "error":
                first = next(iter(failures.values()))
                raise StoreError(f"{first}; remove or replace it, or add unreadable=skip to the name of the data")
            reasons += failures.values()
            if len(batch):
                images.append(batch)
                kept += [(index, i) for i in indices if i not in failures]
        if not images:
            return torch.empty(0), None, reasons
        shapes = {tuple(batch.shape[1:]) for batch in images}
        if len(shapes) > 1:
            sizes = " and ".join("×".join(map(str, shape)) for shape in sorted(shapes))
            raise InputError(f"{self.name}: images of {sizes} cannot be mixed; give all sets the same size=…")
        # Back from one block per set to the order of the mixture.
        rows = {position: i for i, position in enumerate(kept)}
        ordered = [position for position in positions if position in rows]
        stacked = torch.cat(images)
        if len(images) > 1:
            stacked = stacked[[rows[position] for position in ordered]]
        return stacked, self._labels(ordered) if self.classes else None, reasons


class FactoryData:
    """Batches from a user's function, passed on as ``(images, labels or None)``."""

    def __init__(self, name: str, make: Callable[[], Iterable[Any]], *, batch_size: int) -> None:
        self.name = name
        self._make = make
        self._batches: Iterable[Any] | None = self._checked(make(), batch_size)
        self.n_samples: int | None = _length(getattr(self._batches, "dataset", None))
        self.n_classes: int | None = getattr(self._batches, "n_classes", None)

    def _checked(self, batches: Any, batch_size: int) -> Iterable[Any]:
        if isinstance(batches, Dataset):
            return DataLoader(batches, batch_size=batch_size)
        if not isinstance(batches, Iterable):
            raise InputError(f"{self.name} returned a {type(batches).__name__}; return batches, such as a DataLoader")
        return batches

    def __len__(self) -> int:
        length = _length(self._batches)
        if length is None:
            raise TypeError(f"{self.name}: the number of batches is not known")
        return length

    def __iter__(self) -> Iterator[Any]:
        batches = self._batches
        if batches is None:
            batches = self._make()
        elif isinstance(batches, Iterator):
            # A generator can be read once: the next pass asks the function for another.
            self._batches = None
        for batch in batches:
            if isinstance(batch, Tensor):
                yield batch, None
            else:
                yield tuple(batch) if isinstance(batch, list) else batch


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None


def _ahead(load: Callable[[Any], Any], chunks: Sequence[Any], workers: int) -> Iterator[Any]:
    """``map`` in background threads, in order, a little ahead of the consumer."""
    if workers < 1:
        yield from map(load, chunks)
        return
    executor = ThreadPoolExecutor(workers, thread_name_prefix="tensigma-data")
    pending: deque[Future[Any]] = deque()
    try:
        for chunk in chunks:
            pending.append(executor.submit(load, chunk))
            if len(pending) > workers + 1:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        executor.shutdown(cancel_futures=True)

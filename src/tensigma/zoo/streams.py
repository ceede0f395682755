"""Tables of Hugging Face ``datasets`` as a stream: rows are read in turn, and nothing is stored."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tensigma.errors import CalibrationWarning, InputError, StoreError
from tensigma.zoo.decoding import decode, first_size
from tensigma.zoo.hf_datasets import class_names, encoded, find_columns, load_table
from tensigma.zoo.images import View
from tensigma.zoo.options import DataOptions
from tensigma.zoo.sources import MOST_CLASSES
from tensigma.zoo.spec import require

#: In random order, each row is drawn from as many as this.
_BUFFER = 1000
#: Options that need to know all rows before the first is read.
_WHOLE = ("classes", "per_class", "holdout", "weight")


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamedRows:
    """Rows with encoded images; every pass starts from the first and has the same order."""

    name: str
    rows: Any
    column: str
    label: str | None
    classes: tuple[str, ...]
    samples: int | None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        count = 0
        try:
            for row in self.rows:
                count += 1
                yield row
        # Only what is raised while the next row is read, from a file or from the Hub, arrives here.
        except (ValueError, OSError) as error:
            raise StoreError(f"{self.name}: row {count} cannot be read ({error})") from error
        if self.samples is not None and count < self.samples:
            raise InputError(f"{self.name}: samples={self.samples} is too many; there are {count}")

    def first_size(self) -> tuple[int, int] | None:
        """Width and height of the first image; None if it cannot be read."""
        row = next(iter(self.rows), None)
        return None if row is None else first_size(lambda _: encoded(row[self.column]))

    def classes_of(self, rows: list[dict[str, Any]]) -> Tensor | None:
        if self.label is None:
            return None
        values = [row[self.label] for row in rows]
        for value in values:
            if value is None or not 0 <= value < MOST_CLASSES:
                raise StoreError(f"{self.name}: column {self.label!r} holds {value}, no class; they count from 0 on")
        return torch.tensor(values)


@dataclass(frozen=True, eq=False, kw_only=True)
class Stream:
    """Batches of ``(images, labels or None)`` that are prepared when they are asked for."""

    source: StreamedRows
    view: View
    batch_size: int
    skips: bool

    @property
    def n_classes(self) -> int | None:
        """Number of classes, if the table names them."""
        return len(self.source.classes) or None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        rows = iter(self.source)
        first = 0
        while chunk := list(itertools.islice(rows, self.batch_size)):
            images, kept = self._decoded(chunk, first)
            first += len(chunk)
            if kept:
                yield images, self.source.classes_of(kept)

    def _decoded(self, chunk: list[dict[str, Any]], first: int) -> tuple[Tensor, list[dict[str, Any]]]:
        """The images of a few rows, and the rows whose image could be read."""
        column = self.source.column
        images, failures = decode(
            range(len(chunk)),
            self.view,
            lambda index: encoded(chunk[index][column]),
            lambda index: f"{self.source.name}: row {first + index} of the stream",
        )
        for failure in failures.values():
            if not self.skips:
                raise StoreError(f"{failure}; remove or replace it, or add unreadable=skip to the name of the data")
            warnings.warn(f"{failure}; skipped", CalibrationWarning, stacklevel=3)
        return images, [row for index, row in enumerate(chunk) if index not in failures]


def open_stream(target: str, options: DataOptions) -> StreamedRows:
    """The rows that :func:`tensigma.zoo.hf_datasets.open_rows` takes, as a stream."""
    name = f"hf:{target}"
    given = [option for option in _WHOLE if getattr(options, option) is not None]
    if given:
        raise InputError(f"{name}: a stream cannot be chosen from by {', '.join(given)}; leave streaming=true out")
    datasets = require("datasets", "hf", name)
    table = load_table(datasets, target, options.stored, streaming=True)
    column, label = find_columns(datasets, target, table.features, options.column, options.label)
    classes = () if label is None else class_names(datasets, target, table.features, label)
    if isinstance(table.features[column], datasets.Image):
        table = table.cast_column(column, datasets.Image(decode=False))
    table = table.select_columns([column] if label is None else [column, label])
    if options.shuffle:
        table = table.shuffle(seed=options.seed, buffer_size=_BUFFER)
    if options.samples is not None:
        table = table.take(options.samples)
    return StreamedRows(name=name, rows=table, column=column, label=label, classes=classes, samples=options.samples)

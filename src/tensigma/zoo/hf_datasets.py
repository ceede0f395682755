"""Data sets of the Hugging Face ``datasets`` package: Parquet files, saved sets, and sets of the Hub.

The package keeps a set in Arrow files that are mapped into memory, so any image can be read without holding the others.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tensigma.errors import InputError, StoreError, TensigmaError
from tensigma.zoo.decoding import decode, first_size
from tensigma.zoo.images import View
from tensigma.zoo.sources import MOST_CLASSES
from tensigma.zoo.spec import require, unknown

#: Names of columns with classes, the first that is there.
_LABELS = ("label", "labels", "fine_label", "class")


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a table with a column of encoded images."""

    table: Any
    column: str
    labels: Tensor | None = None
    classes: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.table)

    def first_size(self) -> tuple[int, int] | None:
        """Width and height of the first image; None if it cannot be read."""
        return first_size(self._open)

    def read(self, indices: Sequence[int], view: View) -> tuple[Tensor, dict[int, str]]:
        return decode(indices, view, self._open, lambda index: f"row {index} of column {self.column!r}")

    def _open(self, index: int) -> Path | io.BytesIO:
        return encoded(self.table[index][self.column])


def encoded(image: Any) -> Path | io.BytesIO:
    """The file of an image as a row holds it: its bytes, or the pair of bytes and path that the package stores."""
    content, path = (image.get("bytes"), image.get("path")) if isinstance(image, dict) else (image, None)
    if content is not None:
        return io.BytesIO(content)
    if path is None:
        raise ValueError("the row has no image")
    return Path(path)


def open_rows(target: str, split: str | None, column: str | None, label: str | None) -> Rows:
    """The images of a Parquet file, a folder of them, a folder that ``save_to_disk`` wrote, or a set of the Hub."""
    datasets = require("datasets", "hf", f"hf:{target}")
    table = load_table(datasets, target, split)
    column, label = find_columns(datasets, target, table.features, column, label)
    if isinstance(table.features[column], datasets.Image):
        # Decoded here, as files of a folder are.
        table = table.cast_column(column, datasets.Image(decode=False))
    labels, classes = (None, ()) if label is None else _labels(datasets, target, table, label)
    return Rows(table.select_columns(column), column, labels, classes)


def find_columns(
    datasets: Any, target: str, features: Any, column: str | None, label: str | None
) -> tuple[str, str | None]:
    """The columns of images and of classes: those that are named, or else the only ones that suit."""
    images = [name for name, kind in features.items() if _holds_images(datasets, kind)]
    if column is None:
        if len(images) != 1:
            have = ", ".join(images) if images else "none"
            raise InputError(f"hf:{target}: columns with images: {have} (all: {', '.join(features)}); give column=")
        column = images[0]
    elif column not in features:
        raise unknown(f"hf:{target}: the column", column, features)
    elif column not in images:
        raise InputError(f"hf:{target}: column {column!r} holds no images but {features[column]}")
    if label is not None and label not in features:
        raise unknown(f"hf:{target}: the column", label, features)
    return column, label or next((name for name in _LABELS if name in features), None)


def load_table(datasets: Any, target: str, split: str | None, *, streaming: bool = False) -> Any:
    """The rows of one split; streamed ones are read anew in every pass, and their columns are known."""
    place = Path(target).expanduser()
    try:
        with _without_bars(datasets):
            loaded = _loaded(datasets, target, place, split, streaming)
    except TensigmaError:
        raise
    except (datasets.exceptions.DatasetsError, ValueError, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise StoreError(
            f"hf:{target} cannot be read as a file or folder, nor as a set of the Hub: {reason}"
        ) from error
    table = loaded
    if isinstance(loaded, dict):
        wanted = split or ("train" if "train" in loaded else None)
        if wanted is None or wanted not in loaded:
            raise unknown(f"hf:{target}: the split", str(wanted), loaded)
        table = loaded[wanted]
    # What save_to_disk wrote is opened as a whole.
    return table.to_iterable_dataset() if streaming and isinstance(table, datasets.Dataset) else table


def _loaded(datasets: Any, target: str, place: Path, split: str | None, streaming: bool) -> Any:
    """Rows, or a dict of them by split."""
    if (place / "dataset_dict.json").is_file() or (place / "dataset_info.json").is_file():
        return datasets.load_from_disk(str(place))
    if place.exists():
        files = [str(place)] if place.is_file() else _parquet_files(place, split)
        return datasets.load_dataset("parquet", data_files=files, split="train", streaming=streaming)
    return datasets.load_dataset(target, streaming=streaming)


@contextmanager
def _without_bars(datasets: Any) -> Iterator[None]:
    """The package draws progress bars; a library does not."""
    shown = datasets.are_progress_bars_disabled() is False
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _parquet_files(folder: Path, split: str | None) -> list[str]:
    """Of files named ``SPLIT-….parquet``, as the Hub names them, those of the split; of others, all."""
    files = sorted(folder.rglob("*.parquet"))
    if not files:
        raise StoreError(f"hf:{folder}: a folder without .parquet files, and none that save_to_disk wrote")
    named = {file: file.name.partition("-")[0].partition(".")[0] for file in files}
    splits = {name for name in named.values() if name in ("train", "test", "validation", "valid", "val")}
    if split is None and "train" in splits:
        split = "train"
    if split is not None:
        if split not in named.values():
            raise unknown(f"hf:{folder}: the split", split, sorted(splits))
        files = [file for file in files if named[file] == split]
    return [str(file) for file in files]


def _holds_images(datasets: Any, kind: Any) -> bool:
    if isinstance(kind, datasets.Image):
        return True
    # Files that other tools wrote: plain bytes, or the pair that the package itself stores.
    if isinstance(kind, dict):
        return "bytes" in kind
    return isinstance(kind, datasets.Value) and kind.dtype in ("binary", "large_binary")


def class_names(datasets: Any, target: str, features: Any, label: str) -> tuple[str, ...]:
    """Names of the classes, if the column has them; refuses one that holds no whole numbers."""
    kind = features[label]
    if isinstance(kind, datasets.ClassLabel):
        return tuple(kind.names or ())
    if not isinstance(kind, datasets.Value) or not re.fullmatch(r"u?int\d+", kind.dtype):
        raise InputError(f"hf:{target}: column {label!r} holds {kind}, not classes; name another with label=")
    return ()


def _labels(datasets: Any, target: str, table: Any, label: str) -> tuple[Tensor, tuple[str, ...]]:
    names = class_names(datasets, target, table.features, label)
    values = table.with_format("numpy", columns=[label])[label][:]
    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise StoreError(f"hf:{target}: column {label!r} has rows without a class; name another with label=")
    targets = torch.as_tensor(values.astype("int64"))
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < MOST_CLASSES:
        raise StoreError(f"hf:{target}: column {label!r} holds numbers that are no classes; they count from 0 on")
    return targets, names or tuple(str(i) for i in range(int(targets.max()) + 1))

"""Sources of images: folders, arrays and named sets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tensigma.errors import StoreError
from tensigma.zoo.decoding import decode, first_size
from tensigma.zoo.images import View
from tensigma.zoo.spec import require

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
#: More than any data set has; every class gets a name.
MOST_CLASSES = 1_000_000
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


class Source(Protocol):
    """A set of images that can be read one index at a time."""

    @property
    def labels(self) -> Tensor | None:
        """Class of every image, (n,) int64, or None without labels."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in the order of the labels."""
        ...

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int], view: View) -> tuple[Tensor, dict[int, str]]:
        """Images ready for a network, (n, c, h, w), and why some of ``indices`` could not be read."""
        ...


@dataclass(frozen=True, eq=False)
class Arrays:
    """Images held in memory, (n, c, h, w)."""

    images: Tensor
    labels: Tensor | None = None
    classes: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.images)

    def read(self, indices: Sequence[int], view: View) -> tuple[Tensor, dict[int, str]]:
        return view.apply(self.images[torch.as_tensor(indices, dtype=torch.long)]), {}


@dataclass(frozen=True, eq=False)
class Folder:
    """Image files, read on demand."""

    files: tuple[Path, ...]
    labels: Tensor | None = None
    classes: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.files)

    def first_size(self) -> tuple[int, int] | None:
        """Width and height of the first file, from its header; None if it cannot be read."""
        return first_size(lambda index: self.files[index])

    def read(self, indices: Sequence[int], view: View) -> tuple[Tensor, dict[int, str]]:
        return decode(indices, view, lambda index: self.files[index], lambda index: str(self.files[index]))


def open_folder(folder: Path) -> Folder:
    """``FOLDER/CLASS/…/image.jpg``, classes in alphabetical order; or a folder of images without classes."""
    if not folder.is_dir():
        raise StoreError(f"{folder}: no such folder")
    names: list[str] = []
    files: list[Path] = []
    labels: list[int] = []
    for child in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        class_files = _images(child.rglob("*"))
        if class_files:
            labels += [len(names)] * len(class_files)
            names.append(child.name)
            files += class_files
    flat = _images(folder.iterdir())
    if files and flat:
        raise StoreError(f"{folder}: has images beside class folders, such as {flat[0].name}; move them into a class")
    if not files and not flat:
        raise StoreError(f"{folder}: no images found; they end in {', '.join(IMAGE_SUFFIXES)}")
    return Folder(tuple(files), torch.tensor(labels), tuple(names)) if files else Folder(tuple(flat))


def _images(paths: Iterable[Path]) -> list[Path]:
    return sorted(path for path in paths if path.suffix.lower() in IMAGE_SUFFIXES)


def open_npz(file: Path, classes: tuple[str, ...] = ()) -> Arrays:
    """An ``.npz`` with ``images`` (or ``x``) and, if there are any, ``labels`` (or ``y``)."""
    if not file.is_file():
        raise StoreError(f"{file}: no such file")
    try:
        # Opened here, because numpy leaves the file open if it cannot read it.
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as content:
            arrays = {key: content[key] for key in content.files}
    # Not a zip, a truncated or damaged one, a single .npy, or objects that only unpickling could restore; zipfile and
    # numpy fail in many ways.
    except Exception as error:
        raise StoreError(f"{file}: not a readable npz file of plain arrays ({error})") from error
    images = next((arrays[key] for key in ("images", "x", "X", "data") if key in arrays), None)
    labels = next((arrays[key] for key in ("labels", "y", "Y", "targets") if key in arrays), None)
    if images is None:
        raise StoreError(f"{file}: holds {', '.join(arrays) or 'nothing'}; the images are expected under 'images'")
    if labels is not None and (labels.ndim != 1 or len(labels) != len(images)):
        raise StoreError(f"{file}: labels have shape {labels.shape} for {len(images)} images; give one per image")
    if labels is not None and not _are_classes(labels):
        raise StoreError(f"{file}: labels of type {labels.dtype} are no classes; give whole numbers from 0 on")
    targets = None if labels is None else torch.from_numpy(labels.astype(np.int64))
    if not classes and targets is not None and len(targets):
        classes = tuple(str(label) for label in range(int(targets.max()) + 1))
    return Arrays(_channels_first(images, file), targets, classes)


def _are_classes(labels: np.ndarray) -> bool:
    whole = labels.dtype.kind in "iu" or (labels.dtype.kind == "f" and bool((labels == np.floor(labels)).all()))
    return whole and (not len(labels) or bool(labels.max() < MOST_CLASSES))


def _channels_first(images: np.ndarray, file: Path) -> Tensor:
    if images.dtype != np.uint8 and not np.issubdtype(images.dtype, np.floating):
        raise StoreError(f"{file}: images have dtype {images.dtype}; give uint8, or float already normalised")
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and images.shape[3] in (1, 3, 4):
        images = images.transpose(0, 3, 1, 2)
    elif images.ndim != 4:
        raise StoreError(f"{file}: images have shape {images.shape}; give (n, h, w, c), (n, c, h, w) or (n, h, w)")
    tensor = torch.from_numpy(np.ascontiguousarray(images))
    return tensor if tensor.dtype == torch.uint8 else tensor.float()


def open_cifar10(folder: Path, part: str) -> Arrays:
    """CIFAR-10 from ``train*.npz`` and ``test*.npz``, or from the binary version's ``.bin`` files."""
    if not folder.is_dir():
        raise StoreError(f"{folder}: no such folder")
    archives = sorted(folder.glob(f"{part}*.npz"))
    if archives:
        sets = [open_npz(file, CIFAR10_CLASSES) for file in archives]
        labels = [s.labels for s in sets if s.labels is not None]
        return Arrays(
            torch.cat([s.images for s in sets]),
            torch.cat(labels) if len(labels) == len(sets) else None,
            CIFAR10_CLASSES,
        )
    pattern = "data_batch_*" if part == "train" else "test_batch*"
    nested = [folder, folder / "cifar-10-batches-bin", folder / "cifar-10-batches-py"]
    binaries = sorted(file for place in nested for file in place.glob(f"{pattern}.bin"))
    if binaries:
        return _cifar10_binary(binaries)
    if any(file.suffix == "" for place in nested for file in place.glob(pattern)):
        raise StoreError(
            f"{folder}: holds the pickled version of CIFAR-10, and unpickling could execute code; "
            "get the binary version (cifar-10-binary.tar.gz) or save images and labels as npz"
        )
    raise StoreError(f"{folder}: no {part} set found; expected {part}*.npz or {pattern}.bin")


def open_cifar100(folder: Path, part: str) -> Arrays:
    """CIFAR-100 with its fine labels, from ``train*.npz`` and ``test*.npz`` or the binary version's ``.bin`` files."""
    if not folder.is_dir():
        raise StoreError(f"{folder}: no such folder")
    classes = tuple(map(str, range(100)))
    archives = sorted(folder.glob(f"{part}*.npz"))
    if archives:
        sets = [open_npz(file, classes) for file in archives]
        labels = [s.labels for s in sets if s.labels is not None]
        joined = torch.cat(labels) if len(labels) == len(sets) else None
        return Arrays(torch.cat([s.images for s in sets]), joined, classes)
    binaries = [file for place in (folder, folder / "cifar-100-binary") for file in place.glob(f"{part}.bin")]
    if not binaries:
        raise StoreError(f"{folder}: no {part} set found; expected {part}*.npz or {part}.bin")
    # The coarse label comes first, the fine one second.
    table = _records(binaries, n_labels=2)
    return Arrays(table[:, 2:].reshape(-1, 3, 32, 32), table[:, 1].long(), classes)


def _cifar10_binary(files: Sequence[Path]) -> Arrays:
    table = _records(files, n_labels=1)
    return Arrays(table[:, 1:].reshape(-1, 3, 32, 32), table[:, 0].long(), CIFAR10_CLASSES)


def _records(files: Sequence[Path], n_labels: int) -> Tensor:
    """Labels and pixels of every image, one image a row."""
    record = n_labels + 3 * 32 * 32
    rows = []
    for file in files:
        content = np.frombuffer(file.read_bytes(), dtype=np.uint8)
        if content.size == 0 or content.size % record:
            raise StoreError(f"{file}: {content.size} bytes are not whole records of {record}; it is truncated")
        rows.append(content.reshape(-1, record))
    return torch.from_numpy(np.concatenate(rows))


def open_digits() -> Arrays:
    """Scikit-learn's 1,797 handwritten digits, 8×8, values 0 to 16."""
    bunch = require("sklearn.datasets", "demo", "digits:").load_digits()
    images = torch.from_numpy(bunch.images).float()[:, None]
    return Arrays(images, torch.from_numpy(bunch.target).long(), tuple(map(str, range(10))))

"""Shards of the WebDataset form: tar files in which the members of a sample share their name up to the first dot.

The headers are read once, and what is kept of an image is where it starts and how long it is. So images can be chosen,
shuffled and shared out among processes like those of a folder, at a few bytes of memory each.
"""

from __future__ import annotations

import io
import itertools
import re
import tarfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tensigma.errors import InputError, StoreError
from tensigma.zoo.decoding import decode, first_size
from tensigma.zoo.images import View
from tensigma.zoo.sources import IMAGE_SUFFIXES, MOST_CLASSES

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
#: More shards than this come from a mistyped range.
_MOST_SHARDS = 100_000


@dataclass(frozen=True, eq=False)
class Shards:
    """Images inside tar files, read on demand."""

    files: tuple[Path, ...]
    #: Of every image: the file it is in, and its first byte and length there.
    places: Tensor  # (n, 3) int64
    labels: Tensor | None = None
    classes: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.places)

    def first_size(self) -> tuple[int, int] | None:
        """Width and height of the first image; None if it cannot be read."""
        return first_size(self._open)

    def read(self, indices: Sequence[int], view: View) -> tuple[Tensor, dict[int, str]]:
        return decode(indices, view, self._open, self._name)

    def _open(self, index: int) -> io.BytesIO:
        file, start, length = self.places[index].tolist()
        with self.files[file].open("rb") as stream:
            stream.seek(start)
            return io.BytesIO(stream.read(length))

    def _name(self, index: int) -> str:
        file, start, _ = self.places[index].tolist()
        return f"{self.files[file]}, image at byte {start}"


def open_shards(target: str, column: str | None, label: str | None) -> Shards:
    """The images of all shards that ``target`` names, with their labels if every sample has one.

    ``column`` is the ending of the image in a sample, by default that of the only one; ``label`` that of the class, by
    default ``cls``.
    """
    files = shard_files(target)
    places, labels = array("q"), array("q")
    for number, file in enumerate(files):
        for name, members in _samples(file):
            image = _image(file, name, members, column)
            if image is None:
                continue
            places.extend((number, image.offset_data, image.size))
            text = members.get(label or "cls")
            if text is not None:
                labels.append(_class(file, text))
    n_images = len(places) // 3
    if not n_images:
        wanted = f"ends in .{column}" if column else f"ends in one of {', '.join(IMAGE_SUFFIXES)}"
        raise StoreError(f"{target}: no member of {len(files)} shards {wanted}; name the ending with column=")
    if len(labels) not in (0, n_images) or (label is not None and not labels):
        raise StoreError(
            f"{target}: {len(labels)} of {n_images} images have a member {label or 'cls'!r} with their class; all or "
            "none must, or another ending be named with label="
        )
    table = torch.tensor(places, dtype=torch.int64).reshape(-1, 3)
    if not labels:
        return Shards(tuple(files), table)
    targets = torch.tensor(labels, dtype=torch.int64)
    return Shards(tuple(files), table, targets, tuple(str(i) for i in range(int(targets.max()) + 1)))


def shard_files(target: str) -> list[Path]:
    """The files of a name: one file, a folder, a pattern with ``*``, or ranges such as ``{000..009}``.

    >>> [file.name for file in shard_files("a-{08..10}.tar")]
    ['a-08.tar', 'a-09.tar', 'a-10.tar']
    """
    if "://" in target or target.startswith("pipe:"):
        raise InputError(f"{target}: shards are read from files; download them first")
    pieces = _RANGE.split(target)
    ranges = []
    for first, last in zip(pieces[1::3], pieces[2::3], strict=True):
        if not int(first) <= int(last) < int(first) + _MOST_SHARDS:
            raise InputError(f"{target}: {{{first}..{last}}} is no range of at most {_MOST_SHARDS:,} numbers")
        ranges.append([f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)])
    files: list[Path] = []
    for numbers in itertools.product(*ranges):
        text = "".join(part for pair in itertools.zip_longest(pieces[::3], numbers, fillvalue="") for part in pair)
        files += _matching(Path(text).expanduser())
    return files


def _matching(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(path.glob("*.tar"))
        if not found:
            raise StoreError(f"{path}: a folder without .tar files")
        return found
    if "*" in path.name:
        found = sorted(path.parent.glob(path.name))
        if not found:
            raise StoreError(f"{path}: no file has such a name")
        return found
    return [path]


def _samples(file: Path) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
    """Name and members by ending of each sample; its members follow each other."""
    name: str | None = None
    members: dict[str, tarfile.TarInfo] = {}
    for member in _members(file):
        folder, _, base = member.name.rpartition("/")
        stem, dot, ending = base.partition(".")
        key = f"{folder}/{stem}"
        if not dot or not stem:
            continue
        if key != name:
            if name is not None:
                yield name, members
            name, members = key, {}
        if ending.lower() in members:
            raise StoreError(f"{file}: {member.name} appears twice in one sample")
        members[ending.lower()] = member
    if name is not None:
        yield name, members


def _members(file: Path) -> Iterator[tarfile.TarInfo]:
    if not file.is_file():
        raise StoreError(f"{file}: no such file")
    try:
        with tarfile.open(file, "r:") as tar:
            end = file.stat().st_size
            while (member := tar.next()) is not None:
                # It would keep every header.
                tar.members.clear()  # type: ignore[attr-defined]
                if member.isreg() and not member.issparse():
                    if member.offset_data + member.size > end:
                        raise tarfile.ReadError(f"{member.name} is cut off")
                    yield member
    except (tarfile.TarError, OSError) as error:
        raise StoreError(
            f"{file}: not a readable tar file ({error}); a compressed one must be unpacked to .tar first"
        ) from error


def _image(file: Path, name: str, members: dict[str, tarfile.TarInfo], column: str | None) -> tarfile.TarInfo | None:
    """The image of a sample; None if it has none."""
    if column is not None:
        return members.get(column.lower())
    found = [ending for ending in members if f".{ending}" in IMAGE_SUFFIXES]
    if len(found) > 1:
        raise StoreError(f"{file}: {name} has several images, {', '.join(found)}; name one with column=")
    return members[found[0]] if found else None


def _class(file: Path, member: tarfile.TarInfo) -> int:
    with file.open("rb") as stream:
        stream.seek(member.offset_data)
        content = stream.read(min(member.size, 32)).strip()
    if not content.isdigit() or int(content) >= MOST_CLASSES:
        raise StoreError(f"{file}: {member.name} holds {content[:20]!r}; a class is a whole number from 0 on")
    return int(content)

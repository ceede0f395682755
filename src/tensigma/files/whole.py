"""Files and folders that are written completely or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from tensigma.errors import StoreError
from tensigma.files.claims import claimed, may_replace
from tensigma.files.exchange import exchange
from tensigma.files.partials import old_of, partial_of, remove, sweep

_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


@contextmanager
def whole_file(target: Path, *, durable: bool = True) -> Iterator[Path]:
    """A new file beside ``target`` that replaces it if the block succeeds, and is removed otherwise.

    ``durable`` waits until the disk has it, so that a power cut leaves the old file or the new one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with whole_file(Path(folder) / "a.txt") as partial:
    ...         _ = partial.write_text("whole")
    ...     [file.name for file in Path(folder).iterdir()]
    ['a.txt']
    """
    try:
        with partial_of(target) as partial:
            yield partial
            if durable:
                sweep(target.parent, target.name)
                _flush(partial)
            # Some writers create files that only their owner can read; this one gets the usual permissions.
            partial.chmod(target.stat().st_mode & 0o777 if target.exists() else _usual_mode())
            if may_replace(target):
                partial.replace(target)
            else:
                _put_new(partial, target)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"could not write {target}: {_reason(error)}; nothing was changed there") from error


@contextmanager
def whole_folder(target: Path, *, force: bool, is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """The same for a folder. One that holds anything is replaced only with ``force``, and only if ``is_ours`` accepts
    it; both are checked again at the moment of replacing it."""
    with claimed(target):
        _check(target, force=force, is_ours=is_ours)
        try:
            with partial_of(target) as partial:
                partial.mkdir()
                yield partial
                for file in partial.iterdir():
                    file.chmod(_usual_mode())
                    _flush(file)
                _take_place(partial, target, force=force, is_ours=is_ours)
        except (OSError, SafetensorError) as error:
            raise StoreError(f"could not write {target}: {_reason(error)}; nothing was changed there") from error


def _check(target: Path, *, force: bool, is_ours: Callable[[Path], bool]) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise StoreError(f"{target} exists and is not a folder; choose another name")
    if target.exists() and any(target.iterdir()):
        if not is_ours(target):
            raise StoreError(f"{target} exists and holds something else; choose another folder")
        if not force:
            raise StoreError(f"{target} exists; pass {{force}} to replace it", parameters=("force=True",))


def _take_place(partial: Path, target: Path, *, force: bool, is_ours: Callable[[Path], bool]) -> None:
    try:
        # Succeeds where there is nothing or an empty folder; nothing else is ever replaced by it.
        partial.rename(target)
        return
    except OSError as error:
        if error.errno not in _OCCUPIED and not target.exists():
            raise
    try:
        _check(target, force=force, is_ours=is_ours)
    except StoreError as error:
        kept = _put_aside(partial, target)
        raise StoreError(
            f"{target} was created by somebody else while the output was being written; it was left alone, and the "
            f"output is in {kept}"
        ) from error
    if not any(target.iterdir()):  # an empty folder, on a system that does not rename over one
        target.rmdir()
        partial.rename(target)
    elif not exchange(partial, target):
        _replace_in_two_steps(partial, target)
    _flush(target.parent)


def _replace_in_two_steps(partial: Path, target: Path) -> None:
    """Move the old folder aside and the new one to its place; ``recover`` finishes it after a kill in between."""
    old = old_of(partial)
    remove(old)
    target.rename(old)
    try:
        partial.rename(target)
    except OSError:
        old.rename(target)
        raise
    remove(old)


def _put_aside(partial: Path, target: Path) -> Path:
    """Keep a complete folder under the first free name like the one it was meant for."""
    number = 2
    while True:
        place = target.with_name(f"{target.name}-{number}")
        if not place.exists():
            with suppress(OSError):
                partial.rename(place)
                return place
        number += 1


def _put_new(partial: Path, target: Path) -> None:
    """Give a file its name, unless something has that name."""
    try:
        os.link(partial, target)
    except FileExistsError as error:
        raise StoreError(
            f"{target} was created by somebody else while the output was being written; it was left alone"
        ) from error
    except OSError:
        # No hard links on this file system: a moment remains between looking and writing.
        if target.exists():
            raise StoreError(f"{target} exists; it was left alone") from None
        partial.replace(target)


def _flush(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    if os.name == "nt":  # needs a handle that may write, and has none for folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _usual_mode() -> int:
    """The permissions of a new file under the user's umask, which can be read only by setting it."""
    umask = os.umask(0o077)
    os.umask(umask)
    return 0o666 & ~umask


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)

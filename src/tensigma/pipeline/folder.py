"""Folders that are complete or not there at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tensigma.errors import StoreError


@contextmanager
def whole_folder(target: Path, *, force: bool, is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """A new folder beside ``target`` that takes its place when the block ends well, and disappears otherwise.

    What exists is kept unless ``force`` is given, and what is not ours is never touched; an empty folder is no loss.
    """
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise StoreError(f"{target} exists and is not a folder; choose another name")
    if target.exists() and any(target.iterdir()):
        if not is_ours(target):
            raise StoreError(f"{target} exists and holds something else; choose another folder")
        if not force:
            raise StoreError(f"{target} exists; pass force=True to replace it")
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
        for file in partial.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        _take_place(partial, target)
    except OSError as error:
        raise StoreError(f"could not write {target}: {error.strerror or error}; nothing was changed there") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _take_place(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
        return
    # A folder cannot be replaced in one step; the old one waits beside it until the new one is in place.
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    shutil.rmtree(old, ignore_errors=True)
    target.rename(old)
    try:
        partial.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)

"""Files and folders that are written completely or not at all."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from tensigma.errors import StoreError


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """A new file beside ``target`` that replaces it if the block succeeds, and is removed otherwise.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with whole_file(Path(folder) / "a.txt") as partial:
    ...         _ = partial.write_text("whole")
    ...     [file.name for file in Path(folder).iterdir()]
    ['a.txt']
    """
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        yield partial
        # Some writers create files that only their owner can read; this one gets the usual permissions.
        partial.chmod(target.stat().st_mode & 0o777 if target.exists() else _usual_mode())
        partial.replace(target)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"could not write {target}: {_reason(error)}; nothing was changed there") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


@contextmanager
def whole_folder(target: Path, *, force: bool, is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """The same for a folder. One that holds anything is replaced only with ``force``, and only if ``is_ours`` accepts
    it."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise StoreError(f"{target} exists and is not a folder; choose another name")
    if target.exists() and any(target.iterdir()):
        if not is_ours(target):
            raise StoreError(f"{target} exists and holds something else; choose another folder")
        if not force:
            raise StoreError(f"{target} exists; pass {{force}} to replace it", parameters=("force=True",))
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        partial.mkdir()
        yield partial
        for file in partial.iterdir():
            file.chmod(_usual_mode())
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        _take_place(partial, target)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"could not write {target}: {_reason(error)}; nothing was changed there") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _usual_mode() -> int:
    """The permissions of a new file under the user's umask, which can be read only by setting it."""
    umask = os.umask(0o077)
    os.umask(umask)
    return 0o666 & ~umask


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _take_place(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
        return
    # A folder cannot be replaced in one step, so the old one is moved aside until the new one is in place.
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    shutil.rmtree(old, ignore_errors=True)
    target.rename(old)
    try:
        partial.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sweep(target: Path) -> None:
    """Remove what killed processes left behind when writing the same folder."""
    for leftover in target.parent.glob(f".{target.name}.partial-*"):
        process = leftover.name.rpartition("-")[2]
        if process.isdigit() and (int(process) == os.getpid() or not _is_alive(int(process))):
            shutil.rmtree(leftover, ignore_errors=True)


def _is_alive(process: int) -> bool:
    if sys.platform == "win32":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True

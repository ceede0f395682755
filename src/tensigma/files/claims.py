"""One writer at a time: a claim on a file or folder that is going to be written."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from tensigma.errors import StoreError
from tensigma.files.partials import recover, sweep

_mutex = threading.Lock()
#: Claimed path → the thread that holds it, and whether what is there may be replaced.
_held: dict[Path, tuple[int, bool]] = {}


@contextmanager
def claimed(target: Path, *, replace: bool = True) -> Iterator[None]:
    """Hold the place ``target`` while the block runs; a second writer is refused at once, not after an hour's work.

    The claim is a lock on a hidden file beside the target, which the system releases if the process is killed.
    Inside the block the same thread may claim the place again. Without ``replace``, a file that somebody else puts
    there meanwhile is not overwritten by :func:`~tensigma.files.whole_file`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, claimed(Path(folder) / "small"):
    ...     [file.name for file in Path(folder).iterdir()]
    ['.small.claim']
    """
    place, thread = _key(target), threading.get_ident()
    with _mutex:
        holder = _held.get(place)
        if holder is not None and holder[0] != thread:
            raise _taken(target, os.getpid())
        if holder is None:
            _held[place] = (thread, replace)
    if holder is not None:
        yield
        return
    try:
        with _locked(target):
            recover(target)
            sweep(target.parent, target.name)
            yield
    finally:
        with _mutex:
            del _held[place]


def may_replace(target: Path) -> bool:
    """Whether a claim allows to replace what is at ``target``; without a claim it is allowed."""
    return _held.get(_key(target), (0, True))[1]


def _key(target: Path) -> Path:
    # Resolved without the last part, which may be a link that is going to be refused.
    return target.absolute().parent.resolve() / target.name


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    file = target.with_name(f".{target.name}.claim")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        stream = _open_locked(file, target)
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{target} cannot be written: {error.strerror or error}") from error
    try:
        yield
    finally:
        # Removed while it is locked, so that nobody can lock a file that has no name any more.
        with suppress(OSError):
            file.unlink()
        stream.close()


def _open_locked(file: Path, target: Path) -> IO[bytes]:
    while True:
        stream = file.open("ab+", buffering=0)
        try:
            _lock(stream)
        except BlockingIOError:
            stream.seek(0)
            process = stream.read().decode().strip()
            stream.close()
            raise _taken(target, process) from None
        except OSError:
            # Some network file systems have no locks; the place is checked again when it is taken.
            return stream
        # Another process may have removed the file between our opening and locking it.
        if _is_at(stream, file):
            # The number is a courtesy, for which a full disk has no room.
            with suppress(OSError):
                stream.truncate(0)
                stream.write(f"{os.getpid()}\n".encode())
            return stream
        stream.close()


def _is_at(stream: IO[bytes], file: Path) -> bool:
    """Whether the open file is still the one under this name."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), file.stat())
    except OSError:
        return False


if sys.platform == "win32":

    def _lock(stream: IO[bytes]) -> None:
        raise OSError("no locks that are released with the process")

else:
    import fcntl

    def _lock(stream: IO[bytes]) -> None:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _taken(target: Path, process: object) -> StoreError:
    return StoreError(
        f"{target} is being written by another run (process {process or 'unknown'}); wait for it, or choose another "
        "name"
    )

"""What is written beside its target under a hidden name, and what is left of it after a kill.

A name says which process writes: ``.small.partial-HOME-PROCESS-THREAD``. HOME stands for the machine and its process
table, because process numbers mean nothing on another machine or in another container that shares the folder.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: Beside a target while it is written; and, for the moment in which a folder is replaced, the former one.
PARTIAL, OLD = "partial", "old"
# Whether a process of another machine still lives cannot be found out; no output is written for this long.
_FOREIGN_SECONDS = 2 * 24 * 3600.0
_SUFFIX = re.compile(r"\.(?:partial|old)-(?:(?P<home>[0-9a-f]{8})-)?(?P<process>\d+)(?:-\d+)?(?:\.claim)?$")

_lock = threading.Lock()
_in_use: set[Path] = set()


@contextmanager
def partial_of(target: Path) -> Iterator[Path]:
    """A name beside ``target`` that no other thread or process uses; what is under it at the end is removed."""
    partial = target.with_name(f".{target.name}.{PARTIAL}-{_home()}-{os.getpid()}-{threading.get_ident()}")
    with _lock:
        _in_use.add(partial.absolute())
    try:
        remove(partial)
        yield partial
    finally:
        remove(partial)
        with _lock:
            _in_use.discard(partial.absolute())


def old_of(partial: Path) -> Path:
    """Where the former folder waits while ``partial`` takes its place."""
    return partial.with_name(partial.name.replace(f".{PARTIAL}-", f".{OLD}-"))


def recover(target: Path) -> None:
    """Finish what a killed process began: if it stopped between two renames, the new folder takes its place.

    Called before ``target`` is read or written. It does nothing while ``target`` exists.
    """
    if target.exists() or target.is_symlink():
        return
    for old in _leftovers(target.parent, target.name, OLD):
        new = old.with_name(old.name.replace(f".{OLD}-", f".{PARTIAL}-"))
        with suppress(OSError):
            # The former folder is moved away only when the new one is complete.
            (new if new.is_dir() else old).rename(target)
            return


def sweep(folder: Path, name: str | None = None) -> None:
    """Remove what killed processes left in ``folder``: beside the target ``name``, or beside any."""
    for kind in (PARTIAL, OLD):
        for leftover in _leftovers(folder, name, kind):
            remove(leftover)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there and if that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _leftovers(folder: Path, name: str | None, kind: str) -> list[Path]:
    try:
        present = list(folder.iterdir())
    except OSError:
        return []
    # Names are compared, not globbed: a target may be called "a[1]". Dots in front are as many as writers are nested.
    start = "" if name is None else f"{name.lstrip('.')}.{kind}-"
    return [
        path
        for path in present
        if f".{kind}-" in path.name and path.name.lstrip(".").startswith(start) and _is_left(path)
    ]


def _is_left(path: Path) -> bool:
    """Whether the process that wrote ``path`` is gone."""
    match = _SUFFIX.search(path.name)
    if match is None or path.absolute() in _in_use:
        return False
    if match["home"] not in (None, _home()):
        with suppress(OSError):
            return time.time() - path.stat().st_mtime > _FOREIGN_SECONDS
        return False
    process = int(match["process"])
    # Our own number, but not in use: it belonged to an earlier process, as in a container, where all are number 1.
    return process == os.getpid() or not _is_alive(process)


@functools.cache
def _home() -> str:
    """Eight digits that stand for this machine and this table of processes."""
    facts = [platform.node()]
    with suppress(OSError):
        facts.append(str(Path("/proc/self/ns/pid").stat().st_ino))
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=4).hexdigest()


def _is_alive(process: int) -> bool:
    if sys.platform == "win32":
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True

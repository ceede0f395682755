"""Two folders that change places in one step, where the system can do that."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def exchange(first: Path, second: Path) -> bool:
    """Exchange two paths atomically; False, with nothing changed, if the system or the file system cannot."""
    rename = _renameat2()
    return rename is not None and rename(os.fsencode(first), os.fsencode(second)) == 0


@functools.cache
def _renameat2() -> Callable[[bytes, bytes], int] | None:
    if sys.platform != "linux":
        return None
    try:
        function = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return lambda old, new: function(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_EXCHANGE)

"""Layers by name or by pattern such as ``"layer4.*"``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from tensigma.errors import InputError


def matches(name: str, pattern: str) -> bool:
    """Whether a layer is meant by ``pattern``: its very name, or a shell pattern.

    >>> matches("layer4.0.conv1", "layer4.*"), matches("features[0]", "features[0]"), matches("fc", "conv*")
    (True, True, False)
    """
    return name == pattern or fnmatchcase(name, pattern)


def select(patterns: str | Sequence[str], names: Iterable[str], what: str) -> set[str]:
    """The names that some pattern means; a pattern that means nothing is refused, for it is a slip of the pen.

    >>> sorted(select(["conv*", "fc"], ["conv1", "conv2", "fc", "pool"], what="layers"))
    ['conv1', 'conv2', 'fc']
    """
    known = list(names)
    chosen: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = [name for name in known if matches(name, pattern)]
        if not found:
            close = difflib.get_close_matches(pattern, known, n=3, cutoff=0.4) or known[:3]
            raise InputError(
                f"no layer is called {pattern!r} (from {{{what}}}); near it are {', '.join(close) or 'none at all'}",
                parameters=(what,),
            )
        chosen.update(found)
    return chosen

"""Layers by name or by pattern such as ``"layer4.*"``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from tensigma.errors import InputError


def matches(name: str, pattern: str) -> bool:
    """Whether ``pattern`` is the name of a layer, or a shell pattern that matches it.

    >>> matches("layer4.0.conv1", "layer4.*"), matches("features[0]", "features[0]"), matches("fc", "conv*")
    (True, True, False)
    """
    return name == pattern or fnmatchcase(name, pattern)


def select(patterns: str | Sequence[str], names: Iterable[str], what: str) -> set[str]:
    """The names that match some pattern; raises if a pattern matches nothing, which is probably a typo.

    >>> sorted(select(["conv*", "fc"], ["conv1", "conv2", "fc", "pool"], what="layers"))
    ['conv1', 'conv2', 'fc']
    """
    candidates = list(names)
    chosen: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matched = [name for name in candidates if matches(name, pattern)]
        if not matched:
            close = difflib.get_close_matches(pattern, candidates, n=3, cutoff=0.4) or candidates[:3]
            raise InputError(
                f"no layer is called {pattern!r} (from {{{what}}}); similar names: {', '.join(close) or 'none'}",
                parameters=(what,),
            )
        chosen.update(matched)
    return chosen

"""What is read from a file is checked once, where it enters: small checks that combine into a description of a file.

A check takes a value and the place it was found in, and returns the value or raises :class:`StoreError` that says what
was found there, what is accepted, and where.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensigma.errors import StoreError

Check = Callable[[Any, str], Any]

#: The key under which sealed data holds the digest of all the rest.
SEAL = "digest"
# Sizes beyond this are damage; below it, products of a few sizes can be computed without harm.
_LARGEST = 2**40
_DEEPEST = 64
_TOO_DEEP = f"it is nested more than {_DEEPEST} levels deep, which no file of ours is"


def read_json(file: Path) -> Any:
    """The content of a JSON file; :class:`StoreError` if it cannot be read or means different things to readers."""
    try:
        return parse_json(file.read_text(encoding="utf-8"))
    except StoreError as error:
        raise error.prefixed(f"{file} cannot be read: ") from None
    except (OSError, ValueError) as error:
        raise StoreError(f"{file} cannot be read: {error}") from error


def parse_json(text: str) -> Any:
    """The same for a text.

    >>> parse_json('{"rank": 1, "rank": 2}')
    Traceback (most recent call last):
    tensigma.errors.StoreError: the key 'rank' appears twice in one object
    """
    try:
        data = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise StoreError(_TOO_DEEP) from None
    except ValueError as error:
        raise StoreError(str(error)) from error
    _check_depth(data)
    return data


def _check_depth(data: Any) -> None:
    """Refuse what would exhaust the stack of those who read it later."""
    level = [data]
    for _ in range(_DEEPEST):
        level = [
            item
            for value in level
            if isinstance(value, dict | list)
            for item in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise StoreError(_TOO_DEEP)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise StoreError(f"the key {key!r} appears twice in one object")
        data[key] = value
    return data


def seal(data: Mapping[str, Any]) -> dict[str, Any]:
    """The same data with a digest of it, so that damage is noticed when it is read.

    >>> sealed = seal({"layers": 3})
    >>> check_seal(sealed, "manifest.json")
    >>> check_seal(sealed | {"layers": 4}, "manifest.json")
    Traceback (most recent call last):
    tensigma.errors.StoreError: manifest.json is damaged: its content does not match its digest
    """
    content = {key: value for key, value in data.items() if key != SEAL}
    return {**content, SEAL: _digest(content)}


def check_seal(data: Mapping[str, Any], where: str) -> None:
    """Refuse data that was changed since :func:`seal`; data without a digest, from version 0.1, passes."""
    if SEAL in data and data[SEAL] != _digest({key: value for key, value in data.items() if key != SEAL}):
        raise StoreError(f"{where} is damaged: its content does not match its digest")


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def anything(value: Any, where: str) -> Any:
    """Accept any value."""
    return value


def flag(value: Any, where: str) -> Any:
    """Accept true and false."""
    return value if isinstance(value, bool) else _refuse(value, where, "true or false")


def integer(least: int = 0, most: int = _LARGEST) -> Check:
    """Accept a whole number from ``least`` to ``most``.

    >>> integer(1)(0, "layer 'fc': count")
    Traceback (most recent call last):
    tensigma.errors.StoreError: layer 'fc': count is 0; expected a whole number of at least 1
    """
    upper = "" if most == _LARGEST else f" and at most {most}"

    def check(value: Any, where: str) -> Any:
        if type(value) is int and least <= value <= most:
            return value
        return _refuse(value, where, f"a whole number of at least {least}{upper}")

    return check


def number(least: float = -math.inf, most: float = math.inf) -> Check:
    """Accept a finite number from ``least`` to ``most``."""
    bounds = [f"at least {least:g}"] * math.isfinite(least) + [f"at most {most:g}"] * math.isfinite(most)

    def check(value: Any, where: str) -> Any:
        if type(value) in (int, float) and math.isfinite(value) and least <= value <= most:
            return value
        return _refuse(value, where, " of ".join(["a number", " and ".join(bounds)] if bounds else ["a number"]))

    return check


def text(*choices: str, pattern: str | None = None, what: str = "text") -> Check:
    """Accept a string: one of ``choices``, or one that matches ``pattern`` as a whole."""
    expected = f"one of {', '.join(choices)}" if choices else what

    def check(value: Any, where: str) -> Any:
        good = isinstance(value, str) and (not choices or value in choices)
        if good and (pattern is None or re.fullmatch(pattern, value)):
            return value
        return _refuse(value, where, expected)

    return check


def optional(check: Check) -> Check:
    """Accept null, or what ``check`` accepts."""
    return lambda value, where: None if value is None else check(value, where)


def sequence(item: Check, *, least: int = 0) -> Check:
    """Accept a list (or, before it went through JSON, a tuple) whose items ``item`` accepts."""

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, list | tuple) or len(value) < least:
            return _refuse(value, where, "a list" if not least else f"a list of at least {least}")
        return [item(entry, f"{where}[{index}]") for index, entry in enumerate(value)]

    return check


def mapping(item: Check) -> Check:
    """Accept an object whose values ``item`` accepts, under any keys."""

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            return _refuse(value, where, "an object")
        return {key: item(entry, f"{where}: {key!r}") for key, entry in value.items()}

    return check


def record(
    required: Mapping[str, Check], may: Mapping[str, Check] | None = None, *, others: Check | None = None
) -> Check:
    """Accept an object with these keys: all of ``required``, any of ``may``; more only if ``others`` accepts them.

    >>> check = record({"rank": integer(1)}, {"joint": flag})
    >>> check({"rank": 3}, "layer")
    {'rank': 3}
    >>> check({"rank": 3, "jiont": True}, "layer")
    Traceback (most recent call last):
    tensigma.errors.StoreError: layer has the key 'jiont', which is not known; known are rank, joint
    """
    known = {**required, **(may or {})}

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            return _refuse(value, where, f"an object with {', '.join(required)}")
        missing = next((key for key in required if key not in value), None)
        if missing is not None:
            raise StoreError(f"{where}: the field {missing!r} is missing")
        unknown = next((key for key in value if key not in known), None)
        if unknown is not None and others is None:
            raise StoreError(f"{where} has the key {unknown!r}, which is not known; known are {', '.join(known)}")
        return {key: known.get(key, others or anything)(entry, f"{where}: {key}") for key, entry in value.items()}

    return check


def unique(values: Sequence[Any], where: str) -> None:
    """Refuse a list that holds anything twice."""
    for index, value in enumerate(values):
        if value in values[:index]:
            raise StoreError(f"{where} holds {value!r} twice")


def _refuse(value: Any, where: str, expected: str) -> Any:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}…"
    raise StoreError(f"{where} is {shown}; expected {expected}")

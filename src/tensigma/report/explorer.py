"""Data for the budget slider of a page: the front of the plan, and the command for a point of it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from tensigma.compression import Report
from tensigma.planning import FRONT_VERSION

# Options that a new command sets itself, with the number of values each takes.
_REPLACED = {
    "--budget": 1,
    "--bits": 1,
    "--ranks": 1,
    "--plan": 1,
    "--out": 1,
    "--force": 0,
    "--json": 0,
    "--quiet": 0,
    "-q": 0,
}

NO_FRONT = (
    "There is no slider here: it needs a plan that was made from a budget and carried out in the same run. "
    "Plan with a budget, such as params=0.5, and compress without saving the plan to a file first."
)


def explorer(report: Report) -> dict[str, Any] | None:
    """Plain data for the page's script; None if the report has no front, or one of another version."""
    if report.front is None or report.front.get("version") != FRONT_VERSION:
        return None
    norms = sorted({layer.norm for layer in report.compressed if layer.norm})
    command = report.notes.get("command")
    return {
        **report.front,
        "before": {"params": report.before.params, "macs": report.before.macs, "bytes": report.before.bytes},
        "width": _width(report),
        "command": command_start(command) if command else None,
        "norm": norms[0] if len(norms) == 1 else None,
    }


def _width(report: Report) -> float:
    """Bytes of one parameter."""
    saved = report.before.params - report.after.params
    if saved > 0:
        return (report.before.bytes - report.after.bytes) / saved
    return report.before.bytes / max(report.before.params, 1)


def command_start(arguments: Sequence[str]) -> str:
    """A command line without its budget and its output, to which others are added.

    >>> command_start(["tensigma", "compress", "zoo:m", "--data", "npz:my file", "--budget=params=0.5", "--out", "s"])
    "tensigma compress zoo:m --data 'npz:my file'"
    """
    kept: list[str] = []
    skip = 0
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if skip:
            skip -= 1
        elif name in _REPLACED:
            skip = 0 if equals else _REPLACED[name]
        else:
            kept.append(argument)
    return shlex.join(kept)

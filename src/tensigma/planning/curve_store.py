"""Curves kept in a folder, so that planning that was interrupted goes on where it stopped.

As with solutions, the name of a file is a digest of everything that the curve follows from: any change gives another
name.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tensigma.errors import StoreError
from tensigma.files import (
    SEAL,
    check_seal,
    integer,
    number,
    optional,
    read_json,
    record,
    seal,
    sequence,
    text,
    whole_file,
)
from tensigma.layers import Cost
from tensigma.planning.curves import Option, curve
from tensigma.running import Digest
from tensigma.solving import Candidate, stats_digest

logger = logging.getLogger(__name__)

# Increased when what is stored changes, or what a curve says about the same layer.
_VERSION = 2
_OPTION = record(
    {
        "method": optional(text()),
        "ranks": optional(sequence(integer(1))),
        "params": integer(),
        "macs": integer(),
        "bytes": integer(),
        "error2": number(0),
    }
)
_CURVE = record({"options": sequence(_OPTION, least=1), SEAL: text()})


def kept_curves(folder: Path | None) -> Callable[[Candidate], list[Option]]:
    """:func:`~tensigma.planning.curves.curve`, with known curves read from ``folder`` and new ones kept there."""
    if folder is None:
        return curve

    def kept(layer: Candidate) -> list[Option]:
        file = folder / f"curve-{_key(layer)}.json"
        options = _read(file, layer)
        if options is None:
            options = curve(layer)
            with whole_file(file, durable=False) as partial:
                partial.write_text(json.dumps(seal({"options": [_plain(option) for option in options]})))
        return options

    return kept


def _key(layer: Candidate) -> str:
    facts = {
        "curve": _VERSION,
        "library": version("tensigma"),
        "geometry": asdict(layer.geometry),
        "norm": layer.norm.name,
        "methods": [method.name for method in layer.choices],
        "input_size": layer.input_size,
        "calls": layer.calls,
        "stats": None if layer.stats is None else stats_digest(layer.stats, weighs_entries=layer.norm.weighs_entries),
    }
    digest = Digest(20).add(facts)
    for kernel in layer.kernels:
        digest.add(kernel)
    return digest.text


def _plain(option: Option) -> dict[str, Any]:
    return {
        "method": None if option.method is None else option.method.name,
        "ranks": None if option.ranks is None else list(option.ranks),
        "params": option.cost.params,
        "macs": option.cost.macs,
        "bytes": option.cost.bytes,
        "error2": option.error2,
    }


def _read(file: Path, layer: Candidate) -> list[Option] | None:
    """The curve in ``file``; None if it is missing or damaged."""
    if not file.is_file():
        return None
    try:
        stored = _CURVE(read_json(file), "the curve")
        check_seal(stored, "the curve")
    except StoreError as error:
        logger.warning("%s cannot be read and is computed again: %s", file.name, error)
        return None
    methods = {method.name: method for method in layer.choices}
    return [
        Option(
            None if option["method"] is None else methods[option["method"]],
            None if option["ranks"] is None else tuple(option["ranks"]),
            Cost(option["params"], option["macs"], option["bytes"]),
            option["error2"],
        )
        for option in stored["options"]
    ]

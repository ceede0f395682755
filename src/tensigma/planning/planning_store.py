"""What planning computes, kept in a folder, so that planning that was interrupted goes on where it stopped.

As with solutions, the name of a file is a digest of everything that its content follows from, samples included: any
change gives another name.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from tensigma.errors import StoreError
from tensigma.files import (
    SEAL,
    Check,
    check_seal,
    integer,
    mapping,
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
from tensigma.running import Digest, Probe, weights_digest
from tensigma.solving import Candidate, stats_digest

logger = logging.getLogger(__name__)

# Increased when what is stored changes, or what is computed from the same facts.
_VERSION = 4
_CURVE = sequence(
    record(
        {
            "method": optional(text()),
            "ranks": optional(sequence(integer(1))),
            "params": integer(),
            "macs": integer(),
            "bytes": integer(),
            "error2": number(0),
        }
    ),
    least=1,
)
#: None stands for infinity, for which JSON has no word.
_DIVERGENCE = optional(number(0))


class PlanningStore:
    """Curves, effects and trials by what they follow from; without a folder nothing is kept.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = PlanningStore(Path(folder))
    ...     [store.recall("answer", Digest, integer(), lambda: 42) for _ in range(2)], len(list(Path(folder).iterdir()))
    ([42, 42], 1)
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def recall(self, kind: str, key: Callable[[], Digest], check: Check, compute: Callable[[], Any]) -> Any:
        """The plain data under this key: read, if it is there and undamaged, or computed and kept."""
        if self.folder is None:
            return compute()
        facts = {"kind": kind, "version": _VERSION, "library": version("tensigma")}
        file = self.folder / f"{kind}-{key().add(facts).text}.json"
        wanted = record({kind: check, SEAL: text()})
        if file.is_file():
            try:
                stored = wanted(read_json(file), f"the {kind}")
                check_seal(stored, f"the {kind}")
                return stored[kind]
            except StoreError as error:
                logger.warning("%s cannot be read and is computed again: %s", file.name, error)
        data = compute()
        with whole_file(file, durable=False) as partial:
            partial.write_text(json.dumps(seal({kind: data})))
        return data

    def curve(self, layer: Candidate) -> list[Option]:
        """:func:`~tensigma.planning.curves.curve`, kept."""
        if self.folder is None:
            return curve(layer)
        stored = self.recall(
            "curve", lambda: _digest_of(layer), _CURVE, lambda: [_plain(option) for option in curve(layer)]
        )
        methods = {method.name: method for method in layer.choices}
        return [
            Option(
                None if option["method"] is None else methods[option["method"]],
                None if option["ranks"] is None else tuple(option["ranks"]),
                Cost(option["params"], option["macs"], option["bytes"]),
                option["error2"],
            )
            for option in stored
        ]

    def effects(
        self,
        model: nn.Module,
        layers: Sequence[Candidate],
        probe: Probe,
        measure: Callable[..., dict[str, float]],
        **options: Any,
    ) -> dict[str, float]:
        """``measure(model, layers, probe, **options)``, kept; ``options`` do not change what is measured."""

        def key() -> Digest:
            digest = probe.add_to(Digest(20)).add(measure.__name__).add(weights_digest(model))
            for layer in layers:
                digest.add(layer.name).add(_digest_of(layer).text)
            return digest

        effects: dict[str, float] = self.recall(
            "effects", key, mapping(number(0)), lambda: measure(model, layers, probe, **options)
        )
        return effects

    def divergence(self, layers: Mapping[str, Any], model: nn.Module, probe: Probe) -> float:
        """How far ``model``, made by a plan for these ``layers``, is from the original on the samples; kept."""

        def measure() -> float | None:
            divergence = probe.divergence(model)
            return divergence if math.isfinite(divergence) else None

        divergence = self.recall(
            "trial",
            lambda: probe.add_to(Digest(20)).add(layers).add(weights_digest(model)),
            _DIVERGENCE,
            measure,
        )
        return math.inf if divergence is None else divergence


def _digest_of(layer: Candidate) -> Digest:
    facts = {
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
    return digest


def _plain(option: Option) -> dict[str, Any]:
    return {
        "method": None if option.method is None else option.method.name,
        "ranks": None if option.ranks is None else list(option.ranks),
        "params": option.cost.params,
        "macs": option.cost.macs,
        "bytes": option.cost.bytes,
        "error2": option.error2,
    }

"""What a compression did, layer by layer and in total, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from tensigma.errors import StoreError
from tensigma.evaluation import Size, speed_in_words
from tensigma.files import (
    SEAL,
    anything,
    check_seal,
    flag,
    integer,
    mapping,
    number,
    optional,
    record,
    sequence,
    text,
)
from tensigma.planning import FRONT_VERSION, NOTE_CHECKS
from tensigma.solving import label_of
from tensigma.text import count, share, table

FORMAT = "tensigma-report"
VERSION = 1
_SIZE = record({"params": integer(), "macs": optional(integer()), "bytes": integer()})
_LAYER = record(
    {
        "name": text(),
        "method": text(),
        "ranks": optional(sequence(integer(1))),
        "norm": optional(text()),
        "before": _SIZE,
        "after": _SIZE,
    },
    {
        "bits": optional(integer(2)),
        "error": optional(number(0)),
        "frobenius_error": optional(number(0)),
        "converged": optional(flag),
        "seconds": number(0),
        "cached": flag,
        "reason": optional(text()),
    },
)
_COLUMN = sequence(number(0))
_MEASURE = record(
    {
        "share": _COLUMN,
        "error": _COLUMN,
        "params": sequence(integer()),
        "macs": optional(sequence(integer())),
        "choices": sequence(sequence(integer())),
        "chosen": integer(),
    },
    # Reports of 0.1 have none.
    {"bytes": sequence(integer())},
)
_FRONT = record(
    {
        "version": integer(),
        "measures": record({"params": _MEASURE}, {"macs": _MEASURE, "bytes": _MEASURE}),
        "layers": sequence(
            record({"name": text(), "options": sequence(sequence(anything))}, {"settings": mapping(anything)})
        ),
        "plan": mapping(anything),
    },
    {"bits": optional(sequence(integer()))},
)
_TIME = number(1e-12)
_SPEED = record({"batch": integer(1), "before": _TIME, "after": _TIME})
_NOTES = record(
    {},
    {
        "command": optional(sequence(text())),
        "title": optional(text()),
        "model": optional(text()),
        "data": optional(text()),
        "samples": optional(integer()),
        "weights": optional(text()),
        "evaluated_on": optional(text()),
        "searched_on": optional(text()),
        "evaluation": optional(mapping(anything)),
        "comparison": sequence(anything),
        "file_bytes": record({"before": integer(), "after": integer()}),
        "speed": optional(_SPEED),
        "finetuning": optional(mapping(anything)),  # checks itself
        **NOTE_CHECKS,
        "compared": text(),
    },
    others=anything,
)
_REPORT = record(
    {
        "layers": sequence(_LAYER),
        "before": _SIZE,
        "after": _SIZE,
        "seconds": number(0),
        "library": text(),
        "notes": _NOTES,
    },
    {
        "front": optional(mapping(anything)),
        "spectra": mapping(record({"rank": sequence(number(0), least=1), "error": sequence(number(0), least=1)})),
        SEAL: text(),
    },
    others=anything,
)


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """One layer before and after, and the error of its output."""

    name: str
    #: "dense" or the method that replaced the layer.
    method: str
    ranks: tuple[int, ...] | None
    norm: str | None
    before: Size
    after: Size
    #: Bits of the weights; None for those of float32.
    bits: int | None = None
    #: Relative error of the output, √(tr(ΔΣΔᵀ) ÷ tr(MΣMᵀ)), with Σ_c under the centred norm.
    error: float | None = None
    #: Relative error of the weights.
    frobenius_error: float | None = None
    converged: bool | None = None
    seconds: float = 0.0
    #: Whether the solution came from the cache.
    cached: bool = False
    #: Why the layer was left dense.
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class PageData:
    """Data that only a report page needs.

    ``front`` holds all budgets of the plan (:func:`~tensigma.planning.front_data`), None for a plan without a front;
    ``spectra`` holds how the error of each layer falls with its rank (:func:`~tensigma.planning.spectra_data`).
    """

    front: Mapping[str, Any] | None = None
    spectra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Report:
    """One row per layer, and totals of the whole model, unchanged layers included.

    ``str(report)`` is a table; :meth:`to_json` gives plain data from which :meth:`from_json` restores an equal report.

    >>> import torch
    >>> import tensigma as ts
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    >>> _, report = ts.compress(model, ts.plan(model, ranks=ts.Ranks({"0": 8}), norm="frobenius"))
    >>> [layer.name for layer in report.compressed], report["0"].method, report["0"].ranks, report["2"].reason
    (['0'], 'svd', (8,), 'no ranks are given for it')
    >>> report.before.params, report.after.params, round(report.rate, 2)
    (4810, 1738, 2.77)
    """

    layers: tuple[LayerReport, ...]
    before: Size
    after: Size
    #: Wall time of the whole compression.
    seconds: float
    #: Version of the library.
    library: str = ""
    notes: Mapping[str, Any] = field(default_factory=dict)
    #: Data for a page, or a function that computes it when a page or JSON is requested.
    page_data: PageData | Callable[[], PageData] = field(default_factory=PageData, repr=False, compare=False)

    @cached_property
    def page(self) -> PageData:
        """Data that only a page needs, computed on first use."""
        return self.page_data() if callable(self.page_data) else self.page_data

    @property
    def front(self) -> Mapping[str, Any] | None:
        """All budgets of the plan; None for a plan without a front."""
        return self.page.front

    @property
    def spectra(self) -> Mapping[str, Any]:
        """Layer → how its error falls with its rank."""
        return self.page.spectra

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles hold the data instead of the function, which would hold the model.
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"page_data": self.page}

    def with_notes(self, **notes: Any) -> Report:
        """The same report with these notes added or replaced."""
        return replace(self, notes={**self.notes, **notes}, page_data=lambda: self.page)

    @property
    def rate(self) -> float:
        """Compression rate: parameters of the whole model before ÷ after."""
        return self.before.params / max(self.after.params, 1)

    @property
    def compressed(self) -> list[LayerReport]:
        """The layers that were replaced."""
        return [layer for layer in self.layers if layer.ranks is not None]

    def __getitem__(self, name: str) -> LayerReport:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(f"the report has no layer {name!r}")

    def to_json(self) -> dict[str, Any]:
        """Plain data: dicts, lists, numbers, strings and None."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "page_data"}
        plain["before"], plain["after"] = asdict(self.before), asdict(self.after)
        rows = [asdict(layer) for layer in self.layers]
        plain["layers"] = [{**row, "ranks": row["ranks"] and list(row["ranks"])} for row in rows]
        page = {"front": self.front, "spectra": dict(self.spectra)}
        return {"format": FORMAT, "version": VERSION, "rate": self.rate, **plain, **page, "notes": dict(self.notes)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        """The inverse of :meth:`to_json`.

        >>> size = Size(params=10, macs=None, bytes=40)
        >>> report = Report(layers=(), before=size, after=size, seconds=1.0)
        >>> Report.from_json(report.to_json()) == report
        True
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise StoreError("this is not a report written by Report.to_json")
        if data.get("version") != VERSION:
            raise StoreError(f"the report has version {data.get('version')}; this library reads version {VERSION}")
        _REPORT(data, "the report is damaged")
        check_seal(data, "the report")
        _check_page(data)
        values = {f.name: data[f.name] for f in fields(cls) if f.name != "page_data"}
        values["before"], values["after"] = Size(**data["before"]), Size(**data["after"])
        values["layers"] = tuple(_layer(layer) for layer in data["layers"])
        # The earliest reports have neither front nor spectra.
        page = PageData(front=data.get("front"), spectra=data.get("spectra", {}))
        return cls(**values, page_data=page)

    @property
    def compared(self) -> str:
        """What the answers of the model were taken for in planning or refinement, in words; empty if in neither."""
        return str(self.notes.get("compared", ""))

    def __str__(self) -> str:
        rows = []
        for layer in self.layers:
            changed = layer.ranks is not None
            rows.append(
                [
                    layer.name,
                    label_of(layer.method, layer.ranks, layer.bits),
                    *_pair(layer.before.params, layer.after.params, changed),
                    *_pair(layer.before.macs, layer.after.macs, changed),
                    *_pair(layer.before.bytes, layer.after.bytes, changed),
                    share(layer.error),
                    share(layer.frobenius_error),
                    "cached" if layer.cached else f"{layer.seconds:.2f}" if changed else "",
                    layer.reason or "",
                ]
            )
        rows.append(
            [
                "whole model",
                "",
                *_pair(self.before.params, self.after.params, True),
                *_pair(self.before.macs, self.after.macs, True),
                *_pair(self.before.bytes, self.after.bytes, True),
                "",
                "",
                f"{self.seconds:.2f}",
                "",
            ]
        )
        header = [
            "layer",
            "format",
            "params",
            "",
            "MACs",
            "",
            "bytes",
            "",
            "error",
            "of weights",
            "seconds",
            "why dense",
        ]
        speed = self.notes.get("speed")
        time = "" if speed is None else f", {speed_in_words(speed)}"
        lines = [table(header, rows, left=(0, 1, 3, 5, 7, 11)), f"rate {self.rate:.2f}{time}"]
        return "\n".join([*lines, f"compared: {self.compared}"] if self.compared else lines)


def _check_page(data: Mapping[str, Any]) -> None:
    """Refuse data for the page that would be drawn wrongly; a front of another version is not drawn."""
    for name, spectrum in data.get("spectra", {}).items():
        if len(spectrum["rank"]) != len(spectrum["error"]):
            raise StoreError(f"the report is damaged: the spectrum of {name!r} has more ranks than errors, or fewer")
    front = data.get("front")
    if front is None or front.get("version") != FRONT_VERSION:
        return
    _FRONT(front, "the report is damaged: front")
    n_options = [len(layer["options"]) for layer in front["layers"]]
    for name, measure in front["measures"].items():
        columns = [measure[key] for key in ("share", "error", "params", "choices")]
        columns += [measure[key] for key in ("macs", "bytes") if measure.get(key) is not None]
        whole = len({len(column) for column in columns}) == 1 and measure["chosen"] < len(measure["share"])
        if not whole or not all(
            len(row) == len(n_options) and all(option < n for option, n in zip(row, n_options, strict=True))
            for row in measure["choices"]
        ):
            raise StoreError(f"the report is damaged: front: {name} does not fit together")


def _pair(before: int | None, after: int | None, changed: bool) -> list[str]:
    return [count(before), f"→ {count(after)}" if changed and before is not None else ""]


def _layer(data: Mapping[str, Any]) -> LayerReport:
    values = {
        **data,
        "ranks": None if data["ranks"] is None else tuple(data["ranks"]),
        "before": Size(**data["before"]),
        "after": Size(**data["after"]),
    }
    return LayerReport(**values)

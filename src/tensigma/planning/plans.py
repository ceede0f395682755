"""Plans: how every layer of a model will be treated, before anything is solved."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import nn

from tensigma.errors import InputError, StoreError
from tensigma.files import (
    Check,
    anything,
    integer,
    mapping,
    number,
    optional,
    read_json,
    record,
    sequence,
    text,
    whole_file,
)
from tensigma.layers import Cost, find_layers, select
from tensigma.planning.curves import early_stop
from tensigma.planning.entry import CompressedEntry, DenseEntry, entry_from_json
from tensigma.running import Wanted, weights_digest
from tensigma.solving import DENSE_METHOD, Folding, Method, Norm, Solutions, Treatment, check_bits, method_of, norm_of
from tensigma.text import count, share, table

FORMAT = "tensigma-plan"
VERSION = 1
#: What notes of planning hold, in plans and in the reports of models made by them. They may hold more.
NOTE_CHECKS: dict[str, Check] = {
    "weighing": record(
        {"power": number(0), "tried": sequence(anything), "samples": integer()},
        {"effect_samples": integer(), "data": optional(text()), "by": text(), "answers": text()},
        others=anything,
    ),
    "drop": record({}, {"data": optional(text()), "answers": text()}, others=anything),
}
# What folding saves; a layer that gains a bias may gain more than its BatchNorm had.
_ANY = integer(-(2**62))
_PLAN = record(
    {
        "format": text(FORMAT),
        "version": integer(VERSION, VERSION),
        "n_params": integer(),
        "layers": mapping(anything),  # entries check themselves
    },
    {
        "library": text(),
        "weights": optional(text()),
        "notes": optional(record({}, NOTE_CHECKS, others=anything)),
        "n_bytes": optional(integer()),
        "folding": record({"layers": mapping(text()), "params": _ANY, "bytes": _ANY, "left": mapping(text())}),
    },
)


class Front(Protocol):
    """What plans are chosen from: a :class:`~tensigma.planning.ParetoFront`."""

    curves: Mapping[str, Any]

    def plan(self, budget: Any, *, progress: Wanted = False) -> Plan:
        """The plan for another budget."""
        ...

    def best_plan(self, budget: Any, *, progress: Wanted = False) -> Plan:
        """The same with plans tried again where layers are weighed by their effects."""
        ...

    def trade(self, budget: Any = ...) -> list[Any]:
        """Every corner of the trade-off between size and error."""
        ...

    def weighted(self, weights: Mapping[str, float]) -> Front:
        """The same curves with other weights for the losses of the layers."""
        ...


class Plan(Mapping[str, DenseEntry | CompressedEntry]):
    """Layer name → :class:`DenseEntry` or :class:`CompressedEntry`, for every linear or convolutional layer of a model,
    in its order.

    A plan never changes; :meth:`with_` gives another one. ``str(plan)`` is a table. In the file that :meth:`save`
    writes, ``ranks``, ``method`` and ``norm`` may be edited by hand.

    >>> import tensigma as ts
    >>> model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.Linear(32, 10))
    >>> plan = ts.plan(model, ranks=ts.Ranks({"*": 8}), norm="frobenius")
    >>> print(plan)
    layer  format       params           MACs    error  why dense
    0      dense           896              –        –  the first convolution is left dense
    2      tucker2 8 8   9,248  → 1,120     –        –
    4      dense           330              –        –  svd 8 would save no parameters
    total               10,474  → 2,346     –
    rate 4.46
    >>> plan.with_("2", ranks=(16, 8))["2"].ranks
    (16, 8)
    """

    def __init__(
        self,
        entries: Iterable[DenseEntry | CompressedEntry],
        *,
        n_params: int,
        n_bytes: int | None = None,
        folding: Folding | None = None,
        weights: str | None = None,
        source: Front | None = None,
        solutions: Solutions | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        self._entries = {entry.name: entry for entry in entries}
        #: Parameters of the whole model as it is.
        self.n_params = n_params
        #: Bytes of its parameters and buffers, parameters in float32; by default those of the parameters alone.
        self.n_bytes = 4 * n_params if n_bytes is None else n_bytes
        #: BatchNorms that go into the layers before them, as a budget of bytes asks for. Entries of these layers are
        #: those of the layers with what went into them.
        self.folding = folding or Folding()
        #: A digest of the weights that the plan was made for; None if unknown.
        self.weights = weights
        self._source = source
        #: Layers that were solved while planning and need not be solved again.
        self.solutions = Solutions() if solutions is None else solutions
        #: What was measured while planning, as plain data: times under ``Latency``, agreement under ``Drop``, and the
        #: effects of layers' errors on the answers.
        self.notes: dict[str, Any] = dict(notes or {})

    def front(self) -> Front:
        """The trade-off between size and error that the plan was chosen from; it gives a plan for any other budget."""
        if self._source is None:
            raise InputError(
                "only a plan made for a budget in this process has a front; plan with {budget}",
                parameters=("budget",),
            )
        return self._source

    def with_notes(self, **notes: Any) -> Plan:
        """The same plan with more notes."""
        return Plan(
            self.values(),
            n_params=self.n_params,
            n_bytes=self.n_bytes,
            folding=self.folding,
            weights=self.weights,
            source=self._source,
            solutions=self.solutions,
            notes={**self.notes, **notes},
        )

    def __getitem__(self, name: str) -> DenseEntry | CompressedEntry:
        try:
            return self._entries[name]
        except KeyError:
            raise KeyError(f"the plan has no layer {name!r}; it has {', '.join(list(self._entries)[:5])} …") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        mine, theirs = ((plan.n_params, plan._entries, plan.folding.layers) for plan in (self, other))
        return mine == theirs

    __hash__ = None  # type: ignore[assignment]

    @property
    def compressed(self) -> list[CompressedEntry]:
        """The entries of the layers that will be replaced."""
        return [entry for entry in self.values() if isinstance(entry, CompressedEntry)]

    @property
    def treatments(self) -> dict[str, Treatment]:
        """Layer name → how it is compressed, for those that are."""
        return {entry.name: entry.treatment for entry in self.compressed}

    @property
    def before(self) -> Cost:
        """Parameters and bytes of the whole model, and MACs of the layers whose input size is known, as they are."""
        return Cost(self.n_params, sum(entry.before.macs for entry in self.values()), self.n_bytes)

    @property
    def after(self) -> Cost:
        """The same once the plan is carried out."""
        changes = [(entry.before, entry.after) for entry in self.compressed]
        return Cost(
            self.n_params - self.folding.params - sum(before.params - after.params for before, after in changes),
            sum(entry.after.macs for entry in self.values()),
            self.n_bytes - self.folding.bytes - sum(before.bytes - after.bytes for before, after in changes),
        )

    @property
    def rate(self) -> float:
        """Compression rate: parameters of the whole model before ÷ after."""
        return self.before.params / max(self.after.params, 1)

    @property
    def has_bits(self) -> bool:
        """Whether weights of some layer take fewer bits than those of float32."""
        return any(entry.bits is not None for entry in self.values())

    @property
    def raises_macs(self) -> bool:
        """Whether the plan needs more multiply-adds than the model does now."""
        return bool(self.compressed) and self.after.macs > self.before.macs

    def with_(
        self,
        layers: str | Sequence[str],
        *,
        method: str | Method | None = None,
        ranks: int | Sequence[int] | None = None,
        norm: str | Norm | None = None,
        bits: int | Literal["float"] | None = None,
        dense: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> Plan:
        """Another plan, in which the layers of these names or patterns are treated differently.

        What is not passed stays. Ranks are taken as they are, even if they save nothing. ``bits`` are those of the
        weights, 2 to 8 or 16, ``"float"`` for float32; a layer that is dense so far is then rounded and not decomposed.

        >>> import tensigma as ts
        >>> plan = ts.plan(nn.Sequential(nn.Linear(64, 64)), ranks=ts.Ranks({"*": 4}), norm="frobenius")
        >>> plan.with_("*", dense=True)["0"].reason
        'left dense by hand'
        >>> plan.with_("*", dense=True).with_("*", bits=4)["0"].label
        'dense, 4 bits'
        """
        if dense and (method, ranks, norm, options, bits) != (None,) * 5:
            raise InputError("dense=True leaves the layers as they are, so it allows no other change")
        chosen = select(layers, self, what="layers")
        entries: list[DenseEntry | CompressedEntry] = []
        for entry in self.values():
            if entry.name not in chosen:
                entries.append(entry)
            elif dense:
                entries.append(_left_dense(entry))
            else:
                entries.append(_changed(entry, method, ranks, norm, options, bits))
        return Plan(
            entries,
            n_params=self.n_params,
            n_bytes=self.n_bytes,
            folding=self.folding,
            weights=self.weights,
            solutions=self.solutions,
        )

    def check_model(self, model: nn.Module, *, weights: bool = True) -> None:
        """Raise :class:`~tensigma.errors.InputError` naming the first layer of ``model`` that is not as planned.

        A layer missing from the plan is refused too: every total would be wrong without it. So are other weights
        than those the plan was made for, unless ``weights`` is False.
        """
        layers = {layer.name: layer for layer in find_layers(model)}
        self.folding.check(model)
        planned = [*(entry.name for entry in self.compressed), *self]
        unknown = next((name for name in planned if name not in layers), None)
        if unknown is not None:
            raise InputError(f"the plan belongs to another model: there is no layer {unknown!r}")
        missing = next((name for name in layers if name not in self), None)
        if missing is not None:
            raise InputError(
                f"the plan says nothing about layer {missing!r}; add it, with ranks null to leave it dense"
            )
        for entry in self.compressed:
            layer = layers[entry.name]
            geometry = layer.geometry
            if geometry is not None and entry.name in self.folding.layers:
                geometry = replace(geometry, bias=True)
            if geometry != entry.geometry:
                raise InputError(
                    f"the plan belongs to another model: layer {entry.name!r} is {geometry}, planned as "
                    f"{entry.geometry}"
                )
            if layer.reason is not None:
                raise InputError(f"layer {entry.name!r} cannot be compressed: {layer.reason}")
        if weights and self.weights is not None and self.weights != weights_digest(model):
            raise InputError(
                "the plan was made for other weights of this architecture, so its ranks may not suit these; plan "
                "again, or pass {check} to carry it out anyway",
                parameters=("check=False",),
            )

    def to_json(self) -> dict[str, Any]:
        """Plain data. Costs are written for readers and computed again when it is read back."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "library": version("tensigma"),
            "n_params": self.n_params,
            "n_bytes": self.n_bytes,
            "folding": asdict(self.folding),
            "weights": self.weights,
            "notes": self.notes,
            "layers": {name: entry.to_json() for name, entry in self.items()},
        }

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        """The inverse of :meth:`to_json`; the data is checked."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise StoreError("this is not a plan written by Plan.save")
        if data.get("version") != VERSION:
            raise StoreError(f"the plan has version {data.get('version')}; this library reads version {VERSION}")
        _PLAN(data, "the plan is damaged")
        entries = [entry_from_json(name, entry) for name, entry in data["layers"].items()]
        folding = Folding(**(data.get("folding") or {}))
        n_params, in_layers = data["n_params"], sum(e.before.params for e in entries if isinstance(e, CompressedEntry))
        if n_params - folding.params < in_layers:
            raise StoreError(
                f"the plan is damaged: n_params is {n_params}, but the compressed layers alone have {in_layers}"
            )
        n_bytes = data.get("n_bytes")
        if n_bytes is not None and n_bytes < 4 * n_params:
            raise StoreError(f"the plan is damaged: {n_params} parameters take more than the {n_bytes} of n_bytes")
        if n_bytes is not None and folding.bytes > n_bytes:
            raise StoreError(f"the plan is damaged: folding cannot save {folding.bytes} of {n_bytes} bytes")
        weights, notes = data.get("weights"), data.get("notes")
        return cls(entries, n_params=n_params, n_bytes=n_bytes, folding=folding, weights=weights, notes=notes)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; an existing plan is replaced in one step."""
        with whole_file(Path(file)) as partial:
            partial.write_text(json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Plan:
        """Read a plan that :meth:`save` wrote."""
        data = read_json(Path(file))
        try:
            return cls.from_json(data)
        except StoreError as error:
            raise error.prefixed(f"{os.fspath(file)}: ") from None

    def __repr__(self) -> str:
        return f"Plan({len(self.compressed)} of {len(self)} layers, rate {self.rate:.2f})"

    @property
    def compared(self) -> str:
        """What the answers of the model were taken for where they decided, in words; empty if they did not."""
        notes = (self.notes.get(name, {}) for name in ("drop", "weighing"))
        return next((str(note["answers"]) for note in notes if note.get("answers")), "")

    def __str__(self) -> str:
        measures = ("params", "macs", "bytes") if self.has_bits else ("params", "macs")
        rows = []
        for entry in self.values():
            readable, changed = entry.geometry is not None, entry.format is not None
            costs = []
            for measure in measures:
                known = readable if measure != "macs" else entry.input_size is not None
                costs += _pair(entry.before, entry.after, measure, known=known, changed=changed)
            rows.append([entry.name, entry.label, *costs, share(entry.error), entry.reason or ""])
        before, after = self.before, self.after
        totals = []
        for measure in measures:
            known = measure != "macs" or before.macs > 0
            totals += _pair(before, after, measure, known=known, changed=True)
        rows.append(["total", "", *totals, "", ""])
        titles = {"params": "params", "macs": "MACs", "bytes": "bytes"}
        header = ["layer", "format", *(word for measure in measures for word in (titles[measure], "")), "error"]
        left = (0, 1, *range(3, 3 + 2 * len(measures), 2), len(header))
        rise = f", but {after.macs / before.macs:.2f} times the MACs" if self.raises_macs else ""
        smaller = f", bytes {before.bytes / max(after.bytes, 1):.2f}" if self.has_bits else ""
        head = table([*header, "why dense"], rows, left=left)
        compared = [f"compared: {self.compared}"] if self.compared else []
        return "\n".join([head, f"rate {self.rate:.2f}{smaller}{rise}", *self.folding.in_words(), *compared])


def _pair(before: Cost, after: Cost, measure: str, *, known: bool, changed: bool) -> list[str]:
    """A cost before and after, as two cells of a table."""
    if not known:
        return ["–", ""]
    return [count(getattr(before, measure)), f"→ {count(getattr(after, measure))}" if changed else ""]


def _left_dense(entry: DenseEntry | CompressedEntry) -> DenseEntry:
    return DenseEntry(
        name=entry.name,
        geometry=entry.geometry,
        norm=entry.norm,
        method=entry.method,
        reason="left dense by hand",
        input_size=entry.input_size,
        calls=entry.calls,
    )


def _changed(
    entry: DenseEntry | CompressedEntry,
    method: str | Method | None,
    ranks: int | Sequence[int] | None,
    norm: str | Norm | None,
    options: Mapping[str, Any] | None,
    bits: int | Literal["float"] | None,
) -> CompressedEntry:
    if entry.geometry is None:
        raise InputError(f"{entry.name}: {entry.reason}")
    new_norm = entry.norm if norm is None else norm_of(norm)
    only_rounded = isinstance(entry, DenseEntry) and bits is not None and (method, ranks) == (None, None)
    former_method = None if entry.method == DENSE_METHOD and ranks is not None else entry.method
    new_method = DENSE_METHOD if only_rounded else method_of(method or former_method or "auto", entry.geometry)
    if new_method == DENSE_METHOD:
        ranks = ()
    if ranks is None and (entry.ranks is None or new_method.rank_names != (entry.method or new_method).rank_names):
        raise InputError(f"{entry.name}: give ranks too; {new_method.name} takes {', '.join(new_method.rank_names)}")
    new_ranks = entry.ranks if ranks is None else ranks
    assert new_ranks is not None
    reason = new_method.why_not(entry.geometry, new_norm)
    if reason is not None:
        raise InputError(f"{entry.name}: {reason}")
    try:
        format = new_method.format(new_method.check_ranks(new_ranks, entry.geometry.kernel_shape))
        new_bits = entry.bits if bits is None else None if bits == "float" else bits
        check_bits(new_bits)
        new_options = _options_of(entry, new_method, new_bits) | dict(options or {})
        new_method.check_options(new_options)
    except InputError as error:
        raise error.prefixed(f"{entry.name}: ") from None
    treatment = Treatment(
        geometry=entry.geometry,
        method=new_method,
        norm=new_norm,
        format=format,
        options=new_options,
        bits=new_bits,
    )
    return CompressedEntry.of(entry.name, treatment, input_size=entry.input_size, calls=entry.calls)


def _options_of(entry: DenseEntry | CompressedEntry, method: Method, bits: int | None) -> dict[str, Any]:
    """The options of a layer for another method and other bits: what its old bits asked for gives way to the new."""
    if not isinstance(entry, CompressedEntry) or entry.method is None:
        return early_stop(method, bits)
    asked = early_stop(entry.method, entry.bits)
    kept = {k: v for k, v in entry.options.items() if k in method.options and asked.get(k) != v}
    return {**early_stop(method, bits), **kept}

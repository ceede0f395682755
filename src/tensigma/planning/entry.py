"""What a plan says about one layer: that it is compressed, and how, or that it stays dense, and why."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tensigma.errors import StoreError, TensigmaError
from tensigma.files import Check, anything, flag, integer, mapping, number, optional, record, sequence, text
from tensigma.layers import HALF, Cost, Format, Geometry, describe
from tensigma.solving import Method, Norm, Treatment, layer_cost, method_of, norm_of


@dataclass(frozen=True, kw_only=True)
class Entry(ABC):
    """One layer of a plan. Costs follow from its geometry and, where it is compressed, from its format.

    It is a :class:`DenseEntry` or a :class:`CompressedEntry`.
    """

    name: str
    #: None for a layer that Tensigma cannot read; its parameters count among the rest of the model.
    geometry: Geometry | None
    norm: Norm
    #: Spatial size of the layer's input, or None if unknown; MACs are then unknown too.
    input_size: tuple[int, ...] | None = None
    #: How often a sample passes through the layer at that size.
    calls: float = 1.0

    @property
    @abstractmethod
    def label(self) -> str:
        """How the layer is treated, in a word or two."""

    @property
    @abstractmethod
    def format(self) -> Format | None:
        """The decomposition with its ranks; None for a layer that stays as it is."""

    @property
    @abstractmethod
    def bits(self) -> int | None:
        """Bits of the weights; None for those of float32."""

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """The ranks, in the order of the format; None for a dense layer."""
        return None if self.format is None else self.format.ranks

    @property
    def before(self) -> Cost:
        """What the layer costs now."""
        return self._cost(None)

    @property
    def after(self) -> Cost:
        """What it will cost, including a bias that it gains."""
        return self._cost(self.format, self.bits)

    def _cost(self, format: Format | None, bits: int | None = None) -> Cost:
        if self.geometry is None:
            return Cost(0, 0, 0)
        return layer_cost(self.geometry, format, self.input_size, self.norm, self.calls, bits)

    def to_json(self) -> dict[str, Any]:
        """Plain data. Costs are written for readers and computed again when it is read back."""
        return {
            "norm": self.norm.name,
            "input_size": None if self.input_size is None else list(self.input_size),
            "calls": self.calls,
            "geometry": None if self.geometry is None else asdict(self.geometry),
            "params": [self.before.params, self.after.params],
            "macs": None if self.input_size is None else [self.before.macs, self.after.macs],
            "bytes": [self.before.bytes, self.after.bytes],
        }


@dataclass(frozen=True, kw_only=True)
class DenseEntry(Entry):
    """A layer that stays as it is.

    >>> DenseEntry(name="conv1", geometry=None, norm=norm_of("sigma"), reason="left out by skip").label
    'dense'
    """

    #: Why the layer stays as it is.
    reason: str
    #: The method it would take if it were compressed; None if Tensigma cannot read the layer.
    method: Method | None = None

    # Field of a compressed entry, so that all entries can be read alike.
    error: None = None

    @property
    def label(self) -> str:
        return "dense"

    @property
    def format(self) -> None:
        return None

    @property
    def bits(self) -> None:
        return None

    def to_json(self) -> dict[str, Any]:
        method = None if self.method is None else self.method.name
        head: dict[str, Any] = {
            "method": method,
            "ranks": None,
            "bits": None,
            "reason": self.reason,
            "error": None,
            "options": {},
        }
        return head | super().to_json()


@dataclass(frozen=True, kw_only=True)
class CompressedEntry(Entry):
    """A layer that will be replaced by the layers of a format.

    >>> from torch import nn
    >>> tucker2 = method_of("tucker2")
    >>> geometry = Geometry.of(nn.Conv2d(8, 8, 3))
    >>> treatment = Treatment(geometry=geometry, method=tucker2, norm=norm_of("sigma"), format=tucker2.format((8, 4)))
    >>> CompressedEntry.of("c", treatment).label
    'tucker2 8 4'
    """

    geometry: Geometry
    treatment: Treatment
    #: Expected relative error under the norm; None if it is unknown before solving.
    error: float | None = None

    # Field of a dense entry, so that all entries can be read alike.
    reason: None = None

    @classmethod
    def of(cls, name: str, treatment: Treatment, **fields: Any) -> CompressedEntry:
        """The entry of a layer with this treatment."""
        return cls(name=name, geometry=treatment.geometry, norm=treatment.norm, treatment=treatment, **fields)

    @property
    def label(self) -> str:
        return self.treatment.label

    @property
    def format(self) -> Format:
        return self.treatment.format

    @property
    def bits(self) -> int | None:
        return self.treatment.bits

    @property
    def method(self) -> Method:
        """The decomposition."""
        return self.treatment.method

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the solver."""
        return self.treatment.options

    @property
    def gains_bias(self) -> bool:
        """Whether the layer has no bias now and will have one."""
        return self.norm.moves_bias and not self.geometry.bias

    def to_json(self) -> dict[str, Any]:
        head: dict[str, Any] = {
            "method": self.method.name,
            "ranks": list(self.format.ranks),
            "bits": self.bits,
            "reason": None,
            "error": self.error,
            "options": dict(self.options),
        }
        return head | super().to_json()


_SIZES = sequence(integer(1))
_GEOMETRY = record(
    {"kind": text("linear", "conv", "conv_transpose"), "in_channels": integer(1), "out_channels": integer(1)},
    {
        "kernel_size": _SIZES,
        "stride": _SIZES,
        "padding": lambda value, where: (text("same", "valid") if isinstance(value, str) else sequence(integer()))(
            value, where
        ),
        "dilation": _SIZES,
        "groups": integer(1),
        "padding_mode": text("zeros", "reflect", "replicate", "circular"),
        "output_padding": sequence(integer()),
        "bias": flag,
    },
)
_FIELDS: dict[str, Check] = {
    "method": optional(text()),
    # Whole numbers or one of them, which the method checks.
    "ranks": anything,
    "norm": text(),
    "geometry": optional(_GEOMETRY),
}
_MORE_FIELDS: dict[str, Check] = {
    "bits": optional(integer(2, HALF)),
    "reason": optional(text()),
    "error": optional(number(0)),
    "options": optional(mapping(anything)),
    "input_size": optional(sequence(integer())),
    "calls": number(0),
    # For readers; computed again.
    "params": anything,
    "macs": anything,
    "bytes": anything,
}
_KEYS = (*_FIELDS, *_MORE_FIELDS)
_ENTRY = record(_FIELDS, _MORE_FIELDS)


def entry_from_json(name: str, data: Mapping[str, Any]) -> DenseEntry | CompressedEntry:
    """The inverse of :meth:`Entry.to_json`; ranks may have been changed by hand, and are checked."""
    _check_keys(name, data)
    _ENTRY(data, f"layer {name!r}")
    try:
        return _entry(name, data)
    # TypeError: a solver compares its options with numbers.
    except (TensigmaError, TypeError) as error:
        raise StoreError(f"layer {name!r}: {error}") from None


def _entry(name: str, data: Mapping[str, Any]) -> DenseEntry | CompressedEntry:
    geometry = None if data["geometry"] is None else _geometry(data["geometry"])
    norm = norm_of(data["norm"])
    method = None if data["method"] is None else method_of(data["method"], geometry)
    usage: dict[str, Any] = {
        "input_size": None if data.get("input_size") is None else tuple(data["input_size"]),
        "calls": float(data.get("calls", 1.0)),
    }
    if geometry is not None and usage["input_size"] is not None:
        _check_size(geometry, usage["input_size"])
    bits = data.get("bits")
    if data["ranks"] is None:
        if bits is not None:
            raise StoreError(
                "it has bits but no ranks; a layer that is only rounded has the method 'dense' and ranks []"
            )
        reason = data.get("reason") or "left dense in the plan's file"
        return DenseEntry(name=name, geometry=geometry, norm=norm, method=method, reason=reason, **usage)
    if method is None or geometry is None:
        raise StoreError("it has ranks but no method or geometry")
    ranks = method.check_ranks(_ranks(data["ranks"]), geometry.kernel_shape)
    options = dict(data.get("options") or {})
    method.check_options(options)
    method.solver(*ranks, **options)  # checks the values
    format = method.format(ranks)
    reason = format.why_not(geometry)
    if reason is not None:
        raise StoreError(reason)
    treatment = Treatment(geometry=geometry, method=method, norm=norm, format=format, options=options, bits=bits)
    return CompressedEntry.of(name, treatment, error=data.get("error"), **usage)


def _check_keys(name: str, data: Mapping[str, Any]) -> None:
    """Refuse keys that nothing reads: they are typing mistakes."""
    for key in data if isinstance(data, Mapping) else ():
        if key not in _KEYS:
            close = difflib.get_close_matches(key, _KEYS, n=1)
            guess = f"did you mean {close[0]!r}? " if close else ""
            raise StoreError(f"layer {name!r}: the key {key!r} is not known; {guess}({', '.join(_KEYS)})")


def _check_size(geometry: Geometry, input_size: tuple[int, ...]) -> None:
    """Refuse a size that no input of the layer has, whose MACs would be nonsense."""
    if geometry.n_spatial in (0, len(input_size)):
        sizes = geometry.output_size(input_size)
        if min((*sizes, *input_size), default=1) >= 0:
            return
    raise StoreError(f"no input of this layer has the spatial size {list(input_size)}: {describe(geometry)}")


def _ranks(value: Any) -> Any:
    if isinstance(value, list | tuple | int):
        return value
    raise StoreError(f"ranks are {value!r}; expected a list of whole numbers, one number for all, or null")


def _geometry(data: Mapping[str, Any]) -> Geometry:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    geometry = Geometry(**fields)
    spatial = [geometry.stride, geometry.dilation]
    if not isinstance(geometry.padding, str):
        spatial.append(geometry.padding)
    if geometry.kind == "linear":
        fits = geometry == Geometry(
            kind="linear",
            in_channels=geometry.in_channels,
            out_channels=geometry.out_channels,
            bias=geometry.bias,
        )
    else:
        fits = 1 <= geometry.n_spatial <= 3 and all(len(sizes) == geometry.n_spatial for sizes in spatial)
        if geometry.kind == "conv_transpose":
            fits = fits and len(geometry.output_padding) == geometry.n_spatial
    if not fits or geometry.in_channels % geometry.groups or geometry.out_channels % geometry.groups:
        raise StoreError(f"no layer has this geometry: {describe(geometry)}")
    return geometry

"""What a plan says about one layer."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tensigma.errors import StoreError
from tensigma.layers import Cost, Format, Geometry
from tensigma.planning.candidate import layer_cost
from tensigma.planning.methods import Method, method_of
from tensigma.planning.norms import Norm, norm_of


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One layer of a plan: its format and ranks, or the reason why it stays dense. Costs follow from these.

    A layer that Tensigma cannot read has no geometry, and its parameters count among the rest of the model.
    """

    name: str
    geometry: Geometry | None
    method: Method | None
    norm: Norm
    #: The decomposition with its ranks; None for a layer that stays as it is.
    format: Format | None = None
    #: Why the layer stays as it is; None for a layer that is compressed.
    reason: str | None = None
    #: Expected relative error under the norm, where it is known before anything is solved.
    error: float | None = None
    #: Spatial size of the layer's input, or None where nobody has seen one; MACs are then unknown.
    input_size: tuple[int, ...] | None = None
    #: How often a sample passes through the layer at that size.
    calls: float = 1.0
    #: Options of the solver, such as ``max_sweeps``.
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """The ranks, in the order of the format; None for a dense layer."""
        return None if self.format is None else self.format.ranks

    @property
    def gains_bias(self) -> bool:
        """Whether the layer has no bias now and will have one."""
        return self.format is not None and self.norm.moves_bias and self.geometry is not None and not self.geometry.bias

    @property
    def before(self) -> Cost:
        """What the layer costs now."""
        return self._cost(None)

    @property
    def after(self) -> Cost:
        """What it will cost, a bias that it gains included."""
        return self._cost(self.format)

    @property
    def label(self) -> str:
        """The format in a word or two.

        >>> from tensigma.layers import Tucker2Format
        >>> Entry(name="c", geometry=None, method=method_of("tucker2"), norm=norm_of("sigma"),
        ...       format=Tucker2Format(8, 4)).label
        'tucker2 8 4'
        """
        if self.format is None or self.method is None:
            return "dense"
        return " ".join([self.method.name, *map(str, self.format.ranks)])

    def _cost(self, format: Format | None) -> Cost:
        if self.geometry is None:
            return Cost(0, 0)
        return layer_cost(self.geometry, format, self.input_size, self.norm, self.calls)

    def to_json(self) -> dict[str, Any]:
        """Plain data. Costs are written for readers; they are computed again when it is read back."""
        return {
            "method": None if self.method is None else self.method.name,
            "ranks": None if self.format is None else list(self.format.ranks),
            "norm": self.norm.name,
            "reason": self.reason,
            "error": self.error,
            "options": dict(self.options),
            "input_size": None if self.input_size is None else list(self.input_size),
            "calls": self.calls,
            "geometry": None if self.geometry is None else asdict(self.geometry),
            "params": [self.before.params, self.after.params],
            "macs": None if self.input_size is None else [self.before.macs, self.after.macs],
        }

    @classmethod
    def from_json(cls, name: str, data: Mapping[str, Any]) -> Entry:
        """The inverse of :meth:`to_json`; ranks may have been changed by hand, and are checked."""
        _check_keys(name, data)
        try:
            geometry = None if data["geometry"] is None else _geometry(data["geometry"])
            norm = norm_of(data["norm"])
            method = None if data["method"] is None else method_of(data["method"], geometry)
            if data["ranks"] is None:
                format, reason = None, data.get("reason") or "left dense in the plan's file"
            elif method is None or geometry is None:
                raise StoreError("it has ranks but no method or geometry")
            else:
                format, reason = method.format(method.check_ranks(data["ranks"], geometry.kernel_shape)), None
            return cls(
                name=name,
                geometry=geometry,
                method=method,
                norm=norm,
                format=format,
                reason=reason,
                error=data.get("error"),
                input_size=None if data.get("input_size") is None else tuple(data["input_size"]),
                calls=float(data.get("calls", 1.0)),
                options=dict(data.get("options") or {}),
            )
        except KeyError as error:
            raise StoreError(f"layer {name!r}: the field {error.args[0]!r} is missing") from None
        except (TypeError, ValueError, AttributeError, StoreError) as error:
            raise StoreError(f"layer {name!r}: {error}") from None


_KEYS = ("method", "ranks", "norm", "reason", "error", "options", "input_size", "calls", "geometry", "params", "macs")


def _check_keys(name: str, data: Mapping[str, Any]) -> None:
    """A key that nobody reads is a slip of the pen, which must not be passed over in silence."""
    for key in data if isinstance(data, Mapping) else ():
        if key not in _KEYS:
            close = difflib.get_close_matches(key, _KEYS, n=1)
            guess = f"did you mean {close[0]!r}? " if close else ""
            raise StoreError(f"layer {name!r}: the key {key!r} is not known; {guess}({', '.join(_KEYS)})")


def _geometry(data: Mapping[str, Any]) -> Geometry:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return Geometry(**fields)

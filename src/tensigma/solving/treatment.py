"""How one layer is to be compressed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tensigma.errors import InputError
from tensigma.layers import HALF, Format, Geometry
from tensigma.solving.methods import Method
from tensigma.solving.norms import Norm

# A solver's first steps bring nearly all of the gain; the rest affects the last per cent of the error.
_ROUGH = {"max_sweeps": 8, "tol": 1e-3}
#: Bits that weights may take instead of the 32 of float32.
BITS = (2, 3, 4, 5, 6, 7, 8, HALF)


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """A layer's geometry, its method and ranks, the norm under which it is approximated, and the bits of its weights.

    >>> from torch import nn
    >>> from tensigma.solving import method_of, norm_of
    >>> tucker2 = method_of("tucker2")
    >>> treatment = Treatment(geometry=Geometry.of(nn.Conv2d(8, 8, 3)), method=tucker2, norm=norm_of("sigma"),
    ...                       format=tucker2.format((4, 2)))
    >>> treatment.label, treatment.ranks
    ('tucker2 4 2', (4, 2))
    """

    geometry: Geometry
    method: Method
    norm: Norm
    #: The decomposition with its ranks.
    format: Format
    #: Options of the solver, such as ``max_sweeps``.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Bits of the weights: 2 to 8 on grids of integers, 16 in half precision, None for float32.
    bits: int | None = None

    def __post_init__(self) -> None:
        check_bits(self.bits)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, in the order of the format."""
        return self.format.ranks

    def roughly(self) -> Treatment:
        """The same with few solver steps, for trials."""
        rough = {key: value for key, value in _ROUGH.items() if key in self.method.options}
        return replace(self, options={**rough, **self.options})

    def unrounded(self) -> Treatment:
        """The same with weights in float32."""
        return replace(self, bits=None)

    @property
    def label(self) -> str:
        """Method, ranks and bits as text."""
        return label_of(self.method.name, self.ranks, self.bits)


def label_of(method: str, ranks: Sequence[int] | None, bits: int | None) -> str:
    """How a layer is treated, in a few words.

    >>> label_of("tucker2", (4, 2), None), label_of("dense", (), 3)
    ('tucker2 4 2', 'dense, 3 bits')
    """
    words = " ".join([method, *map(str, ranks or ())])
    return words if bits is None else f"{words}, {bits} bits"


def check_bits(bits: Any) -> None:
    """Refuse bits that weights cannot take."""
    if bits is not None and (isinstance(bits, bool) or bits not in BITS):
        raise InputError(f"bits is one of {', '.join(map(str, BITS))}, or None for float32; got {bits!r}")

"""How one layer is to be compressed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tensigma.layers import Format, Geometry
from tensigma.solving.methods import Method
from tensigma.solving.norms import Norm

# A solver's first steps bring nearly all of the gain; the rest affects the last per cent of the error.
_ROUGH = {"max_sweeps": 8, "tol": 1e-3}


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """A layer's geometry, its method and ranks, and the norm under which it is approximated.

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

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, in the order of the format."""
        return self.format.ranks

    def roughly(self) -> Treatment:
        """The same with few solver steps, for trials."""
        rough = {key: value for key, value in _ROUGH.items() if key in self.method.options}
        return replace(self, options={**rough, **self.options})

    @property
    def label(self) -> str:
        """Method and ranks as text."""
        return " ".join([self.method.name, *map(str, self.ranks)])

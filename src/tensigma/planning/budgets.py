"""One number for the whole model, shared out among its layers."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import ClassVar

from tensigma.errors import InputError
from tensigma.planning.curves import Measure


@dataclass(frozen=True)
class Budget(ABC):
    """One number that the whole model must keep to; subclasses define its meaning."""

    share: float

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise InputError(
                f"{type(self).__name__}: the share of the original that may remain lies in (0, 1], got {self.share!r}"
            )


@dataclass(frozen=True)
class CostBudget(Budget):
    """The share of the original's cost that may remain, by one measure of cost."""

    unit: ClassVar[str]
    #: The cost of an option that counts.
    field: ClassVar[Measure]

    def show(self, amount: float) -> str:
        """An amount with its unit, as text."""
        return f"{amount:,} {self.unit}"


@dataclass(frozen=True)
class Params(CostBudget):
    """At most ``share`` of the whole model's parameters: 0.5 means half.

    Fewer parameters can mean more multiply-adds: a strided layer's first factor runs before the stride. ``at_most`` is
    the share of the original's multiply-adds that the plan may need, 1 by default, so that none are added; None allows
    any number. It applies where input sizes are known.

    >>> Params(0.5), Params(0.5, at_most=0.8).at_most
    (Params(share=0.5), 0.8)
    """

    unit: ClassVar[str] = "parameters"
    field: ClassVar[Measure] = "params"
    at_most: float | None = dataclass_field(default=1.0, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        limit = self.at_most
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0):
            raise InputError(
                f"at_most is the share of the original's multiply-adds that a plan may need, or None; got {limit!r}"
            )


@dataclass(frozen=True)
class Macs(CostBudget):
    """At most ``share`` of the multiply-adds that the convolutions and Linear layers need for one sample.

    >>> Macs(0.3).show(1_200_000)
    '1,200,000 MACs'
    """

    unit: ClassVar[str] = "MACs"
    field: ClassVar[Measure] = "macs"

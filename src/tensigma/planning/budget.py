"""One number for the whole model, shared out among its layers."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from tensigma.errors import InputError
from tensigma.layers import Cost
from tensigma.planning.curves import Option
from tensigma.planning.front import Front


@dataclass(frozen=True)
class Budget(ABC):
    """The share of the original that may remain."""

    unit: ClassVar[str]
    #: The field of a cost that counts.
    field: ClassVar[Literal["params", "macs"]]
    share: float

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise InputError(
                f"{type(self).__name__}: the share of the original that may remain lies in (0, 1], got {self.share!r}"
            )

    def measure(self, cost: Cost) -> int:
        """What counts of a cost."""
        return int(getattr(cost, self.field))


@dataclass(frozen=True)
class Params(Budget):
    """At most ``share`` of the whole model's parameters: 0.5 means half.

    >>> Params(0.5)
    Params(share=0.5)
    """

    unit: ClassVar[str] = "parameters"
    field: ClassVar[Literal["params", "macs"]] = "params"


@dataclass(frozen=True)
class Macs(Budget):
    """At most ``share`` of the multiply-adds that the convolutions and Linear layers need for one sample.

    >>> Macs(0.3).measure(Cost(params=10, macs=200))
    200
    """

    unit: ClassVar[str] = "MACs"
    field: ClassVar[Literal["params", "macs"]] = "macs"


def allocate(curves: Mapping[str, Sequence[Option]], budget: Budget, *, total: int, rest: int) -> Mapping[str, Option]:
    """The option of every layer that keeps the whole model within ``budget`` at the lowest expected loss.

    ``total`` is what the whole model costs now and ``rest`` what is not in ``curves``, both in the unit of the budget.
    """
    front = Front(curves, budget.field)
    smallest = rest + front.cheapest
    if smallest > budget.share * total:
        raise InputError(
            f"no plan leaves {budget.share:.4g} of the {total:,} {budget.unit}: with every rank at 1 the layers that "
            f"may be compressed still leave {smallest:,}, a share of {smallest / max(total, 1):.4g}; "
            "ask for more, or let more layers be compressed (layers=, skip=)"
        )
    return front.choose(budget.share * total - rest)

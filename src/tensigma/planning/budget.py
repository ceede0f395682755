"""One number for the whole model, shared out among its layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tensigma.errors import InputError
from tensigma.layers import Cost
from tensigma.planning.candidate import Candidate
from tensigma.planning.methods import RankTuple

# The threshold is sought among shares of lost energy from 1 (every rank is 1) down to 10 to the minus this.
_DECADES = 12.0
_HALVINGS = 50


@dataclass(frozen=True)
class Budget(ABC):
    """The share of the original that may remain."""

    unit: ClassVar[str]
    share: float

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise InputError(
                f"{type(self).__name__}: the share of the original that may remain lies in (0, 1], got {self.share!r}"
            )

    @abstractmethod
    def measure(self, cost: Cost) -> int:
        """What counts of a cost."""


@dataclass(frozen=True)
class Params(Budget):
    """At most ``share`` of the whole model's parameters: 0.5 means half.

    >>> Params(0.5)
    Params(share=0.5)
    """

    unit: ClassVar[str] = "parameters"

    def measure(self, cost: Cost) -> int:
        return cost.params


@dataclass(frozen=True)
class Macs(Budget):
    """At most ``share`` of the multiply-adds that the convolutions and Linear layers need for one sample.

    >>> Macs(0.3).measure(Cost(params=10, macs=200))
    200
    """

    unit: ClassVar[str] = "MACs"

    def measure(self, cost: Cost) -> int:
        return cost.macs


def allocate(layers: Sequence[Candidate], budget: Budget, *, total: int, rest: int) -> Mapping[str, RankTuple | None]:
    """Ranks for every layer (None: it stays dense) so that all together stay within ``budget``.

    All layers lose the same share of their energy under the norm, the smallest share with which the model fits; a layer
    that would not get cheaper stays dense. ``total`` is what the whole model costs now and ``rest`` what is not in
    ``layers``, both in the unit of the budget.
    """
    limit = budget.share * total
    dense = {layer.name: budget.measure(layer.cost(None)) for layer in layers}

    def at(decades: float) -> tuple[int, dict[str, RankTuple | None]]:
        ranks: dict[str, RankTuple | None] = {}
        spent = rest
        for layer in layers:
            chosen = layer.energy_ranks(10**-decades)
            price = budget.measure(layer.cost(chosen))
            ranks[layer.name] = chosen if price < dense[layer.name] else None
            spent += min(price, dense[layer.name])
        return spent, ranks

    smallest, best = at(0.0)
    if smallest > limit:
        raise InputError(
            f"no plan leaves {budget.share:.4g} of the {total:,} {budget.unit}: with every rank at 1 the layers that "
            f"may be compressed still leave {smallest:,}, a share of {smallest / max(total, 1):.4g}; "
            "ask for more, or let more layers be compressed (layers=, skip=)"
        )
    low, high = 0.0, _DECADES
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        spent, ranks = at(middle)
        if spent <= limit:
            low, best = middle, ranks
        else:
            high = middle
    return best

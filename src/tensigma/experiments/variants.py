"""Ways of compressing that the experiment past the paper compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from tensigma.errors import InputError
from tensigma.planning import VBMF, CostBudget, Macs, Params, Plan, SigmaVBMF

RULES = {"vbmf": VBMF, "sigma-vbmf": SigmaVBMF}
#: Shares out a budget too, by a rule that is not this library's.
BALF_RANKS = "balf"


@dataclass(frozen=True, kw_only=True)
class Target:
    """How much smaller a model is to be: the original's parameters or multiply-adds ÷ those that remain."""

    rate: float
    measure: Literal["params", "macs"] = "params"

    @property
    def budget(self) -> CostBudget:
        return (Params if self.measure == "params" else Macs)(1 / self.rate)

    def rate_of(self, plan: Plan) -> float:
        """The rate of a plan by this measure."""
        return getattr(plan.before, self.measure) / getattr(plan.after, self.measure)

    def __str__(self) -> str:
        return f"{self.rate:g}" + (" MACs" if self.measure == "macs" else "")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way of compressing."""

    name: str
    ranks: str
    method: str
    norm: str
    layers: str
    models: list[str] | None = None
    #: Rates in parameters where not all, by model.
    rates: Mapping[str, list[float]] = field(default_factory=dict)
    #: Rates in multiply-adds where not all, by model.
    macs: Mapping[str, list[float]] = field(default_factory=dict)
    sequential: bool = False
    reestimate_bn: bool = False
    weigh: float | str = 0.0
    refine: Mapping[str, int] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """What a result depends on: all but what it is called and where it is wanted."""
        elsewhere = ("name", "models", "rates", "macs", "refine")
        return {key: value for key, value in vars(self).items() if key not in elsewhere}

    def wants(self, model: str, target: Target) -> bool:
        """Whether it is to be run at this rate."""
        wanted = (self.rates if target.measure == "params" else self.macs).get(model)
        return wanted is None or target.rate in wanted

    @classmethod
    def of(cls, table: Mapping[str, Any], where: str) -> Variant:
        known = {each.name for each in fields(cls)}
        unknown = [key for key in table if key not in known]
        if unknown:
            raise InputError(f"{where}: a variant has {unknown[0]!r}; it takes {', '.join(sorted(known))}")
        try:
            made = cls(**table)
        except TypeError as error:
            raise InputError(f"{where}: a variant is incomplete: {error}") from None
        if isinstance(made.weigh, str) and made.weigh != "effects":
            raise InputError(f"{where}: weigh is 'effects' or a power of gradients, got {made.weigh!r}")
        if made.ranks not in (*RULES, BALF_RANKS, "budget"):
            there = f"{', '.join(RULES)}, {BALF_RANKS} and budget"
            raise InputError(f"{where}: ranks {made.ranks!r} are unknown; there are {there}")
        return made

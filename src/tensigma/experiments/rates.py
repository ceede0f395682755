"""Plans at a wanted rate: by a rule whose ratio is searched, by BALF's allocation, or for a budget.

What does not depend on the rate is computed once for each model and way of compressing: plans of a rule by their ratio,
spectra for BALF, error curves and effects for a budget.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from tensigma.calibration import Calibration
from tensigma.experiments.balf import BALF
from tensigma.experiments.variants import BALF_RANKS, RULES, Target, Variant
from tensigma.planning import Plan, plan, sensitivities

_STEPS, _QUICK_STEPS = 13, 2
# The few layers of the quick form have little to give.
_QUICK_RATE = 1.02


@dataclass
class Planner:
    """Plans of one model by one variant, at any rate."""

    variant: Variant
    model: nn.Module
    stats: Calibration
    data: Any
    layers: Any
    quick: bool
    #: A folder for curves, effects and trials.
    cache: Path | None = None
    _by_ratio: dict[float, Plan] = field(default_factory=dict)
    _balf: BALF | None = None
    _first: Plan | None = None

    def plan(self, target: Target) -> Plan:
        """The plan at a rate; rules come as near to it as they can from below, which is to their advantage."""
        if self.variant.ranks in RULES:
            return self._by_rule(target)
        if self.quick:
            target = Target(rate=_QUICK_RATE, measure=target.measure)
        if self.variant.ranks == BALF_RANKS:
            self._balf = self._balf or BALF(self.model, self.stats, self.layers)
            return self._balf.plan(target.budget)
        return self._for_budget(target)

    def _for_budget(self, target: Target) -> Plan:
        if self._first is not None:
            return self._first.front().best_plan(target.budget)
        weights: Any = None
        if isinstance(self.variant.weigh, str):
            weights = "auto"
        elif self.variant.weigh:
            weights = sensitivities(self.model, self.data, power=self.variant.weigh)
        self._first = plan(
            self.model,
            self.stats,
            budget=target.budget,
            weights=weights,
            data=self.data,
            cache=self.cache,
            **self._common,
        )
        return self._first

    def _by_rule(self, target: Target) -> Plan:
        # Beyond 1 the rule takes ranks below those of VBMF.
        low, high = 0.0, 2.0
        if target.rate_of(self._at(high)) <= target.rate:
            return self._at(high)
        for _ in range(_QUICK_STEPS if self.quick else _STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if target.rate_of(self._at(middle)) <= target.rate else (low, middle)
        return self._at(low or high)

    def _at(self, ratio: float) -> Plan:
        if ratio not in self._by_ratio:
            rule = RULES[self.variant.ranks](ratio)
            self._by_ratio[ratio] = plan(self.model, self.stats, ranks=rule, saving="none", **self._common)
        return self._by_ratio[ratio]

    @property
    def _common(self) -> dict[str, Any]:
        return {"method": self.variant.method, "norm": self.variant.norm, "layers": self.layers}

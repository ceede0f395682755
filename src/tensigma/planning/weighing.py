"""Which weights share out a budget best: plans tried on samples, without labels.

An effect measured with one small error at a time is a good guide where errors are small, and a poor one where all
layers have large ones. So a budget is shared out with the effects to the powers 0 (all layers alike), ¼ and ½, each
plan is carried out layer by layer, and the model whose answers are nearest to the original's decides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from tensigma.calibration import Calibration
from tensigma.calibration.batches import is_one_shot
from tensigma.calibration.distributed import rank_and_size
from tensigma.errors import InputError
from tensigma.planning.allocation import Allocation
from tensigma.planning.budget import CostBudget
from tensigma.planning.builder import Builder
from tensigma.planning.candidate import Candidate
from tensigma.planning.effects import measured_effects
from tensigma.planning.plans import Plan
from tensigma.planning.probe import Probe
from tensigma.planning.progress import Report, TrialProgress

#: Plain first: of equals the first is taken.
POWERS = (0.0, 0.25, 0.5)
# A search tries enough plans already, and those near its end have small errors.
_POWER_OF_SEARCH = 0.5
# Measuring runs the model once for every layer, trying once for every power. Either takes as many samples as these
# multiply-adds allow, within limits: the effects need to be roughly right, the trials decide.
_MACS, _FEWEST, _MOST_EFFECTS, _MOST_TRIALS = 1e12, 64, 256, 1024


class Weigher:
    """The effects of the layers that share a budget, and trials of what to make of them."""

    def __init__(
        self,
        effects: Mapping[str, float],
        probe: Probe,
        build: Callable[[Plan], nn.Module],
        *,
        report: Report = lambda state: None,
    ) -> None:
        self.effects, self.probe = effects, probe
        self._build, self._report = build, report

    def weighted(self, allocation: Allocation, power: float = _POWER_OF_SEARCH) -> Allocation:
        """The same curves, shared out with this power of the effects for weights."""
        return allocation.weighted({name: effect**power for name, effect in self.effects.items()} if power else {})

    def best_plan(
        self,
        allocation: Allocation,
        budget: CostBudget,
        *,
        powers: Sequence[float] = POWERS,
        progress: bool | Callable[[Any], None] = False,
    ) -> Plan:
        """The plan for ``budget`` whose model diverges least from the original."""
        start = time.perf_counter()
        plans: dict[float, Plan] = {}
        for power in powers:
            plan = self.weighted(allocation, power).plan(budget, progress=progress)
            if plan not in plans.values():
                plans[power] = plan
        tried: dict[float, float] = {}
        # With one plan there is nothing to choose.
        for power in plans if len(plans) > 1 else ():
            tried[power] = self.probe.divergence(self._build(plans[power]))
            self._report(
                TrialProgress(
                    done=len(tried),
                    total=len(plans),
                    power=power,
                    divergence=tried[power],
                    seconds=time.perf_counter() - start,
                )
            )
        best = min(plans, key=lambda power: tried.get(power, 0.0))
        return self.noted(plans[best], best, tried)

    def noted(self, plan: Plan, power: float = _POWER_OF_SEARCH, tried: Mapping[float, float] | None = None) -> Plan:
        """The same plan, with what was measured among its notes."""
        notes = {
            "power": power,
            "samples": self.probe.samples,
            "tried": [[each, round(divergence, 6)] for each, divergence in (tried or {}).items()],
            "effects": {name: float(f"{effect:.4g}") for name, effect in self.effects.items()},
        }
        kept = {**plan.notes, "weighing": notes}
        return Plan(plan.values(), n_params=plan.n_params, allocation=plan.front(), notes=kept)


def weigher_for(
    model: nn.Module,
    stats: Calibration | None,
    layers: Sequence[Candidate],
    data: Any,
    *,
    input: str | int | None = None,
    report: Report = lambda state: None,
) -> Weigher | None:
    """Effects of ``layers``, measured on the first samples of ``data``; None where nothing can be measured.

    That is so without data, with data that can be read once, with a single layer, with answers that are no real
    numbers, and under ``torchrun``, where each process has data of its own and all must come to the same plan.
    """
    if data is None or is_one_shot(data) or len(layers) < 2 or rank_and_size()[1] > 1:
        return None
    work = sum(layer.cost(None).macs for layer in layers)
    probe = Probe(model, data, samples=_samples(work * len(POWERS), _MOST_TRIALS), input=input)
    if probe.is_silent:
        return None
    effects = measured_effects(model, layers, probe.first(_samples(work * len(layers), _MOST_EFFECTS)), report=report)
    return Weigher(effects, probe, Builder(model, stats), report=report)


def _samples(work: int, most: int) -> int:
    """How many samples are taken where each costs so many multiply-adds."""
    return min(most, max(_FEWEST, int(_MACS / max(work, 1))))


def known_weights(weights: Any, names: Sequence[str]) -> dict[str, float]:
    """Weights that a caller gave, checked; none where they are to be found."""
    if weights is None or weights == "auto":
        return {}
    if not isinstance(weights, Mapping):
        raise InputError(f"weights={weights!r} came; it takes 'auto', None, or a dict from layer names to numbers")
    for name, weight in weights.items():
        if name not in names:
            raise InputError(f"weights= names {name!r}, which is no layer of the model; there are {', '.join(names)}")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise InputError(f"weights[{name!r}] is a number above 0, got {weight!r}")
    return dict(weights)

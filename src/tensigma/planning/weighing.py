"""Which weights share out a budget best: plans tried on samples, without labels.

An effect measured with one small error at a time is a good guide where errors are small, and a poor one where all
layers have large ones. So a budget is shared out with the effects to the powers 0 (all layers alike), ¼ and ½, each
plan is carried out layer by layer, and the model whose answers are nearest to the original's decides.
"""

from __future__ import annotations

import logging
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
from tensigma.planning.probe import Probe, UnlikeAnswers
from tensigma.planning.progress import Report, TrialProgress

logger = logging.getLogger(__name__)

#: Plain first: of equals the first is taken.
POWERS = (0.0, 0.25, 0.5)
# A search tries enough plans already, and those near its end have small errors.
POWER_OF_SEARCH = 0.5
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
        facts: Mapping[str, Any] | None = None,
        report: Report = lambda state: None,
    ) -> None:
        self.effects, self.probe = effects, probe
        self._build, self._facts, self._report = build, dict(facts or {}), report

    def weighted(self, allocation: Allocation, power: float = POWER_OF_SEARCH) -> Allocation:
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
            try:
                tried[power] = self.probe.divergence(self._build(plans[power]))
            except UnlikeAnswers:
                return plans[powers[0]]
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

    def noted(self, plan: Plan, power: float = POWER_OF_SEARCH, tried: Mapping[float, float] | None = None) -> Plan:
        """The same plan, with what was measured among its notes."""
        notes = {
            "power": power,
            "tried": [[each, _rounded(divergence)] for each, divergence in (tried or {}).items()],
            "samples": self.probe.samples,
            **self._facts,
            "effects": {name: _rounded(effect) for name, effect in self.effects.items()},
        }
        kept = {**plan.notes, "weighing": notes}
        return Plan(plan.values(), n_params=plan.n_params, allocation=plan.front(), notes=kept)


def weigher_for(
    model: nn.Module,
    stats: Calibration | None,
    layers: Sequence[Candidate],
    data: Any,
    *,
    trials: bool = True,
    input: str | int | None = None,
    report: Report = lambda state: None,
) -> Weigher | None:
    """Effects of ``layers``, measured on the first samples of ``data``; None where nothing can be measured.

    That is so without data, with data that can be read once, with a single layer, with answers that are no real numbers
    or change their shape, and under ``torchrun``, where each process has data of its own and all must come to the same
    plan. Without ``trials``, no more samples are kept than effects need.
    """
    if data is None or is_one_shot(data) or len(layers) < 2 or rank_and_size()[1] > 1:
        return None
    work = sum(layer.cost(None).macs for layer in layers)
    few = _samples(work * len(layers), _MOST_EFFECTS)
    many = _samples(work * len(POWERS), _MOST_TRIALS)
    try:
        probe = Probe(model, data, samples=many if trials else few, input=input)
        if probe.is_silent:
            return None
        part = probe.first(few)
        effects = measured_effects(model, layers, part, report=report)
    except UnlikeAnswers as error:
        logger.info("layers count alike, because answers cannot be compared: %s", error)
        return None
    if not effects:
        return None
    facts = {"effect_samples": part.samples, "data": getattr(data, "name", None)}
    return Weigher(effects, probe, Builder(model, stats), facts=facts, report=report)


def in_words(note: Mapping[str, Any]) -> str:
    """What a plan's notes say about weighing, for a reader.

    >>> in_words({"power": 0.25, "tried": [[0.0, 0.2], [0.25, 0.1]], "samples": 500, "effect_samples": 256})
    'errors count by their effects on the answers, to the power 0.25, the best of 2 ways tried on 500 samples'
    """
    if not note["tried"] and not note["power"]:
        return "errors count alike; weighed by their effects on the answers they would lead to the same plan"
    way = f"by their effects on the answers, to the power {note['power']:g}" if note["power"] else "alike"
    if not note["tried"]:
        return f"errors count {way}, measured on {note['effect_samples']:,} samples"
    return f"errors count {way}, the best of {len(note['tried'])} ways tried on {note['samples']:,} samples"


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")


def _samples(work: int, most: int) -> int:
    """How many samples are taken where each costs so many multiply-adds; 0 means that nobody knows."""
    return min(most, max(_FEWEST, int(_MACS / work))) if work else _FEWEST


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

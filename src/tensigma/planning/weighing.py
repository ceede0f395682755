"""Which weights share out a budget best: plans tried on samples, without labels.

An effect measured with one small error at a time is a good guide if errors are small, and a poor one if all layers have
large ones. So a budget is shared out with powers of the effects as weights, from 0 (all layers alike) to 1, the plans
are carried out layer by layer, and the one whose model's answers are nearest to the original's is taken. After 0 and ½
come higher powers for as long as answers come nearer, or ¼ if they do not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from tensigma.planning.budgets import AllOf, CostBudget
from tensigma.planning.effects import measured_effects
from tensigma.planning.forward_effects import forward_effects, forward_samples
from tensigma.planning.planning_store import PlanningStore
from tensigma.planning.plans import Front, Plan
from tensigma.running import (
    Key,
    Listener,
    Probe,
    Progress,
    UnlikeAnswers,
    Wanted,
    Wish,
    all_notes,
    allows_gradients,
    has_gradients,
    is_one_shot,
    share_of,
    silent,
)
from tensigma.solving import Candidate

logger = logging.getLogger(__name__)

#: Of equally good plans that of the lower power is taken.
POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)
# How many of them are tried as a rule.
_TRIALS = 3
# A search tries enough plans already, and those near its end have small errors.
POWER_OF_SEARCH = 0.5
# Measuring takes about as long as this many passes over the samples, trying one pass per power. Each takes as many
# samples as these multiply-adds allow, within limits: effects need to be roughly right, the trials decide.
_PASSES = 5
_MACS, _FEWEST, _MOST_EFFECTS, _MOST_TRIALS = 1e12, 64, 256, 1024
# Models without gradients run outside PyTorch in part, and take longer than their multiply-adds say.
_MOST_FORWARD_TRIALS = 64


@dataclass(frozen=True, kw_only=True)
class TrialProgress(Progress):
    """A plan with one power of the layers' effects as weights has been tried.

    >>> print(TrialProgress(done=2, total=3, power=0.25, divergence=0.0123, seconds=1.0))
    weights 2 of at most 3, power 0.25: divergence 0.0123
    """

    title: ClassVar[str] = "planning"

    power: float
    #: Divergence of the answers from the original's.
    divergence: float

    def __str__(self) -> str:
        return f"weights {self.done} of at most {self.total}, power {self.power:g}: divergence {self.divergence:.3g}"


class Weigher:
    """The effects of the layers that share a budget, and trials of plans weighted by them."""

    def __init__(
        self,
        effects: Mapping[str, float],
        probe: Probe,
        build: Callable[[Plan], nn.Module],
        *,
        facts: Mapping[str, Any] | None = None,
        store: PlanningStore | None = None,
        report: Listener = silent,
    ) -> None:
        self.effects, self.probe = effects, probe
        self._build, self._facts, self._report = build, dict(facts or {}), report
        self._store = store or PlanningStore()

    def weighted(self, front: Front, power: float = POWER_OF_SEARCH) -> Front:
        """The same curves, shared out with this power of the effects as weights."""
        return front.weighted({name: effect**power for name, effect in self.effects.items()} if power else {})

    def best_plan(
        self, front: Front, budget: CostBudget | AllOf, *, powers: Sequence[float] = POWERS, progress: Wanted = False
    ) -> Plan:
        """The plan for ``budget`` whose model diverges least from the original, of those that are tried."""
        start = time.perf_counter()
        plans: dict[float, Plan] = {}
        for power in powers:
            plan = self.weighted(front, power).plan(budget, progress=progress)
            if plan not in plans.values():
                plans[power] = plan
        tried: dict[float, float] = {}

        def divergence(power: float) -> float:
            if power not in tried:
                tried[power] = self._divergence(plans[power])
                self._report(
                    TrialProgress(
                        done=len(tried),
                        total=len(plans),
                        power=power,
                        divergence=tried[power],
                        seconds=time.perf_counter() - start,
                    )
                )
            return tried[power]

        # With one plan there is nothing to choose.
        ladder = list(plans)
        if len(ladder) == 1:
            return self.noted(plans[ladder[0]], ladder[0], tried)
        try:
            best = _lowest(ladder, divergence)
        except UnlikeAnswers:
            return plans[ladder[0]]
        return self.noted(plans[best], best, tried)

    def _divergence(self, plan: Plan) -> float:
        # Built also if the outcome is known, from known solutions: those of the chosen plan start from them.
        model = self._build(plan)
        return self._store.divergence(plan.to_json()["layers"], model, self.probe)

    def noted(self, plan: Plan, power: float = POWER_OF_SEARCH, tried: Mapping[float, float] | None = None) -> Plan:
        """The same plan, with what was measured among its notes."""
        return plan.with_notes(
            weighing={
                "power": power,
                "tried": [[power, _rounded(divergence)] for power, divergence in (tried or {}).items()],
                **self._facts,
                "effects": {name: _rounded(effect) for name, effect in self.effects.items()},
            }
        )


def _lowest(powers: Sequence[float], divergence: Callable[[float], float]) -> float:
    """The power with the lowest divergence of those tried: the first, the middle one, and those on its better side.

    >>> _lowest(POWERS, lambda power: abs(power - 0.8)), _lowest(POWERS, lambda power: power)
    (0.75, 0.0)
    """
    middle = len(powers) // 2
    tried = [powers[0], powers[middle]]
    if divergence(powers[0]) > divergence(powers[middle]):
        for power in powers[middle + 1 :]:
            tried.append(power)
            if divergence(power) >= divergence(tried[-2]):
                break
    elif middle > 1:
        tried.append(powers[middle - 1])
    return min(sorted(tried), key=divergence)


def weigher_for(
    model: nn.Module,
    layers: Sequence[Candidate],
    data: Any,
    build: Callable[[Plan], nn.Module],
    *,
    trials: bool = True,
    input: Key = None,
    answers: Wish = None,
    store: PlanningStore | None = None,
    report: Listener = silent,
) -> Weigher | None:
    """Effects of ``layers``, measured on the first samples of ``data``; None if nothing can be measured.

    That is so without data, with data that can be read only once, with a single layer, with answers that are not real
    numbers or change their shape. Without ``trials``, no more samples are kept than effects need. Effects and trials
    are kept in ``store``.

    Under ``torchrun`` each process has its own share of the data, and all of them measure the same.
    """
    store = store or PlanningStore()
    # All processes do the same, also if one of them has no data.
    if not all(all_notes(data is not None and not is_one_shot(data) and len(layers) > 1)):
        return None
    work = sum(layer.cost(None).macs for layer in layers)
    n_effects = _samples(work * _PASSES, _MOST_EFFECTS)
    n_trials = _samples(work * _TRIALS, _MOST_TRIALS)
    differentiable = has_gradients(model)
    if not differentiable:
        n_effects, n_trials = forward_samples(layers), min(n_trials, _MOST_FORWARD_TRIALS)
    try:
        samples = n_trials if trials else n_effects
        probe = Probe(model, data, samples=samples, input=input, answers=answers)
        if probe.is_silent:
            return None
        names = [layer.name for layer in layers]
        if differentiable and not all(all_notes(allows_gradients(model, names, probe.batches[0]))):
            differentiable, n_effects = False, forward_samples(layers)
        part = probe.first(share_of(n_effects))
        measure = measured_effects if differentiable else forward_effects
        effects = store.effects(model, layers, part, measure, report=report)
    except UnlikeAnswers as error:
        logger.info("layers count alike, because answers cannot be compared: %s", error)
        return None
    if not effects:
        return None
    samples, effect_samples = map(sum, zip(*all_notes((probe.samples, part.samples)), strict=True))
    facts = {
        "samples": samples,
        "effect_samples": effect_samples,
        "data": getattr(data, "name", None),
        "answers": str(probe.reading),
    }
    if not differentiable:
        facts["by"] = "forward runs"
    return Weigher(effects, probe, build, facts=facts, store=store, report=report)


def weighing_in_words(note: Mapping[str, Any]) -> str:
    """What a plan's notes say about weighing, as text.

    >>> weighing_in_words({"power": 0.25, "tried": [[0.0, 0.2], [0.25, 0.1]], "samples": 500, "effect_samples": 256})
    'errors count by their effects on the answers, to the power 0.25, the best of 2 ways tried on 500 samples'
    """
    if not note["tried"] and not note["power"]:
        return "errors count alike; weighed by their effects on the answers they would lead to the same plan"
    way = f"by their effects on the answers, to the power {note['power']:g}" if note["power"] else "alike"
    if note["power"] and note.get("by") == "forward runs":
        way += f" (measured without gradients, layer by layer on {note['effect_samples']:,} samples)"
    if not note["tried"]:
        return f"errors count {way}, measured on {note['effect_samples']:,} samples"
    return f"errors count {way}, the best of {len(note['tried'])} ways tried on {note['samples']:,} samples"


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")


def _samples(work: int, most: int) -> int:
    """How many samples to take if each costs ``work`` multiply-adds; 0 means unknown."""
    return min(most, max(_FEWEST, int(_MACS / work))) if work else _FEWEST

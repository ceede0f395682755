"""How much an error in each layer matters to the answers, measured, and which weights share out a budget best.

A layer is put back with its weakest output directions left out, at a squared relative error e² near 0.05, all other
layers as they are; the divergence of the answers from the original's, divided by e², is the effect of that layer.

An effect measured with one small error at a time is a good guide where errors are small, and a poor one where all
layers have large ones. So a budget is shared out with the effects to the powers 0 (all layers alike), ¼ and ½, each
plan is carried out layer by layer, and the model whose answers are nearest to the original's decides.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from tensigma.layers import replace_
from tensigma.planning.budgets import CostBudget
from tensigma.planning.plans import Front, Plan
from tensigma.running import Listener, Probe, Progress, UnlikeAnswers, Wanted, is_one_shot, rank_and_size, silent
from tensigma.solving import SVD_METHOD, Candidate, Treatment, solve

logger = logging.getLogger(__name__)

#: Plain first: of equals the first is taken.
POWERS = (0.0, 0.25, 0.5)
# A search tries enough plans already, and those near its end have small errors.
POWER_OF_SEARCH = 0.5
# Measuring runs the model once for every layer, trying once for every power. Either takes as many samples as these
# multiply-adds allow, within limits: the effects need to be roughly right, the trials decide.
_MACS, _FEWEST, _MOST_EFFECTS, _MOST_TRIALS = 1e12, 64, 256, 1024
#: Small enough that a layer is disturbed and not destroyed, large enough to stand out from rounding.
_ERROR2 = 0.05
# Effects further apart than this rest on a handful of samples more than on the layers.
_RANGE = 100.0


@dataclass(frozen=True, kw_only=True)
class EffectProgress(Progress):
    """What an error in a layer does to the answers has been measured.

    >>> print(EffectProgress(layer="conv1", done=2, total=9, seconds=1.0))
    effect of layer 2 of 9, conv1
    """

    title: ClassVar[str] = "planning"

    layer: str

    def __str__(self) -> str:
        return f"effect of layer {self.done} of {self.total}, {self.layer}"


@dataclass(frozen=True, kw_only=True)
class TrialProgress(Progress):
    """A plan with one power of the layers' effects for weights has been tried.

    >>> print(TrialProgress(done=2, total=3, power=0.25, divergence=0.0123, seconds=1.0))
    weights 2 of 3, power 0.25: divergence 0.0123
    """

    title: ClassVar[str] = "planning"

    power: float
    #: Of the answers from the original's.
    divergence: float

    def __str__(self) -> str:
        return f"weights {self.done} of {self.total}, power {self.power:g}: divergence {self.divergence:.3g}"


def measured_effects(
    model: nn.Module, layers: Sequence[Candidate], probe: Probe, *, report: Listener = silent
) -> dict[str, float]:
    """Layer name → effect of its errors on the answers, with a geometric mean of 1; nothing where none was felt.

    Layers that cannot be disturbed so, because all their output directions but one are empty or the norm weighs single
    entries, have an effect of 1.
    """
    start = time.perf_counter()
    effects: dict[str, float] = {}
    for done, layer in enumerate(layers, start=1):
        disturbance = _disturbance(layer)
        if disturbance is not None:
            disturbed = copy.deepcopy(model)
            solution = solve(disturbance, model.get_submodule(layer.name), layer.stats)
            replace_(disturbed, {layer.name: solution.modules})
            error = solution.error if layer.norm.needs_stats else solution.frobenius_error
            if error:
                effects[layer.name] = probe.divergence(disturbed) / error**2
        seconds = time.perf_counter() - start
        report(EffectProgress(layer=layer.name, done=done, total=len(layers), seconds=seconds))
    normal = normalised(effects)
    return {layer.name: normal.get(layer.name, 1.0) for layer in layers} if normal else {}


def normalised(effects: Mapping[str, float]) -> dict[str, float]:
    """The same with a geometric mean of 1, none of them beyond a hundred times or below a hundredth of the median.

    >>> normalised({"a": 1.0, "b": 4.0})
    {'a': 0.5, 'b': 2.0}
    """
    sound = sorted(effect for effect in effects.values() if 0 < effect < math.inf)
    if not sound:
        return {}
    middle = sound[len(sound) // 2]
    bounded = {name: min(max(effect, middle / _RANGE), middle * _RANGE) for name, effect in effects.items()}
    mean = math.exp(sum(map(math.log, bounded.values())) / len(bounded))
    return {name: effect / mean for name, effect in bounded.items()}


def _disturbance(layer: Candidate) -> Treatment | None:
    """The layer as an SVD of the rank whose error is nearest to what is wanted; None where no rank has an error."""
    if SVD_METHOD.why_not(layer.geometry, layer.norm) is not None:
        return None
    spectra = replace(layer, method=SVD_METHOD).spectra
    (largest,) = SVD_METHOD.max_ranks(layer.geometry.kernel_shape)
    errors = {rank: spectra.svd_error(rank) ** 2 for rank in range(1, largest)}
    # Directions that carry nothing leave rounding, which says nothing about the layer.
    errors = {rank: error2 for rank, error2 in errors.items() if error2 > 1e-6}
    if not errors:
        return None
    best = min(errors, key=lambda rank: abs(math.log(errors[rank] / _ERROR2)))
    format = SVD_METHOD.format((best,))
    return Treatment(geometry=layer.geometry, method=SVD_METHOD, norm=layer.norm, format=format)


class Weigher:
    """The effects of the layers that share a budget, and trials of what to make of them."""

    def __init__(
        self,
        effects: Mapping[str, float],
        probe: Probe,
        build: Callable[[Plan], nn.Module],
        *,
        facts: Mapping[str, Any] | None = None,
        report: Listener = silent,
    ) -> None:
        self.effects, self.probe = effects, probe
        self._build, self._facts, self._report = build, dict(facts or {}), report

    def weighted(self, front: Front, power: float = POWER_OF_SEARCH) -> Front:
        """The same curves, shared out with this power of the effects for weights."""
        return front.weighted({name: effect**power for name, effect in self.effects.items()} if power else {})

    def best_plan(
        self, front: Front, budget: CostBudget, *, powers: Sequence[float] = POWERS, progress: Wanted = False
    ) -> Plan:
        """The plan for ``budget`` whose model diverges least from the original."""
        start = time.perf_counter()
        plans: dict[float, Plan] = {}
        for power in powers:
            plan = self.weighted(front, power).plan(budget, progress=progress)
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
        return plan.with_notes(
            weighing={
                "power": power,
                "tried": [[power, _rounded(divergence)] for power, divergence in (tried or {}).items()],
                "samples": self.probe.samples,
                **self._facts,
                "effects": {name: _rounded(effect) for name, effect in self.effects.items()},
            }
        )


def weigher_for(
    model: nn.Module,
    layers: Sequence[Candidate],
    data: Any,
    build: Callable[[Plan], nn.Module],
    *,
    trials: bool = True,
    input: str | int | None = None,
    report: Listener = silent,
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
    return Weigher(effects, probe, build, facts=facts, report=report)


def weighing_in_words(note: Mapping[str, Any]) -> str:
    """What a plan's notes say about weighing, for a reader.

    >>> weighing_in_words({"power": 0.25, "tried": [[0.0, 0.2], [0.25, 0.1]], "samples": 500, "effect_samples": 256})
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
    """How many samples are taken where each costs so many multiply-adds; 0 means that this is not known."""
    return min(most, max(_FEWEST, int(_MACS / work))) if work else _FEWEST

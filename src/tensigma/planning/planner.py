"""From a model, its statistics and a recipe to a plan."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from tensigma.calibration import Calibration, calibrate
from tensigma.errors import InputError, PlanWarning
from tensigma.layers import Layer, find_layers, kernels_of
from tensigma.planning.budgets import AllOf, Budget, CostBudget, bits_allowed, check_reachable
from tensigma.planning.drop import Drop, Judge, smallest_plan
from tensigma.planning.entry import CompressedEntry, DenseEntry
from tensigma.planning.front import ParetoFront, compressed_entry, dense_entry
from tensigma.planning.planning_store import PlanningStore
from tensigma.planning.plans import Plan
from tensigma.planning.preparation import Prepared, prepare
from tensigma.planning.ranks import RankRule
from tensigma.planning.recipe import LayerWish, Recipe, Saving, Selection
from tensigma.planning.weighing import Weigher, weigher_for
from tensigma.running import Key, Wanted, Wish, not_ended, process_group, rank_and_size, reporter, weights_digest
from tensigma.solving import (
    DENSE_METHOD,
    Candidate,
    Folding,
    Method,
    Solutions,
    calls_of,
    choices_of,
    compressed_copy,
    foldable,
    folded_copy,
    method_of,
)

Draft = DenseEntry | CompressedEntry | Candidate
# The first convolution has few weights, and what it loses no other layer sees.
_LEAST_BITS_OF_FIRST = 8


def plan(
    model: nn.Module,
    stats: Calibration | None = None,
    *,
    recipe: Recipe | None = None,
    budget: Budget | None = None,
    ranks: RankRule | None = None,
    method: str | Method = "auto",
    norm: str = "centred",
    layers: str | Sequence[str] = "all",
    skip: str | Sequence[str] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    saving: Saving | None = None,
    weights: Mapping[str, float] | Literal["auto"] | None = "auto",
    answers: Wish = None,
    data: Any = None,
    input: Key = None,
    check: bool = True,
    cache: str | os.PathLike[str] | None = None,
    progress: Wanted = False,
) -> Plan:
    """Decide which layers of ``model`` are compressed, in which format and with which ranks.

    Args:
        model: Any module. It is not changed; with ``data``, copies of it may be compressed for trials.
        stats: Statistics from :func:`tensigma.calibrate`; not needed for ``norm="frobenius"``.
        recipe: Everything below, up to ``answers``, in one object; :class:`~tensigma.Recipe` describes each.
        budget: One number for the whole model: ``Params(share)``, ``Macs(share)``, ``Bytes(share)`` or
            ``Latency(share)`` may remain, several of them joined by ``&``, or ``Drop(share)`` of its answers may be
            lost.
        ranks: Instead of a budget, a rule: ``VBMF(alpha)``, ``SigmaVBMF(alpha)``, ``Energy(share)`` or
            ``Ranks({pattern: rank})``.
        data: Batches to calibrate with if ``stats`` is missing, and for ``weights="auto"``; labels are not read. Under
            ``Drop`` they are the held-out batches on which plans are tried, and labels are read unless it measures
            agreement; without ``stats`` they serve for both: every fifth batch, from the second on, is held out, and
            the others calibrate.
        input: The key or position of the model's input in a batch of ``data``.
        check: Refuse statistics that were gathered with other weights than those of ``model``.
        cache: A folder for statistics that are gathered here, curves, effects and trials. What is found there is not
            computed again, so the same call resumes a killed run.
        progress: True for lines in the log, or a function that is called with a
            :class:`~tensigma.planning.PlanningProgress` after the curves of each layer, which a budget needs, a
            :class:`~tensigma.planning.TimingProgress` after each shape that ``Latency`` has timed, under
            ``weights="auto"`` an :class:`~tensigma.planning.EffectProgress` after some samples and a
            :class:`~tensigma.planning.TrialProgress` after each plan, and a
            :class:`~tensigma.planning.SearchProgress` after each trial of ``Drop``; while calibrating, with a
            :class:`~tensigma.calibration.CalibrationProgress`.

    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
    >>> from tensigma.planning import VBMF
    >>> plan(model, ranks=VBMF(1.0), norm="frobenius", layers="spatial", skip=())["2"].method.name
    'tucker2'
    """
    keywords = {
        "budget": budget,
        "ranks": ranks,
        "method": method,
        "norm": norm,
        "layers": layers,
        "skip": skip,
        "overrides": overrides or {},
        "options": options or {},
        "saving": saving,
        "weights": weights,
        "answers": answers,
    }
    recipe = merged_recipe(recipe, keywords)
    data = not_ended(data, "data")
    prepared = prepare(
        model,
        recipe,
        stats=stats,
        batches=None if stats is not None else data,
        trial_data=None if stats is None else data,
        input=input,
        progress=progress,
        check=check,
        gather=partial(calibrate, cache=cache),
    )
    solutions = None if cache is None else Solutions(cache)
    return plan_prepared(model, recipe, prepared, input=input, progress=progress, solutions=solutions)


def merged_recipe(recipe: Recipe | None, keywords: Mapping[str, Any]) -> Recipe:
    """``recipe``, or one made of single keywords; both at once are refused."""
    if recipe is None:
        return Recipe(**keywords)
    # Fields without a plain default are mappings, empty by default.
    defaults = {field.name: {} if field.default is MISSING else field.default for field in fields(Recipe)}
    extra = next((key for key, value in keywords.items() if value != defaults[key]), None)
    if extra is not None:
        raise InputError(
            f"{{recipe}} decides {{{extra}}} too; give it in the recipe, or leave out the recipe",
            parameters=("recipe", extra),
        )
    return recipe


def plan_prepared(
    model: nn.Module,
    recipe: Recipe,
    prepared: Prepared,
    *,
    input: Key = None,
    progress: Wanted = False,
    solutions: Solutions | None = None,
    workers: int | None = None,
) -> Plan:
    """The plan that ``recipe`` asks for, from the statistics and data of :func:`prepare`.

    Curves and trials of small layers are solved by ``workers`` threads, by default as many as torch has.
    """
    with process_group(None):
        made = _plan_prepared(
            model, recipe, prepared, input=input, progress=progress, solutions=solutions, workers=workers
        )
    if recipe.budget is not None and made.raises_macs:
        warnings.warn(
            f"this plan has fewer parameters but needs more multiply-adds, {made.after.macs:,} instead of "
            f"{made.before.macs:,}; a budget of Macs or Latency makes the model faster",
            PlanWarning,
            stacklevel=3,
        )
    return made


def _plan_prepared(
    model: nn.Module,
    recipe: Recipe,
    prepared: Prepared,
    *,
    input: Key,
    progress: Wanted,
    solutions: Solutions | None,
    workers: int | None,
) -> Plan:
    n_bytes = float_bytes(model)
    n_params = sum(parameter.numel() for parameter in model.parameters())
    weights = weights_digest(model)
    folding = Folding()
    if bits_allowed(recipe.budget):
        _check_precision(model)
        folding = _folding(model, recipe, prepared.stats)
        # From here on the model is the folded one, of which calibration says the same: inputs of layers do not change.
        model = folded_copy(model, folding)
    drafts = _drafts(model, recipe, prepared.stats)
    solutions = solutions or Solutions()
    if recipe.budget is None:
        entries = [draft for draft in drafts if not isinstance(draft, Candidate)]
        return Plan(entries, n_params=n_params, n_bytes=n_bytes, weights=weights, solutions=solutions)
    # Processes measure together, so none of them may find an effect or a trial that another has to measure.
    store = PlanningStore(solutions.folder if rank_and_size()[1] == 1 else None)
    report = reporter(progress)
    if isinstance(recipe.budget, CostBudget | AllOf):
        check_reachable(drafts, n_params, n_bytes, folding, recipe.budget)
    front = ParetoFront(
        drafts,
        n_params=n_params,
        n_bytes=n_bytes,
        folding=folding,
        model_weights=weights,
        solutions=solutions,
        report=report,
        workers=workers,
    )

    def build(trial: Plan) -> nn.Module:
        return compressed_copy(model, trial.treatments, prepared.stats, solutions, workers=workers)

    def build_roughly(trial: Plan) -> nn.Module:
        treatments = {name: treatment.roughly() for name, treatment in trial.treatments.items()}
        return compressed_copy(model, treatments, prepared.stats, solutions, workers=workers)

    def make_weigher(*, trials: bool) -> Weigher | None:
        if recipe.weights != "auto":
            return None
        candidates = [draft for draft in drafts if isinstance(draft, Candidate)]
        data = prepared.trial_data
        return weigher_for(
            model,
            candidates,
            data,
            build_roughly,
            trials=trials,
            input=input,
            answers=recipe.answers,
            store=store,
            report=report,
        )

    weighted_front = front.weighted(recipe.weights if isinstance(recipe.weights, Mapping) else {})
    if isinstance(recipe.budget, Drop):
        drop, data = recipe.budget, prepared.trial_data
        judge = Judge(
            model,
            data,
            measure=drop.measure,
            losable=drop.share,
            input=input,
            answers=recipe.answers,
            store=store,
        )
        weigher = make_weigher(trials=False)
        searched = weighted_front if weigher is None else weigher.weighted(front)
        name = getattr(data, "name", None)
        smallest = smallest_plan(searched, drop, build=build, judge=judge, searched_on=name, report=report)
        return smallest if weigher is None else weigher.noted(smallest)
    assert isinstance(recipe.budget, CostBudget | AllOf)
    # Refuses a budget that cannot be kept, before anything is measured.
    first_plan = weighted_front.plan(recipe.budget, progress=progress)
    weigher = make_weigher(trials=True)
    if weigher is None:
        return first_plan
    front.weigher = weigher
    return front.best_plan(recipe.budget, progress=progress)


def _folding(model: nn.Module, recipe: Recipe, stats: Calibration | None) -> Folding:
    """The BatchNorms that are folded into layers before these are rounded."""
    folding = foldable(model, stats)
    norms = {layer.name: recipe.wish_for(layer.name).norm for layer in find_layers(model)}
    weighing = {name: norm.name for name, norm in norms.items() if norm.weighs_entries}
    if not weighing or not folding.layers:
        return folding
    # Gradients and outputs were gathered for the layers as they are.
    why = f"the norm {next(iter(weighing.values()))!r} was measured on the layers as they are"
    return Folding(left={**dict.fromkeys(folding.norms, why), **folding.left})


def _drafts(model: nn.Module, recipe: Recipe, stats: Calibration | None) -> list[Draft]:
    """Every layer: as an entry if its treatment is settled, as a candidate if it shares the budget."""
    layers = find_layers(model)
    selection = Selection(recipe, layers, stats)
    wishes = {layer.name: recipe.wish_for(layer.name) for layer in layers}
    rounds = bool(bits_allowed(recipe.budget))
    drafts = [_draft(layer, wishes[layer.name], selection, stats, rounds=rounds) for layer in layers]
    if not any(isinstance(draft, Candidate) for draft in drafts):
        reasons = "; ".join(f"{draft.name}: {draft.reason}" for draft in drafts[:3] if isinstance(draft, DenseEntry))
        raise InputError(f"no layer of {type(model).__name__} can be compressed ({reasons})")
    settled: list[Draft] = []
    for draft in drafts:
        rule = wishes[draft.name].ranks
        ruled = isinstance(draft, Candidate) and rule is not None
        settled.append(_by_rule(draft, rule, recipe.saving or "params") if ruled else draft)  # type: ignore[arg-type]
    return settled


def _draft(
    layer: Layer, wish: LayerWish, selection: Selection, stats: Calibration | None, *, rounds: bool
) -> DenseEntry | Candidate:
    """A layer that may be compressed as a candidate; any other as a dense entry with the reason.

    With ``rounds``, layers that cannot be decomposed, or are not by default, are candidates for fewer bits alone.
    """
    geometry = layer.geometry
    if geometry is None:
        return DenseEntry(name=layer.name, geometry=None, norm=wish.norm, reason=layer.reason or "it cannot be read")
    method = method_of(wish.method, geometry)
    layer_stats = None if stats is None else stats.get(layer.name)
    size, calls = None, 1.0
    if layer_stats is not None and layer_stats.input_shape:
        shape = layer_stats.input_shape
        size = shape[:-1] if geometry.kind == "linear" else shape[1:]
        calls = calls_of(geometry, layer_stats, size)
    reason = layer.reason or selection.why_not(layer) or method.why_not(geometry, wish.norm)
    only_rounded = (
        rounds and reason is not None and layer.reason is None and DENSE_METHOD.why_not(geometry, wish.norm) is None
    )
    only_rounded = only_rounded and (selection.why_not(layer) is None or selection.by_default(layer))
    if only_rounded:
        reason = None
    if reason is None and stats is not None and layer.name in stats.read_elsewhere:
        reason = "the model reads the weight or bias of this layer besides calling it, and a smaller layer has none"
    if reason is None and stats is not None and layer_stats is None:
        reason = "calibration never reached it: the model does not call it, or reads its weight directly"
    if reason is not None:
        return DenseEntry(
            name=layer.name,
            geometry=geometry,
            norm=wish.norm,
            method=method,
            reason=reason,
            input_size=size,
            calls=calls,
        )
    lacking = wish.norm.why_not(layer_stats)
    if lacking is not None:
        raise InputError(
            f"{{norm}}, layer {layer.name!r}: {lacking}", parameters=(f"norm={wish.norm.name!r}", "fisher='model'")
        )
    few_rows = layer_stats is not None and layer_stats.rows is not None
    # Spectra and curves of half-precision weights are computed in single precision.
    kernels = [kernel.to(torch.promote_types(kernel.dtype, torch.float32)) for kernel in kernels_of(layer.module)]
    return Candidate(
        name=layer.name,
        geometry=geometry,
        kernels=tuple(kernels),
        method=method,
        norm=wish.norm,
        stats=layer_stats,
        input_size=size,
        calls=calls,
        options=wish.options,
        choices=() if only_rounded else choices_of(wish.method, geometry, wish.norm, few_rows=few_rows),
        least_bits=_LEAST_BITS_OF_FIRST if selection.by_default(layer) else 2,
    )


def _check_precision(model: nn.Module) -> None:
    """Refuse weights that are not in float32, whose bytes would be counted wrongly and which lie on no grid."""
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise InputError(
                f"Bytes counts from float32, and {name} is {parameter.dtype}; convert it with model.float()"
            )


def float_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, parameters in float32.

    >>> float_bytes(nn.Linear(10, 5).half())
    220
    """
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    return 4 * sum(parameter.numel() for parameter in model.parameters()) + buffers


def _by_rule(layer: Candidate, rule: RankRule, unit: Saving) -> DenseEntry | CompressedEntry:
    """The entry of a layer whose ranks follow a rule; dense if that would save nothing."""
    ranks = rule.ranks(layer)
    if ranks is None:
        return dense_entry(layer, "no ranks are given for it")
    if unit != "none" and (unit == "params" or layer.input_size is not None):
        before, after = layer.cost(None), layer.cost(ranks)
        if getattr(after, unit) >= getattr(before, unit):
            label = " ".join([layer.method.name, *map(str, ranks)])
            return dense_entry(layer, f"{label} would save no {'parameters' if unit == 'params' else 'MACs'}")
    error = layer.method.error(layer.spectra, ranks) if rule.reads_energy else None
    return compressed_entry(layer, layer.method, ranks, error=error)

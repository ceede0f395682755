"""From a model, its statistics and one rule or budget to a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from tensigma.calibration import Calibration, calibrate
from tensigma.errors import InputError
from tensigma.layers import Layer, find_layers, kernels_of
from tensigma.planning.allocation import Allocation, entry
from tensigma.planning.budget import Budget, CostBudget
from tensigma.planning.builder import Builder
from tensigma.planning.candidate import Candidate, calls_of
from tensigma.planning.drop import Drop, smallest_plan
from tensigma.planning.entry import Entry
from tensigma.planning.heldout import Judge, SetAside
from tensigma.planning.methods import Method, choices_of, method_of
from tensigma.planning.norms import norm_of
from tensigma.planning.plans import Plan
from tensigma.planning.progress import reporter
from tensigma.planning.ranks import RankRule
from tensigma.planning.sieve import Sieve
from tensigma.planning.weighing import Weigher, known_weights, weigher_for
from tensigma.planning.wishes import Wish, Wishes, known_method, known_options

Saving = Literal["params", "macs", "none"]


def plan(
    model: nn.Module,
    stats: Calibration | None = None,
    *,
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
    data: Any = None,
    input: str | int | None = None,
    progress: bool | Callable[[Any], None] = False,
) -> Plan:
    """Decide which layers of ``model`` are compressed, in which format and with which ranks.

    Args:
        model: Any module. It stays as it is; with ``data`` at hand, copies of it may be compressed for a trial.
        stats: What :func:`tensigma.calibrate` gathered; not needed for ``norm="frobenius"``.
        budget: One number for the whole model: ``Params(share)``, ``Macs(share)`` or ``Latency(share)`` may remain, or
            ``Drop(share)`` of its answers may be lost.
        ranks: Or a rule: ``VBMF(alpha)``, ``SigmaVBMF(alpha)``, ``Energy(share)`` or ``Ranks({pattern: rank})``.
            Exactly one of the two.
        method: ``"auto"``, ``"tucker2"``, ``"cp"``, ``"cp-joint"``, ``"deflation"`` or ``"svd"``. ``"auto"`` is
            the best format for each layer under a budget, and Tucker-2 for kernels larger than one tap with ranks by
            a rule. Pointwise and Linear layers take SVD whatever the method. An instance of
            :class:`~tensigma.planning.methods.Method` is one that has no name here.
        norm: ``"centred"``, ``"sigma"``, ``"frobenius"``, ``"fisher"`` or ``"activation"``.
        layers: ``"all"``, ``"spatial"`` (kernels larger than one tap), or names and patterns.
        skip: Names and patterns of layers to leave dense. None means the first convolution, ``()`` means none.
        overrides: Pattern → dict with any of ``method``, ``ranks``, ``norm`` and ``options``, for some layers; where
            several patterns match, the later ones have the last word.
        options: Options of the solvers, such as ``max_sweeps``; each method takes those it knows.
        saving: A layer that would not get smaller in ``"params"`` or ``"macs"`` stays dense; ``"none"`` lets it
            grow. By default MACs under ``Macs``, otherwise parameters.
        weights: How much the loss of each layer counts when a budget is shared out. ``"auto"``, where ``data`` is at
            hand and can be read again, measures on up to 256 samples what an error in each layer does to the answers,
            tries plans with different powers of that for weights on up to 1,024, and takes the one whose model answers
            most like the original; a search by ``Drop`` takes the power ½ throughout. Answers of shape (batch, classes)
            are compared as probabilities, others by their squared error; under ``torchrun`` layers count alike. None
            counts all layers alike, and a dict gives weights by name, 1 for those that are not named.
        data: Batches, of which labels are not read but under ``Drop``: to calibrate with where ``stats`` is not given,
            and for ``weights="auto"``. Under ``Drop`` they are the held-out batches on which plans are tried, and
            labels are read where it counts them; without ``stats`` they serve both: every fifth batch, from the second
            on, is held out, the others calibrate.
        input: The entry or position of the model's input in a batch of ``data``.
        progress: True for lines in the log, or a function that is called with a
            :class:`~tensigma.planning.PlanningProgress` after the curves of each layer, which a budget needs, a
            :class:`~tensigma.planning.TimingProgress` after each shape that ``Latency`` has timed, a
            :class:`~tensigma.planning.EffectProgress` and a :class:`~tensigma.planning.TrialProgress` after each layer
            and each plan that ``weights="auto"`` has tried and a :class:`~tensigma.planning.SearchProgress` after each
            trial of ``Drop``.

    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
    >>> from tensigma.planning import VBMF
    >>> plan(model, ranks=VBMF(1.0), norm="frobenius", layers="spatial", skip=())["2"].method.name
    'tucker2'
    """
    if (budget is None) == (ranks is None):
        came = "both came" if budget is not None else "neither came"
        raise InputError(f"give either budget= (such as Params(0.5)) or ranks= (such as VBMF(0.5)); {came}")
    if budget is not None and not isinstance(budget, Budget):
        raise InputError(f"budget= takes Params(share), Macs(share), Latency(share) or Drop(share), got {budget!r}")
    if isinstance(budget, Drop) and data is None:
        raise InputError(f"{budget!r} is searched on held-out batches, which need no labels; give them as data=")
    if ranks is not None and not isinstance(ranks, RankRule):
        raise InputError(
            f"ranks= takes VBMF(alpha), SigmaVBMF(alpha), Energy(share) or Ranks({{pattern: rank}}), got {ranks!r}"
        )
    if saving not in (None, "params", "macs", "none"):
        raise InputError(f"saving={saving!r} is unknown; choose 'params', 'macs' or 'none'")
    found = find_layers(model)
    if not found:
        raise InputError(f"{type(model).__name__} has no convolution or Linear layer, so there is nothing to plan")
    names = [layer.name for layer in found]
    if ranks is not None:
        ranks.check_names(names)
    counted = known_weights(weights, names)
    wishes = Wishes(Wish(known_method(method), norm_of(norm), ranks, known_options(options)), overrides or {}, names)
    needy = [norm for norm in wishes.norms if norm.needs_stats]
    if stats is None and needy:
        if data is None:
            raise InputError(
                f"norm={needy[0].name!r} needs stats= (from tensigma.calibrate) or data= (batches to calibrate with); "
                "only norm='frobenius' does without"
            )
        fisher = next((norm.fisher for norm in needy if norm.fisher), None)
        if isinstance(budget, Drop):
            data = SetAside(data)
        stats = calibrate(model, data, fisher=fisher, input=input)
        if isinstance(data, SetAside):
            data = data.held
    if stats is not None:
        stats.check_model(model)
    sieve = Sieve(found, layers, skip, stats)
    drafts = [_draft(layer, wishes.of(layer.name), sieve, stats) for layer in found]
    candidates = [draft for draft in drafts if isinstance(draft, Candidate)]
    if not candidates:
        reasons = "; ".join(f"{draft.name}: {draft.reason}" for draft in drafts[:3] if isinstance(draft, Entry))
        raise InputError(f"no layer of {type(model).__name__} can be compressed ({reasons})")
    n_params = sum(parameter.numel() for parameter in model.parameters())
    ruled = {layer.name: _by_rule(layer, rule, saving or "params") for layer, rule in _rules(candidates, wishes)}
    drafts = [ruled.get(draft.name, draft) for draft in drafts]
    if budget is None:
        return Plan([draft for draft in drafts if isinstance(draft, Entry)], n_params=n_params)
    report = reporter(progress)
    allocation = Allocation(drafts, n_params=n_params, report=report).weighted(counted)
    sharing = [layer for layer in drafts if isinstance(layer, Candidate)]

    def weigh(*, trials: bool) -> Weigher | None:
        if weights != "auto":
            return None
        return weigher_for(model, stats, sharing, data, trials=trials, input=input, report=report)

    if isinstance(budget, Drop):
        judge = Judge(model, data, measure=budget.measure, losable=budget.share, input=input)
        weigher = weigh(trials=False)
        made = smallest_plan(
            allocation if weigher is None else weigher.weighted(allocation),
            budget,
            build=Builder(model, stats),
            judge=judge,
            searched_on=getattr(data, "name", None),
            report=report,
        )
        return made if weigher is None else weigher.noted(made)
    assert isinstance(budget, CostBudget)
    # Refused here, a budget that cannot be kept costs nothing more.
    plain = allocation.plan(budget, progress=progress)
    weigher = weigh(trials=True)
    return plain if weigher is None else weigher.best_plan(allocation, budget, progress=progress)


def _draft(layer: Layer, wish: Wish, sieve: Sieve, stats: Calibration | None) -> Entry | Candidate:
    """A layer that may be compressed as a candidate; any other as a dense entry with the reason."""
    geometry = layer.geometry
    if geometry is None:
        return Entry(name=layer.name, geometry=None, method=None, norm=wish.norm, reason=layer.reason)
    method = method_of(wish.method, geometry)
    own = None if stats is None else stats.get(layer.name)
    size, calls = None, 1.0
    if own is not None and own.input_shape:
        size = own.input_shape[:-1] if geometry.kind == "linear" else own.input_shape[1:]
        calls = calls_of(geometry, own, size)
    reason = layer.reason or sieve.why_not(layer, geometry) or method.why_not(geometry, wish.norm)
    if reason is None and stats is not None and own is None:
        reason = "calibration never reached it"
    if reason is not None:
        return Entry(
            name=layer.name,
            geometry=geometry,
            method=method,
            norm=wish.norm,
            reason=reason,
            input_size=size,
            calls=calls,
        )
    lacking = wish.norm.why_not(own)
    if lacking is not None:
        raise InputError(f"norm={wish.norm.name!r}, layer {layer.name!r}: {lacking}")
    return Candidate(
        name=layer.name,
        geometry=geometry,
        # Spectra and curves of half-precision weights are computed in single precision.
        kernels=tuple(
            kernel.to(torch.promote_types(kernel.dtype, torch.float32)) for kernel in kernels_of(layer.module)
        ),
        method=method,
        norm=wish.norm,
        stats=own,
        input_size=size,
        calls=calls,
        options=wish.options,
        choices=choices_of(wish.method, geometry, wish.norm),
    )


def _rules(candidates: Sequence[Candidate], wishes: Wishes) -> Iterator[tuple[Candidate, RankRule]]:
    """The candidates that have a rule of their own; the others share the budget."""
    for layer in candidates:
        rule = wishes.of(layer.name).ranks
        if rule is not None:
            yield layer, rule


def _by_rule(layer: Candidate, rule: RankRule, unit: Saving) -> Entry:
    """The entry of a layer whose ranks follow a rule; dense where that would save nothing."""
    ranks = rule.ranks(layer)
    if ranks is None:
        return entry(layer, reason="no ranks are given for it")
    if unit != "none" and (unit == "params" or layer.input_size is not None):
        before, after = layer.cost(None), layer.cost(ranks)
        if getattr(after, unit) >= getattr(before, unit):
            label = " ".join([layer.method.name, *map(str, ranks)])
            return entry(layer, reason=f"{label} would save no {'parameters' if unit == 'params' else 'MACs'}")
    error = layer.method.error(layer.spectra, ranks) if rule.reads_energy else None
    return entry(layer, layer.method, ranks, error=error)

"""Carrying out a plan."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Literal

from torch import nn

from tensigma.calibration import Calibration, calibrate
from tensigma.calibration.batches import is_one_shot
from tensigma.calibration.distributed import rank_and_size
from tensigma.errors import InputError
from tensigma.layers import find_layers, replace_
from tensigma.pipeline.batchnorm import reestimate_bn_
from tensigma.pipeline.cache import Cache
from tensigma.pipeline.counting import count_params, size_of
from tensigma.pipeline.jobs import Job
from tensigma.pipeline.progress import reporter
from tensigma.pipeline.refinement import Refine, blocks_around, refine_
from tensigma.pipeline.report import LayerReport, Report, Size
from tensigma.pipeline.sequential import fit_in_sequence
from tensigma.pipeline.sharing import run_shared
from tensigma.pipeline.spectra import spectra_data
from tensigma.planning import Budget, Drop, Entry, Method, Plan, RankRule, SetAside, norm_of, plan
from tensigma.planning.frontdata import front_data
from tensigma.planning.solve import Solution

# Sequential fitting runs both networks over the data once for each layer. Unless asked for, it takes as many samples as
# these multiply-adds allow, within limits: fewer say too little, and beyond the most little is gained.
_AUTO_MACS, _AUTO_FEWEST, _AUTO_MOST = 20e12, 128, 1_000


def compress(
    model: nn.Module,
    plan_or_batches: Any,
    stats: Calibration | None = None,
    *,
    budget: Budget | None = None,
    ranks: RankRule | None = None,
    method: str | Method = "auto",
    norm: str = "centred",
    layers: str | Sequence[str] = "all",
    skip: str | Sequence[str] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    weights: Mapping[str, float] | Literal["auto"] | None = "auto",
    data: Any = None,
    sequential: bool | Literal["auto"] = "auto",
    refine: int | Refine | None = None,
    reestimate_bn: bool = False,
    input: str | int | None = None,
    progress: bool | Callable[[Any], None] = False,
    cache: str | os.PathLike[str] | None = None,
    workers: int | None = None,
) -> tuple[nn.Module, Report]:
    """A smaller copy of ``model``, made of plain layers, and a report of what was done. ``model`` stays as it is.

    With a :class:`~tensigma.Plan` it is carried out; with batches and a ``budget`` (or ``ranks``) the model is
    calibrated on them, planned and compressed in one go, and the keywords of :func:`tensigma.plan` apply.

    Args:
        model: Any module.
        plan_or_batches: A plan, or batches as :func:`tensigma.calibrate` takes them.
        stats: What calibration gathered; not needed where all norms of the plan are ``"frobenius"``.
        budget: For the one-call form, as are ``ranks``, ``method``, ``norm``, ``layers``, ``skip``, ``overrides``
            and ``weights``.
        data: Batches, of which labels are never read, for what a plan and its statistics cannot do alone: calibration
            where ``stats`` is missing, ``weights="auto"``, and the three options below. In the one-call form they are
            the batches; under ``Drop``, which may count right answers by their labels, they are the held-out batches
            that it is searched on, in place of every fifth of the batches, from the second on.
        sequential: Fit each layer on inputs from the layers already compressed, towards the outputs of the original.
            Both networks run over the data once for each layer. ``"auto"`` does so, on up to 1,000 samples, wherever
            ``data`` is at hand, can be read again, and the norm is ``"centred"`` or ``"sigma"``; not for a plan made by
            ``Drop``, whose search has judged layers fitted independently.
        refine: Afterwards train the small model to answer like the original, without labels: the number of samples to
            pass through it, or a :class:`~tensigma.Refine`.
        reestimate_bn: Afterwards take the statistics of BatchNorm layers anew from ``data``.
        input: The entry or position of the model's input in a batch.
        progress: True for lines in the log, or a function that is called with a
            :class:`~tensigma.pipeline.CompressionProgress` after each layer (and, while calibrating, with a
            :class:`~tensigma.calibration.Progress` after each batch, while planning with a
            :class:`~tensigma.planning.PlanningProgress` and what else :func:`tensigma.plan` reports, while refining
            with a :class:`~tensigma.pipeline.RefinementProgress`).
        cache: A folder of solutions. What is found there is not solved again, so a killed run resumes.
        workers: How many small layers are solved side by side; as many as torch has threads by default.

    Under ``torchrun`` all processes call this with the same arguments; each solves its share, all return the same.
    Layers are then fitted independently of each other.

    >>> import torch
    >>> import tensigma as ts
    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(32, 10))
    >>> small, report = ts.compress(model, [torch.randn(8, 3, 5, 5)], budget=ts.Params(0.5))
    >>> report.after.params <= 0.5 * report.before.params, {type(layer).__name__ for layer in small[2]}
    (True, {'Conv2d'})
    """
    start = time.perf_counter()
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise InputError(f"workers is a whole number of at least 1, got {workers!r}")
    if isinstance(plan_or_batches, Plan):
        if budget is not None or ranks is not None:
            raise InputError(
                "a plan came, so budget= and ranks= have nothing to decide; give batches instead of a plan"
            )
        carried = plan_or_batches
        carried.check_model(model)
        stats = _stats_for(carried, model, stats, data, input, progress)
    else:
        if (budget is None) == (ranks is None):
            raise InputError(
                "batches came instead of a plan, so budget= (such as Params(0.5)) or ranks= (such as VBMF(0.5)) is "
                "needed, and only one of them"
            )
        searched = isinstance(budget, Drop)
        if searched and data is None:
            plan_or_batches = SetAside(plan_or_batches)
            data = plan_or_batches
        if stats is None:
            stats = calibrate(model, plan_or_batches, fisher=norm_of(norm).fisher, input=input, progress=progress)
        carried = plan(
            model,
            stats,
            budget=budget,
            ranks=ranks,
            method=method,
            norm=norm,
            layers=layers,
            skip=skip,
            overrides=overrides,
            weights=weights,
            data=data.held if isinstance(data, SetAside) else plan_or_batches if data is None else data,
            input=input,
            progress=progress,
        )
        data = plan_or_batches if searched or data is None else data
    _check_data(data, sequential=sequential, refine=refine, reestimate_bn=reestimate_bn)
    in_sequence = _in_sequence(carried, data, sequential)
    store = None if cache is None else Cache(cache)
    modules = {layer.name: layer.module for layer in find_layers(model)}
    if in_sequence:
        solved = fit_in_sequence(
            model,
            carried,
            data,
            stats=stats,
            max_samples=_auto_samples(carried) if sequential == "auto" else None,
            input=input,
            cache=store,
            report=reporter(progress),
        )
    else:
        jobs = [Job(entry, modules[entry.name], _layer_stats(entry, stats)) for entry in carried.compressed]
        solved = run_shared(jobs, cache=store, workers=workers, report=reporter(progress))
    small = copy.deepcopy(model)
    replace_(small, {name: solution.modules for name, (solution, _) in solved.items()})
    notes: dict[str, Any] = {"sequential": in_sequence}
    if "weighing" in carried.notes:
        notes["weighing"] = carried.notes["weighing"]
    if refine is not None:
        blocks = blocks_around(model, list(solved))
        settings = Refine.of(refine)
        notes["refinement"] = refine_(small, model, data, settings, blocks=blocks, input=input, progress=progress)
    if reestimate_bn:
        notes["reestimated_bn"] = reestimate_bn_(small, data, input=input)
    rows = [_row(entry, modules[entry.name], solved.get(entry.name)) for entry in carried.values()]
    macs = (carried.before.macs, carried.after.macs) if carried.before.macs else (None, None)
    return small, Report(
        layers=tuple(rows),
        before=replace(size_of(model), macs=macs[0]),
        after=replace(size_of(small), macs=macs[1]),
        seconds=time.perf_counter() - start,
        library=version("tensigma"),
        notes=notes,
        front=front_data(carried),
        spectra=spectra_data(carried, modules, stats),
    )


def compress_(model: nn.Module, plan_or_batches: Any, stats: Calibration | None = None, **keywords: Any) -> Report:
    """:func:`compress` in place, with the same keywords: ``model`` becomes the smaller one, or after an error stays.

    >>> import torch
    >>> import tensigma as ts
    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3))
    >>> ts.compress_(model, ts.plan(model, ranks=ts.Ranks({"*": 4}), norm="frobenius")).rate > 1, len(model[2])
    (True, 3)
    """
    small, report = compress(model, plan_or_batches, stats, **keywords)
    replace_(model, {layer.name: small.get_submodule(layer.name) for layer in report.compressed})
    model.load_state_dict(small.state_dict())
    return report


def _check_data(data: Any, *, sequential: Any, refine: Any, reestimate_bn: bool) -> None:
    if sequential not in (True, False, "auto"):
        raise InputError(f"sequential={sequential!r} is unknown; choose True, False or 'auto'")
    wishes = {"sequential=True": sequential is True, "refine=": refine is not None, "reestimate_bn=True": reestimate_bn}
    asked = [wish for wish, wanted in wishes.items() if wanted]
    if not asked:
        return
    if data is None:
        raise InputError(f"{asked[0]} needs data= (batches without labels)")
    if is_one_shot(data):
        raise InputError(
            f"{asked[0]} reads the data several times, but it came as an iterator that can be read once; pass a list "
            "or a DataLoader"
        )
    if rank_and_size()[1] > 1:
        raise InputError(f"{asked[0]} works in one process; run it without torchrun")


def _in_sequence(plan: Plan, data: Any, wish: bool | Literal["auto"]) -> bool:
    """Whether layers are fitted one after the other."""
    strange = [entry.norm.name for entry in plan.compressed if not entry.norm.needs_stats or entry.norm.weighs_entries]
    if wish is True and strange:
        raise InputError(f"sequential=True fits under a metric of the inputs, which norm={strange[0]!r} does not have")
    if wish == "auto":
        # A search has judged layers that were fitted independently, and what it promises holds for these.
        if "drop" in plan.notes:
            return False
        return data is not None and not is_one_shot(data) and not strange and rank_and_size()[1] == 1
    return wish


def _auto_samples(plan: Plan) -> int:
    """How many samples sequential fitting takes where nobody says."""
    passes = plan.before.macs * len(plan.compressed)
    return min(_AUTO_MOST, max(_AUTO_FEWEST, int(_AUTO_MACS / max(passes, 1))))


def _stats_for(
    carried: Plan, model: nn.Module, stats: Calibration | None, data: Any, input: str | int | None, progress: Any
) -> Calibration | None:
    needy = [entry.norm for entry in carried.compressed if entry.norm.needs_stats]
    if stats is None and needy:
        if data is None:
            raise InputError(
                f"the plan's norm {needy[0].name!r} needs stats= (from tensigma.calibrate) or data= (batches to "
                "calibrate with)"
            )
        fisher = next((norm.fisher for norm in needy if norm.fisher), None)
        stats = calibrate(model, data, fisher=fisher, input=input, progress=progress)
    if stats is not None:
        stats.check_model(model)
    return stats


def _layer_stats(entry: Entry, stats: Calibration | None) -> Any:
    found = None if stats is None else stats.get(entry.name)
    if found is None and entry.norm.needs_stats:
        raise InputError(
            f"{entry.name}: the plan's norm {entry.norm.name!r} needs statistics, and calibration never reached it"
        )
    return found


def _row(entry: Entry, module: nn.Module, found: tuple[Solution, bool] | None) -> LayerReport:
    sized = entry.input_size is not None
    before = replace(size_of(module), macs=entry.before.macs if sized else None)
    if found is None:
        return LayerReport(
            name=entry.name, method="dense", ranks=None, norm=None, before=before, after=before, reason=entry.reason
        )
    solution, cached = found
    after = count_params(solution.modules)
    width = next(module.parameters()).element_size()
    assert entry.method is not None
    return LayerReport(
        name=entry.name,
        method=entry.method.name,
        ranks=entry.ranks,
        norm=entry.norm.name,
        before=before,
        after=Size(params=after, macs=entry.after.macs if sized else None, bytes=after * width),
        error=solution.error,
        frobenius_error=solution.frobenius_error,
        converged=solution.converged,
        seconds=solution.seconds,
        cached=cached,
    )

"""Carrying out a plan."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from torch import nn

from tensigma.calibration import Calibration, calibrate
from tensigma.errors import InputError
from tensigma.layers import find_layers, replace_
from tensigma.pipeline.cache import Cache
from tensigma.pipeline.counting import count_params, size_of
from tensigma.pipeline.jobs import Job
from tensigma.pipeline.progress import reporter
from tensigma.pipeline.report import LayerReport, Report, Size
from tensigma.pipeline.sharing import run_shared
from tensigma.pipeline.spectra import spectra_data
from tensigma.planning import Budget, Entry, Plan, RankRule, norm_of, plan
from tensigma.planning.frontdata import front_data
from tensigma.planning.solve import Solution


def compress(
    model: nn.Module,
    plan_or_batches: Any,
    stats: Calibration | None = None,
    *,
    budget: Budget | None = None,
    ranks: RankRule | None = None,
    method: str = "auto",
    norm: str = "centred",
    layers: str | Sequence[str] = "all",
    skip: str | Sequence[str] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    data: Any = None,
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
        budget: For the one-call form, as are ``ranks``, ``method``, ``norm``, ``layers``, ``skip`` and ``overrides``.
        data: Batches to calibrate with where a plan comes without ``stats``.
        progress: True for lines in the log, or a function that is called with a
            :class:`~tensigma.pipeline.CompressionProgress` after each layer (and, while calibrating, with a
            :class:`~tensigma.calibration.Progress` after each batch, while planning with a
            :class:`~tensigma.planning.PlanningProgress`).
        cache: A folder of solutions. What is found there is not solved again, so a killed run resumes.
        workers: How many small layers are solved side by side; as many as torch has threads by default.

    Under ``torchrun`` all processes call this with the same arguments; each solves its share, all return the same.

    >>> import torch
    >>> import tensigma as ts
    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(32, 10))
    >>> small, report = ts.compress(model, [torch.randn(8, 3, 5, 5)], budget=ts.Params(0.5))
    >>> report.after.params <= 0.5 * report.before.params, {type(layer).__name__ for layer in small[2]}
    (True, {'Conv2d'})
    """
    small = copy.deepcopy(model)
    planning = {"method": method, "norm": norm, "layers": layers, "skip": skip, "overrides": overrides}
    report = compress_(
        small,
        plan_or_batches,
        stats,
        budget=budget,
        ranks=ranks,
        data=data,
        progress=progress,
        cache=cache,
        workers=workers,
        **planning,  # type: ignore[arg-type]
    )
    return small, report


def compress_(
    model: nn.Module,
    plan_or_batches: Any,
    stats: Calibration | None = None,
    *,
    budget: Budget | None = None,
    ranks: RankRule | None = None,
    method: str = "auto",
    norm: str = "centred",
    layers: str | Sequence[str] = "all",
    skip: str | Sequence[str] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    data: Any = None,
    progress: bool | Callable[[Any], None] = False,
    cache: str | os.PathLike[str] | None = None,
    workers: int | None = None,
) -> Report:
    """:func:`compress` in place: layers of ``model`` itself are replaced, all at the end or, after an error, none."""
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
        stats = _stats_for(carried, model, stats, data, progress)
    else:
        if (budget is None) == (ranks is None):
            raise InputError(
                "batches came instead of a plan, so budget= (such as Params(0.5)) or ranks= (such as VBMF(0.5)) is "
                "needed, and only one of them"
            )
        if stats is None:
            stats = calibrate(model, plan_or_batches, fisher=norm_of(norm).fisher, progress=progress)
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
            progress=progress,
        )
    modules = {layer.name: layer.module for layer in find_layers(model)}
    jobs = [Job(entry, modules[entry.name], _layer_stats(entry, stats)) for entry in carried.compressed]
    before = size_of(model)
    solved = run_shared(jobs, cache=None if cache is None else Cache(cache), workers=workers, report=reporter(progress))
    rows = [_row(entry, modules[entry.name], solved.get(entry.name)) for entry in carried.values()]
    replace_(model, {name: solution.modules for name, (solution, _) in solved.items()})
    macs = (carried.before.macs, carried.after.macs) if carried.before.macs else (None, None)
    return Report(
        layers=tuple(rows),
        before=replace(before, macs=macs[0]),
        after=replace(size_of(model), macs=macs[1]),
        seconds=time.perf_counter() - start,
        library=version("tensigma"),
        front=front_data(carried),
        spectra=spectra_data(carried, modules, stats),
    )


def _stats_for(
    carried: Plan, model: nn.Module, stats: Calibration | None, data: Any, progress: Any
) -> Calibration | None:
    needy = [entry.norm for entry in carried.compressed if entry.norm.needs_stats]
    if stats is None and needy:
        if data is None:
            raise InputError(
                f"the plan's norm {needy[0].name!r} needs stats= (from tensigma.calibrate) or data= (batches to "
                "calibrate with)"
            )
        fisher = next((norm.fisher for norm in needy if norm.fisher), None)
        stats = calibrate(model, data, fisher=fisher, progress=progress)
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

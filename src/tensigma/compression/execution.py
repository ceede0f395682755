"""Carrying out a plan."""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, Literal

from torch import nn

from tensigma.calibration import Calibration, calibrate, parse_bytes
from tensigma.compression.batchnorm import reestimate_bn_
from tensigma.compression.refinement import WITHOUT_REFINEMENT, Refine, blocks_around, refine_
from tensigma.compression.reports import LayerReport, PageData, Report
from tensigma.compression.sequential import MEMORY, fit_in_sequence
from tensigma.errors import InputError, PlanWarning
from tensigma.evaluation import is_slower, size_of, speed_in_words, speed_note
from tensigma.layers import compressible, replace_
from tensigma.planning import (
    Budget,
    CompressedEntry,
    DenseEntry,
    Drop,
    Plan,
    Recipe,
    front_data,
    plan_prepared,
    prepare,
    spectra_data,
)
from tensigma.running import (
    Batches,
    Key,
    Wanted,
    Wish,
    all_notes,
    check_gradients,
    copied,
    is_one_shot,
    not_ended,
    rank_and_size,
    reporter,
    share_of,
    together,
)
from tensigma.solving import Solution, Solutions, folded_copy, folded_norms, jobs_for, run_shared

# Under "auto" sequential fitting takes as many samples as these multiply-adds allow, within limits: fewer tell too
# little, and more gain nothing. A ResNet-56 at 28 times fewer bytes, agreement on other images: 96.3 from 1,000
# samples, 97.1 from 2,000 and from 6,000. In one pass a sample costs about as much as this many forward passes, moments
# included; networks that do not allow it run once per layer.
_AUTO_MACS, _AUTO_FEWEST, _AUTO_MOST = 20e12, 128, 2_000
_FORWARDS_IN_ONE_PASS = 5
_TIMED_SAMPLES = 16


def compress(
    model: nn.Module,
    plan_or_batches: Any,
    stats: Calibration | None = None,
    *,
    budget: Budget | None = None,
    recipe: Recipe | None = None,
    data: Any = None,
    sequential: bool | Literal["auto"] = "auto",
    refine: int | Refine | None = None,
    reestimate_bn: bool = False,
    speed: bool = False,
    input: Key = None,
    answers: Wish = None,
    check: bool = True,
    progress: Wanted = False,
    cache: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    memory: int | str | None = None,
) -> tuple[nn.Module, Report]:
    """A smaller copy of ``model``, made of plain layers, and a report of what was done. ``model`` is not changed.

    A :class:`~tensigma.Plan` is carried out. With batches and a ``budget`` (or a ``recipe``) the model is calibrated on
    them, planned and compressed in one call.

    Args:
        model: Any module.
        plan_or_batches: A plan, or batches as :func:`tensigma.calibrate` takes them.
        stats: Statistics from :func:`tensigma.calibrate`; not needed if all norms of the plan are ``"frobenius"``.
        budget: For the one-call form: what may remain, as :func:`tensigma.plan` takes it.
        recipe: Instead of ``budget``, everything that decides a plan: ranks by a rule, method, norm, layers and so on.
        data: Batches for calibration if ``stats`` is missing, and for the three options below; labels are not read. In
            the one-call form the batches serve by default. Under ``Drop`` they are instead the held-out batches that
            the search runs on, by default every fifth of the batches, from the second on; it may read their labels.
        sequential: Fit each layer on its inputs in the network compressed so far, towards the outputs of the original.
            Both networks run over the data once, or once per layer if some layer is called several times or not always
            in the same order. ``"auto"`` does so, on up to 2,000 samples, if ``data`` can be read again and the norm is
            ``"centred"`` or ``"sigma"``; not for a plan made by ``Drop``, whose search measured layers fitted
            independently.
        refine: Then train the small model to answer like the original, without labels: the number of samples to pass
            through it, or a :class:`~tensigma.Refine`. Weights of few bits are trained on their grids.
        reestimate_bn: Then re-estimate the statistics of BatchNorm layers on ``data``.
        speed: Then time both models in PyTorch on one thread, for about a second, on the first samples of ``data``:
            the report has a note of it, and a :class:`~tensigma.errors.PlanWarning` says if the smaller is the slower.
            Not timed: models that take more than a quarter of a second for one sample, and those not on a CPU.
        input: The key or position of the model's input in a batch; several in a tuple are passed together.
        answers: What the model answers, as :class:`~tensigma.Recipe` describes it; with a recipe, that of the recipe.
        check: Refuse statistics and plans that were made for other weights than those of ``model``.
        progress: True for lines in the log, or a function that is called with a
            :class:`~tensigma.solving.CompressionProgress` after each layer, while refining with a
            :class:`~tensigma.compression.RefinementProgress`, and with what calibration and planning report.
        cache: A folder for solutions, for statistics that are gathered here and, in the one-call form, for curves,
            effects and trials of planning. What is found there is not computed again, so the same call resumes a killed
            run.
        workers: How many small layers are solved in parallel; by default, the number of torch threads.
        memory: What calibration may take for its sums, and what sequential fitting may take for the activations of its
            halted passes, in bytes or as text such as ``"4GB"``. Calibration then reads the data in several passes if
            need be, and sequential fitting uses fewer samples. By default calibration is not limited and sequential
            fitting takes up to 1.25 GB.

    Fewer parameters, multiply-adds and bytes may take longer: without ``speed`` the report says nothing about time.

    Under ``torchrun`` all processes call this with the same arguments, but for the data, of which each has its own
    share; all return the same model. Layers that are fitted independently are divided among the processes.

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
    limit = None if memory is None else parse_bytes(memory)
    data = not_ended(data, "data")
    batches = None if isinstance(plan_or_batches, Plan) else plan_or_batches
    # Before calibration and planning, which may take long.
    if refine is not None:
        check_gradients(model, "refinement", WITHOUT_REFINEMENT)
    searches = isinstance(budget if recipe is None else recipe.budget, Drop)
    _check_data(
        # As in _planned: batches that a search was measured on are not fitted on.
        batches if data is None or (searches and batches is not None) else data,
        sequential=sequential,
        refine=refine,
        reestimate_bn=reestimate_bn,
        speed=speed,
    )
    if isinstance(plan_or_batches, Plan):
        if budget is not None or recipe is not None:
            raise InputError(
                "a plan decides all that {budget} and {recipe} would; pass batches instead of a plan",
                parameters=("budget", "recipe"),
            )
        plan, fit_data = plan_or_batches, data
        together(lambda: _check_model(plan, stats, model, weights=check))
        stats = _stats_for(plan, model, stats, data, input=input, memory=limit, progress=progress, cache=cache)
    else:
        plan, stats, fit_data = _planned(
            model,
            _recipe_of(budget, recipe, answers),
            stats=stats,
            batches=plan_or_batches,
            data=data,
            input=input,
            check=check,
            progress=progress,
            memory=limit,
            workers=workers,
            cache=cache,
        )
    # The same function, which is what is approximated from here on.
    subject = folded_copy(model, plan.folding)
    in_sequence = _in_sequence(plan, fit_data, sequential)
    solutions = plan.solutions if cache is None else plan.solutions.on_disk(cache)
    report = reporter(progress)
    notes: dict[str, Any] = {"sequential": in_sequence}
    if in_sequence:
        inputs, fewer = (
            Batches(fit_data, input=input, max_samples=share_of(samples) if sequential == "auto" else None, name="data")
            for samples in (
                _auto_samples(plan, passes=_FORWARDS_IN_ONE_PASS),
                _auto_samples(plan, passes=len(plan.compressed)),
            )
        )
        fitted = fit_in_sequence(
            subject, plan, inputs, fewer=fewer, stats=stats, solutions=solutions, memory=limit or MEMORY, report=report
        )
        solved = dict(fitted.solutions)
        notes["sequential_samples"] = fitted.samples
        if fitted.first_samples < fitted.samples:
            notes["sequential_first_samples"] = fitted.first_samples
    else:
        jobs = jobs_for(subject, plan.treatments, stats)
        solved = run_shared(jobs, solutions=solutions, keep=False, workers=workers, report=report)
    small = copied(subject, shared=solved)
    replace_(small, {name: solution.modules for name, (solution, _) in solved.items()})
    if plan.folding.layers:
        notes["folded"] = len(plan.folding.layers)
    if "weighing" in plan.notes:
        notes["weighing"] = plan.notes["weighing"]
    compared = plan.compared
    if refine is not None:
        blocks = blocks_around(model, list(solved))
        notes["refinement"] = refine_(
            small,
            model,
            fit_data,
            Refine.of(refine),
            blocks=blocks,
            input=input,
            answers=answers if recipe is None else recipe.answers,
            progress=progress,
        )
        compared = compared or notes["refinement"]["answers"]
    if compared:
        notes["compared"] = compared
    if reestimate_bn:
        notes["reestimated_bn"] = reestimate_bn_(small, fit_data, input=input)
    if speed:
        notes.update(_timed(model, small, fit_data, input))
    return small, _report(model, subject, small, plan, solved, stats, notes, time.perf_counter() - start)


def compress_(model: nn.Module, plan_or_batches: Any, stats: Calibration | None = None, **keywords: Any) -> Report:
    """:func:`compress` in place, with the same keywords. After an error ``model`` is unchanged.

    >>> import torch
    >>> import tensigma as ts
    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3))
    >>> ts.compress_(model, ts.plan(model, ranks=ts.Ranks({"*": 4}), norm="frobenius")).rate > 1, len(model[2])
    (True, 3)
    """
    small, report = compress(model, plan_or_batches, stats, **keywords)
    if keywords.get("refine") is not None:
        # Spectra are those of the original, and refining changes the layers that stay dense too.
        _ = report.page
    changed = {layer.name for layer in report.compressed} | set(folded_norms(small))
    for name, layer in compressible(model):
        # A BatchNorm gave its shift to a layer that is otherwise as it was.
        if name not in changed and layer.bias is None and small.get_submodule(name).bias is not None:
            changed.add(name)
    replace_(model, {name: small.get_submodule(name) for name in changed})
    model.load_state_dict(small.state_dict())
    return report


def _recipe_of(budget: Budget | None, recipe: Recipe | None, answers: Wish) -> Recipe:
    if recipe is not None and answers is not None:
        raise InputError("{recipe} decides {answers} too; give it in the recipe", parameters=("recipe", "answers"))
    if (budget is None) == (recipe is None):
        raise InputError(
            "got batches instead of a plan, so {budget} (such as Params(0.5)) or {recipe} (such as "
            "Recipe(ranks=VBMF(0.5))) is needed, and only one of them",
            parameters=("budget", "recipe"),
        )
    return Recipe(budget=budget, answers=answers) if recipe is None else recipe


def _planned(
    model: nn.Module,
    recipe: Recipe,
    *,
    stats: Calibration | None,
    batches: Any,
    data: Any,
    input: Key,
    check: bool,
    progress: Wanted,
    memory: int | None,
    workers: int | None,
    cache: str | os.PathLike[str] | None,
) -> tuple[Plan, Calibration | None, Any]:
    """A plan, the statistics it was made with, and the batches to fit layers on."""
    prepared = prepare(
        model,
        recipe,
        stats=stats,
        batches=batches,
        trial_data=data,
        input=input,
        progress=progress,
        check=check,
        gather=partial(calibrate, memory=memory, cache=cache),
    )
    solutions = None if cache is None else Solutions(cache)
    plan = plan_prepared(model, recipe, prepared, input=input, progress=progress, solutions=solutions, workers=workers)
    # Batches that a search was measured on must not influence the model.
    fit_data = data if data is not None and not isinstance(recipe.budget, Drop) else prepared.fit_data
    return plan, prepared.stats, fit_data


def _check_model(plan: Plan, stats: Calibration | None, model: nn.Module, *, weights: bool) -> None:
    plan.check_model(model, weights=weights)
    if stats is not None:
        stats.check_model(model, weights=weights)


def _stats_for(
    plan: Plan,
    model: nn.Module,
    stats: Calibration | None,
    data: Any,
    *,
    input: Key,
    memory: int | None,
    progress: Wanted,
    cache: str | os.PathLike[str] | None,
) -> Calibration | None:
    """The statistics that the norms of a plan need, gathered now if they were not passed."""
    norms = [entry.norm for entry in plan.compressed if entry.norm.needs_stats]
    if stats is None and norms:
        if data is None:
            raise InputError(
                f"the plan's norm {norms[0].name!r} needs {{stats}} (from tensigma.calibrate) or {{data}} (batches to "
                "calibrate with)",
                parameters=("stats", "data"),
            )
        fisher = next((norm.fisher for norm in norms if norm.fisher), None)
        stats = calibrate(model, data, fisher=fisher, input=input, memory=memory, progress=progress, cache=cache)
    return stats


def _timed(model: nn.Module, small: nn.Module, data: Any, input: Key) -> dict[str, Any]:
    """Times of both models as a note, with a warning if the small one is slower; nothing if they are not timed."""
    first = next(iter(Batches(data, input=input, max_samples=_TIMED_SAMPLES, name="data")))
    note = speed_note(model, small, first.inputs)
    if note is None:
        return {}
    if is_slower(note):
        warnings.warn(
            f"the compressed model is slower than the original: {speed_in_words(note)}; Latency(0.8) is a budget of "
            "the time on this machine, and ONNX Runtime makes more of small layers",
            PlanWarning,
            stacklevel=3,
        )
    return {"speed": note}


def _check_data(data: Any, *, sequential: Any, refine: Any, reestimate_bn: bool, speed: bool) -> None:
    if sequential not in (True, False, "auto"):
        raise InputError(f"sequential={sequential!r} is unknown; choose True, False or 'auto'")
    switches = {
        "sequential=True": sequential is True,
        "refine=": refine is not None,
        "reestimate_bn=True": reestimate_bn,
        "speed=True": speed,
    }
    option = next((option for option, is_on in switches.items() if is_on), None)
    if option is None:
        return
    name = option.partition("=")[0]
    if data is None:
        raise InputError(f"{{{name}}} needs {{data}} (batches without labels)", parameters=(option, "data"))
    Batches(data, name="data").check_rereadable(option)
    alone = next((option for option in ("refine=", "reestimate_bn=True", "speed=True") if switches[option]), None)
    if rank_and_size()[1] > 1 and alone is not None:
        name, option = alone.partition("=")[0], alone
        raise InputError(f"{{{name}}} works only in one process; run it without torchrun", parameters=(option,))


def _in_sequence(plan: Plan, data: Any, sequential: bool | Literal["auto"]) -> bool:
    """Whether layers are fitted one after the other."""
    unfit = [entry.norm.name for entry in plan.compressed if not entry.norm.needs_stats or entry.norm.weighs_entries]
    if sequential is True and unfit:
        raise InputError(
            "{sequential} needs a metric of the inputs, which {norm} does not have",
            parameters=("sequential=True", f"norm={unfit[0]!r}"),
        )
    if sequential == "auto":
        # A search measured layers that were fitted independently, so its result holds only for those.
        if "drop" in plan.notes:
            return False
        # All processes do the same, also if one of them has no data.
        return all(all_notes(data is not None and not is_one_shot(data) and not unfit))
    return sequential


def _auto_samples(plan: Plan, *, passes: int) -> int:
    """How many samples sequential fitting takes under ``"auto"`` if each runs ``passes`` times through the model."""
    return min(_AUTO_MOST, max(_AUTO_FEWEST, int(_AUTO_MACS / max(plan.before.macs * passes, 1))))


def _report(
    model: nn.Module,
    subject: nn.Module,
    small: nn.Module,
    plan: Plan,
    solved: dict[str, tuple[Solution, bool]],
    stats: Calibration | None,
    notes: dict[str, Any],
    seconds: float,
) -> Report:
    modules, folded = (
        {entry.name: network.get_submodule(entry.name) for entry in plan.values()} for network in (model, subject)
    )
    macs = (plan.before.macs, plan.after.macs) if plan.before.macs else (None, None)

    def page_data() -> PageData:
        return PageData(front=front_data(plan), spectra=spectra_data(plan, folded, stats))

    return Report(
        layers=tuple(_row(e, modules[e.name], folded[e.name], solved.get(e.name)) for e in plan.values()),
        before=replace(size_of(model), macs=macs[0]),
        after=replace(size_of(small), macs=macs[1]),
        seconds=seconds,
        library=version("tensigma"),
        notes=notes,
        page_data=page_data,
    )


def _row(
    entry: DenseEntry | CompressedEntry, module: nn.Module, folded: nn.Module, solved: tuple[Solution, bool] | None
) -> LayerReport:
    sized = entry.input_size is not None
    before, now = (replace(size_of(m), macs=entry.before.macs if sized else None) for m in (module, folded))
    if solved is None or isinstance(entry, DenseEntry):
        return LayerReport(
            name=entry.name, method="dense", ranks=None, norm=None, before=before, after=now, reason=entry.reason
        )
    solution, cached = solved
    after = size_of(solution.modules)  # in the precision of the layer that they have replaced
    return LayerReport(
        name=entry.name,
        method=entry.method.name,
        ranks=entry.ranks,
        norm=entry.norm.name,
        before=before,
        bits=entry.bits,
        after=replace(after, macs=entry.after.macs if sized else None),
        error=solution.error,
        frobenius_error=solution.frobenius_error,
        converged=solution.converged,
        seconds=solution.seconds,
        cached=cached,
    )

"""Preparing a model for a recipe: its statistics, and which data is used for what.

Planning and compressing both call :func:`prepare`, so that they decide alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from tensigma.calibration import Calibration, calibrate
from tensigma.errors import InputError
from tensigma.layers import find_layers
from tensigma.planning.drop import Drop
from tensigma.planning.recipe import Recipe
from tensigma.running import Key, SetAside, Wanted


@dataclass(frozen=True)
class Prepared:
    """What a plan is made with."""

    stats: Calibration | None
    #: Batches on which plans are tried and effects measured; None if there are none.
    trial_data: Any
    #: Batches on which layers may be fitted; None if there are none.
    fit_data: Any


def prepare(
    model: nn.Module,
    recipe: Recipe,
    *,
    stats: Calibration | None = None,
    batches: Any = None,
    trial_data: Any = None,
    input: Key = None,
    progress: Wanted = False,
    check: bool = True,
    gather: Callable[..., Calibration] = calibrate,
) -> Prepared:
    """Statistics for ``recipe``, gathered on ``batches`` if ``stats`` is missing and some norm needs them.

    Plans are tried on ``trial_data``, or on ``batches`` without it; under ``Drop``, whose search needs batches that
    calibration has not seen, every fifth batch is then held out for it, from the second on. ``gather`` is called with
    the model, the batches and the keywords of :func:`tensigma.calibrate`. ``check=False`` accepts statistics of other
    weights.
    """
    layers = find_layers(model)
    if not layers:
        raise InputError(f"{type(model).__name__} has no convolution or Linear layer, so there is nothing to compress")
    recipe.check_names([layer.name for layer in layers])
    fit_data = batches
    if isinstance(recipe.budget, Drop) and trial_data is None:
        if batches is None or stats is not None:
            raise InputError(
                f"{recipe.budget!r} is searched on held-out batches that were not used for calibration and need no "
                "labels; pass them as {data}",
                parameters=("data",),
            )
        fit_data = SetAside(batches)
    norm = recipe.needs_stats
    if stats is None and norm is not None:
        if fit_data is None:
            raise InputError(
                "{norm} needs {stats} (from tensigma.calibrate) or {data} (batches to calibrate with); only the norm "
                "'frobenius' needs none",
                parameters=(f"norm={norm.name!r}", "stats", "data"),
            )
        stats = gather(model, fit_data, fisher=recipe.fisher, input=input, progress=progress)
    if stats is not None:
        stats.check_model(model, weights=check)
    if isinstance(fit_data, SetAside):
        trial_data = fit_data.held
    return Prepared(stats, batches if trial_data is None else trial_data, fit_data)

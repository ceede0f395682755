"""How much the answers of a model change by an error in one of its layers, measured.

A layer is put back with its weakest output directions left out, at a squared relative error e² near 0.05, all other
layers as they are; the divergence of the answers from the original's, divided by e², is the effect of that layer.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from tensigma.layers import replace_
from tensigma.planning.candidate import Candidate
from tensigma.planning.entry import Entry
from tensigma.planning.methods import METHODS
from tensigma.planning.probe import Probe
from tensigma.planning.progress import EffectProgress, Report
from tensigma.planning.solve import solve

#: Small enough that a layer is disturbed and not destroyed, large enough to stand out from rounding.
_ERROR2 = 0.05
# Effects further apart than this rest on a handful of samples more than on the layers.
_RANGE = 100.0


def measured_effects(
    model: nn.Module, layers: Sequence[Candidate], probe: Probe, *, report: Report = lambda state: None
) -> dict[str, float]:
    """Layer name → effect of its errors on the answers, with a geometric mean of 1; nothing where none was felt.

    Layers that cannot be disturbed so, because all their output directions but one are empty or the norm weighs single
    entries, have an effect of 1.
    """
    start = time.perf_counter()
    found: dict[str, float] = {}
    for done, layer in enumerate(layers, start=1):
        disturbed = _disturbed(layer)
        if disturbed is not None:
            other = copy.deepcopy(model)
            solution = solve(disturbed, model.get_submodule(layer.name), layer.stats)
            replace_(other, {layer.name: solution.modules})
            error = solution.error if layer.norm.needs_stats else solution.frobenius_error
            if error:
                found[layer.name] = probe.divergence(other) / error**2
        seconds = time.perf_counter() - start
        report(EffectProgress(layer=layer.name, done=done, total=len(layers), seconds=seconds))
    effects = normalised(found)
    return {layer.name: effects.get(layer.name, 1.0) for layer in layers} if effects else {}


def normalised(effects: Mapping[str, float]) -> dict[str, float]:
    """The same with a geometric mean of 1, none of them beyond a hundred times or below a hundredth of the median.

    >>> normalised({"a": 1.0, "b": 4.0})
    {'a': 0.5, 'b': 2.0}
    """
    sound = sorted(effect for effect in effects.values() if 0 < effect < math.inf)
    if not sound:
        return {}
    middle = sound[len(sound) // 2]
    kept = {name: min(max(effect, middle / _RANGE), middle * _RANGE) for name, effect in effects.items()}
    mean = math.exp(sum(map(math.log, kept.values())) / len(kept))
    return {name: effect / mean for name, effect in kept.items()}


def _disturbed(layer: Candidate) -> Entry | None:
    """The layer as an SVD of the rank whose error is nearest to what is wanted; None where no rank has an error."""
    svd = METHODS["svd"]
    if svd.why_not(layer.geometry, layer.norm) is not None:
        return None
    spectra = replace(layer, method=svd).spectra
    (most,) = svd.max_ranks(layer.geometry.kernel_shape)
    errors = {rank: spectra.svd_error(rank) ** 2 for rank in range(1, most)}
    # Directions that carry nothing leave rounding, which says nothing about the layer.
    errors = {rank: error2 for rank, error2 in errors.items() if error2 > 1e-6}
    if not errors:
        return None
    best = min(errors, key=lambda rank: abs(math.log(errors[rank] / _ERROR2)))
    return Entry(name=layer.name, geometry=layer.geometry, method=svd, norm=layer.norm, format=svd.format((best,)))

"""The factors of a layer on grids of few bits, one after the other, under the norm of the layer.

Each factor is rounded under what its errors do to the output of the whole layer. The next is then fitted again to what
the rounded ones before it leave of its input, towards what the layer should compute, and rounded in turn: what one
factor loses, the next makes up for as far as it can. A layer that keeps its kernel is a chain of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tensigma.layers import HALF, Geometry, Grid, set_grid_, stage_bits, to_kernels, to_weight
from tensigma.linalg import Metric, Rounding
from tensigma.solving.chains import Stage, StageProblem, composed
from tensigma.solving.shrinkage import WIDEST

#: In chains with depthwise stages, where outputs of a stage are far from orthogonal, stages with at most this many
#: weights are rounded with all weights in one problem. Elsewhere, and in larger ones, outputs are rounded apart.
_WHOLE = 1536
_LARGEST_HALF = 65504.0
#: How strongly a refitted factor is drawn towards what it was, relative to the mean energy of its inputs.
_RIDGE = 1e-4
# Far above the rounding of products in single precision, and far below what decides an integer.
_DAMPING = 1e-5


@dataclass(frozen=True, eq=False)
class RoundedStage:
    """A stage on a grid; ``scales`` has one row per output, and is None in half precision."""

    kernel: Tensor  # (groups, o, c, *taps)
    scales: Tensor | None  # (groups · o, 1)


def round_modules_(
    modules: nn.Sequential, geometry: Geometry, targets: Sequence[Tensor], metrics: Sequence[Metric], bits: int
) -> None:
    """Put the weights of ``modules``, which replace a layer of this geometry, on grids of ``bits`` bits.

    ``targets`` are the kernels that the layer should have, one for each of its groups, and ``metrics`` their metrics.
    Biases stay as they are.
    """
    stages = [Geometry.of(module) for module in modules]
    widths = [stage_bits(stage, bits) for stage in stages]
    kernels = [to_kernels(module.weight.detach(), stage) for module, stage in zip(modules, stages, strict=True)]  # type: ignore[operator]
    by_group = [kernel.unflatten(0, (geometry.groups, -1)) for kernel in kernels]
    chains = [
        rounded_chain([Stage(kernel[group]) for kernel in by_group], target, metric, widths)
        for group, (target, metric) in enumerate(zip(targets, metrics, strict=True))
    ]
    for place, (module, stage, width) in enumerate(zip(modules, stages, widths, strict=True)):
        parts = [chain[place] for chain in chains]
        module.weight = nn.Parameter(to_weight(torch.cat([part.kernel for part in parts]), stage).contiguous())
        scales = None if width == HALF else torch.cat([part.scales for part in parts if part.scales is not None])
        set_grid_(module, Grid(width, scales))


def rounding_error(weight: Tensor, kernels: Sequence[Tensor] | None, metric: Metric, bits: int) -> float:
    """The relative error of one kernel after rounding: of its factors, given the kernels of their stages as formats
    give them, or of the kernel itself.

    >>> weight = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    >>> errors = [rounding_error(weight, None, Metric.identity(6), bits) for bits in (3, 4, 8)]
    >>> errors == sorted(errors, reverse=True), errors[-1] < 0.01
    (True, True)
    """
    stages = [Stage(kernel) for kernel in ([weight[None]] if kernels is None else kernels)]
    chain = rounded_chain(stages, weight, metric, [bits] * len(stages))
    energy = metric.norm(weight).item()
    return _lost(chain, weight.float(), metric.to(weight.float())) / energy if energy > 0 else 0.0


def rounded_chain(stages: Sequence[Stage], target: Tensor, metric: Metric, bits: Sequence[int]) -> list[RoundedStage]:
    """The stages of one kernel on grids, each of ``bits`` bits, close to ``target`` under ``metric``.

    Never worse under the metric than with every stage rounded to the nearest integers on its own.
    """
    with torch.no_grad():
        balanced = [Stage(stage.kernel.float()) for stage in stages]
        target, metric = target.float(), metric.to(target.float())
        _balance_(balanced)
        nearest = [_nearest(stage, width) for stage, width in zip(balanced, bits, strict=True)]
        if metric.size > WIDEST:  # Σ is not written out, and feedback needs it
            return nearest
        fitted = _fitted(balanced, target, metric, bits)
        return min((fitted, nearest), key=lambda chain: _lost(chain, target, metric))


def _lost(chain: Sequence[RoundedStage], target: Tensor, metric: Metric) -> float:
    dense = composed([Stage(part.kernel) for part in chain])
    assert dense is not None
    return metric.norm(target - dense).item()


def _balance_(stages: list[Stage]) -> None:
    """Give the inputs of each stage weights of equal size, and the outputs before it the rest.

    Outputs have a scale of their own, so their size costs nothing; the inputs of an output share one, and small
    weights among large ones would be lost.
    """
    for place in range(len(stages) - 1, 0, -1):
        after, before = stages[place], stages[place - 1]
        if after.is_depthwise:
            continue
        sizes = after.kernel[0].transpose(0, 1).flatten(1).norm(dim=1)  # (c)
        sizes = torch.where(sizes > 0, sizes, torch.ones_like(sizes))
        ones = (1,) * len(after.taps)
        stages[place] = Stage(after.kernel / sizes.reshape(1, 1, -1, *ones))
        shape = (-1, 1, 1, *ones) if before.is_depthwise else (1, -1, 1, *ones)
        stages[place - 1] = Stage(before.kernel * sizes.reshape(shape))


def _fitted(stages: Sequence[Stage], target: Tensor, metric: Metric, bits: Sequence[int]) -> list[RoundedStage]:
    now = list(stages)
    coupled = any(stage.is_depthwise for stage in stages)
    rounded: list[RoundedStage] = []
    for place, width in enumerate(bits):
        problem = StageProblem(now, place, target, metric)
        small = problem.size <= _WHOLE
        separable = problem.n_later == 1 and not problem.stage.is_depthwise
        if place > 0 and (small or separable):
            problem.stage = Stage(problem.refitted(_RIDGE))
        part = _rounded_stage(problem, width, whole=small and coupled and not problem.is_last)
        rounded.append(part)
        now[place] = Stage(part.kernel)
    return rounded


def _rounded_stage(problem: StageProblem, bits: int, *, whole: bool) -> RoundedStage:
    """A stage rounded under its own problem: with ``whole``, errors of one output are made up for by others too."""
    kernel = problem.stage.kernel
    if bits == HALF:
        return _nearest(problem.stage, bits)
    width = kernel[0, 0].numel()
    if whole:
        rounding = Rounding(bits, group=width, half_scales=True)
        factors = rounding.fit(kernel.reshape(1, -1), _metric(problem.hessian())).factors
    elif problem.stage.is_depthwise:
        return _nearest(problem.stage, bits)
    else:
        rounding = Rounding(bits, half_scales=True)
        factors = rounding.fit(kernel.flatten(0, 1).flatten(1), _metric(problem.input_gram())).factors
    return _on_grid(kernel, factors.integers.reshape(-1, width), factors.scales.reshape(-1, 1), bits)


def _metric(gram: Tensor) -> Metric:
    """The metric of a gram that products of single precision have left slightly asymmetric, and not quite definite."""
    return Metric.from_gram((gram + gram.mT) / 2, damping=_DAMPING)


def _nearest(stage: Stage, bits: int) -> RoundedStage:
    kernel = stage.kernel
    if bits == HALF:
        return RoundedStage(kernel.clamp(-_LARGEST_HALF, _LARGEST_HALF).half().float(), None)
    rows = kernel.flatten(0, 1).flatten(1)
    factors = Rounding(bits, half_scales=True).nearest(rows)
    return _on_grid(kernel, factors.integers, factors.scales, bits)


def _on_grid(kernel: Tensor, integers: Tensor, scales: Tensor, bits: int) -> RoundedStage:
    # The grid itself computes the values, so that they lie on it bit for bit.
    return RoundedStage(Grid(bits, scales).values(integers, tuple(kernel.shape)), scales)

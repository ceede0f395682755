"""One layer, from its treatment to the modules that replace it."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from tensigma.calibration import LayerStats
from tensigma.layers import (
    Geometry,
    Grid,
    empty_modules,
    from_modules,
    grid_of,
    in_half,
    kernels_of,
    set_grid_,
    stage_bits,
    to_modules,
)
from tensigma.linalg import Factors, Metric
from tensigma.solving.metrics import gram_metrics, identity_metrics, means
from tensigma.solving.rounding import round_modules_
from tensigma.solving.shrinkage import shrunk
from tensigma.solving.treatment import Treatment

# Ends the names of scales among the tensors of a solution.
_SCALES = ".scales"


@dataclass(frozen=True, eq=False)
class Solution:
    """The modules of one layer and how good they are."""

    modules: nn.Sequential
    #: √(tr(ΔΣΔᵀ) ÷ tr(MΣMᵀ)), with Σ_c under the centred norm; None without statistics.
    error: float | None
    #: The same with the identity for Σ.
    frobenius_error: float
    #: Whether the solver stopped because it no longer improved.
    converged: bool
    seconds: float

    def facts(self) -> dict[str, Any]:
        """All but the modules, as plain data."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "modules"}

    def tensors(self) -> dict[str, Tensor]:
        """The weights of the modules by name, and the scales of those that lie on a grid of integers."""
        tensors = {key: tensor.detach().contiguous() for key, tensor in self.modules.state_dict().items()}
        for name, module in self.modules.named_children():
            grid = grid_of(module)
            if grid is not None and grid.scales is not None:
                tensors[name + _SCALES] = grid.scales
        return tensors

    @classmethod
    def rebuilt(cls, treatment: Treatment, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Solution:
        """A solution from :meth:`tensors` and :meth:`facts`."""
        bias = any(key.endswith(".bias") for key in tensors)
        modules = empty_modules(treatment.format, replace(treatment.geometry, bias=bias))
        weights = {key: tensor for key, tensor in tensors.items() if not key.endswith(_SCALES)}
        modules.load_state_dict(weights, assign=True)
        if treatment.bits is not None:
            for name, module in modules.named_children():
                bits = stage_bits(Geometry.of(module), treatment.bits)
                set_grid_(module, Grid(bits, tensors.get(name + _SCALES)))
        return cls(modules=modules, **facts)


def solve(
    treatment: Treatment, module: nn.Module, stats: LayerStats | None, start: nn.Sequential | None = None
) -> Solution:
    """Decompose the kernel of ``module`` as ``treatment`` says, and round the factors if it says so.

    ``start`` holds the modules of a similar problem in the same format, from which iterative solvers start.
    """
    begin = time.perf_counter()
    geometry, method = treatment.geometry, treatment.method
    kernels = kernels_of(module)
    targets = treatment.norm.targets(geometry, stats)
    with torch.no_grad():
        starts: Sequence[Factors | None] = [None] * len(kernels)
        if start is not None:
            starts = from_modules(start, treatment.format, geometry)
        fits = [
            method.fit(kernel, treatment.ranks, target, treatment.options, first)
            for kernel, target, first in zip(kernels, targets, starts, strict=True)
        ]
        factors: list[Factors] = [fit.factors for fit in fits]
        error, frobenius, bias = _judged(treatment, module, factors, stats)
        modules = to_modules(factors, geometry, bias)
    converged = all(fit.converged for fit in fits)
    solution = Solution(modules, error, frobenius, converged, time.perf_counter() - begin)
    return solution if treatment.bits is None else rounded(solution, treatment, module, stats)


def rounded(solution: Solution, treatment: Treatment, module: nn.Module, stats: LayerStats | None) -> Solution:
    """``solution``, the one of ``treatment`` without bits, with weights of as many bits as ``treatment`` says.

    The bias moves once more, by what rounding does to the mean, and is then one of half precision.
    """
    begin = time.perf_counter()
    geometry = treatment.geometry
    assert treatment.bits is not None
    with torch.no_grad():
        targets = treatment.norm.targets(geometry, stats)
        plain = identity_metrics(geometry)
        metrics = [
            target if isinstance(target, Metric) else other for target, other in zip(targets, plain, strict=True)
        ]
        if stats is not None:
            metrics = [shrunk(metric, geometry, stats) for metric in metrics]
        modules = copy.deepcopy(solution.modules)
        round_modules_(modules, geometry, kernels_of(module), metrics, treatment.bits)
        factors = from_modules(modules, treatment.format, geometry)
        error, frobenius, bias = _judged(treatment, module, factors, stats)
        if bias is not None:
            weight = modules[-1].weight
            assert isinstance(weight, Tensor)
            modules[-1].bias = nn.Parameter(in_half(bias.to(weight)))
    seconds = solution.seconds + time.perf_counter() - begin
    return Solution(modules, error, frobenius, solution.converged, seconds)


def _judged(
    treatment: Treatment, module: nn.Module, factors: Sequence[Factors], stats: LayerStats | None
) -> tuple[float | None, float, Tensor | None]:
    """The relative error of factors under the norm, if it is one of the outputs, and of the weights; and the bias."""
    geometry = treatment.geometry
    kernels = kernels_of(module)
    residuals = [kernel.to(f.to_dense()) - f.to_dense() for kernel, f in zip(kernels, factors, strict=True)]
    error = None
    if stats is not None:
        targets = treatment.norm.targets(geometry, stats)
        functional = [target.observed for target in targets if isinstance(target, Metric) and not target.is_identity]
        error = _relative(kernels, residuals, functional or gram_metrics(geometry, stats))
    frobenius = _relative(kernels, residuals, identity_metrics(geometry))
    return error, frobenius, _bias(treatment, module, residuals, stats)


def frobenius_error(treatment: Treatment, module: nn.Module, modules: nn.Sequential) -> float:
    """The relative error of the weights of ``modules``, which replace ``module``."""
    kernels = kernels_of(module)
    with torch.no_grad():
        factors = from_modules(modules, treatment.format, treatment.geometry)
        dense = [part.to_dense() for part in factors]
        residuals = [kernel.to(part) - part for kernel, part in zip(kernels, dense, strict=True)]
        return _relative(kernels, residuals, identity_metrics(treatment.geometry))


def _bias(
    treatment: Treatment, module: nn.Module, residuals: Sequence[Tensor], stats: LayerStats | None
) -> Tensor | None:
    """b̃ = b + (M − M̃) μ: the mean error moves into the bias."""
    bias = module.bias
    assert bias is None or isinstance(bias, Tensor)
    former = None if bias is None else bias.detach()
    if not treatment.norm.moves_bias:
        return former
    assert stats is not None
    groups = zip(residuals, means(treatment.geometry, stats), strict=True)
    # Float64: a mean far larger than the spread would leave its rounding in every output.
    shift = torch.cat([residual.flatten(1).double() @ mean.to(residual.device).double() for residual, mean in groups])
    return (shift if former is None else former.double() + shift).to(residuals[0].dtype)


def _relative(kernels: Sequence[Tensor], residuals: Sequence[Tensor], metrics: Sequence[Metric]) -> float:
    """The relative error over all groups of a layer."""
    lost = energy = 0.0
    for kernel, residual, metric in zip(kernels, residuals, metrics, strict=True):
        moved = metric.to(residual)
        lost += moved.norm(residual).item() ** 2
        energy += moved.norm(kernel.to(residual)).item() ** 2
    return math.sqrt(lost / energy) if energy > 0 else 0.0

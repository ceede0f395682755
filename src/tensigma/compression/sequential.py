"""Fitting layer by layer: each on what reaches it through the layers before, towards what the original layer says.

Let x̃ be the input of a layer in the network compressed so far, and y the output of the original layer in the original
network on the same sample. The dense layer that is best on x̃ is a ridge regression,

    M' = (Cov(y, x̃) + λM) (Cov(x̃) + λI)⁻¹,    b' = E[y] − M' E[x̃],

and that layer, with the moments of x̃, is what is decomposed. It makes up for errors of the layers before as far as any
layer can. λ pulls towards the weights that the layer has, which is what unexcited inputs keep.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tensigma.calibration import LayerStats, Moments, summable
from tensigma.errors import InputError
from tensigma.layers import Geometry, kernels_of, replace_, to_kernels, to_weight
from tensigma.planning import Plan
from tensigma.running import Batch, Batches, Listener, borrowed, device_of, run, safe_layout, silent
from tensigma.solving import CompressionProgress, Job, Solution, Solutions, Treatment, means

#: λ as a share of the mean variance of x̃, where rows abound.
RIDGE = 1e-3
#: With fewer rows for each column than this a regression would overfit, and λ grows with their lack.
_ENOUGH = 10
_RIDGE_OF_FEW = 0.3


def fit_in_sequence(
    model: nn.Module,
    plan: Plan,
    batches: Batches,
    *,
    stats: Mapping[str, LayerStats] | None = None,
    solutions: Solutions | None = None,
    report: Listener = silent,
) -> dict[str, tuple[Solution, bool]]:
    """Solutions of all compressed layers of ``plan``, found in the order in which ``model`` calls the layers.

    Both networks run over the data once for each layer, as far as that layer. ``model`` stays as it is. Layers that
    some batches call more often than others, or not at all, are fitted to ``stats`` alone, before all others.
    """
    batches.check_rereadable("sequential fitting (sequential=False does without)")
    small = copy.deepcopy(model)
    solutions = solutions or Solutions()
    solved: dict[str, tuple[Solution, bool]] = {}
    start = time.perf_counter()
    with borrowed(model), borrowed(small), torch.no_grad():
        calls = _calls(model, list(plan.treatments), batches)
        order = [*(name for name in plan.treatments if name not in calls), *calls]
        for name in order:
            treatment, target = plan.treatments[name], model.get_submodule(name)
            if name in calls:
                layer_stats, cross, output = _Pair(model, small, name, calls[name]).moments(batches)
                target = target_layer(treatment, target, layer_stats, cross, output)
            else:
                layer_stats = _stats_of(name, stats)
            solved[name] = Job(name, treatment, target, layer_stats).run(solutions, keep=False)
            # A copy, because replacing moves modules to the model's device and dtype.
            replace_(small, {name: copy.deepcopy(solved[name][0].modules)})
            small.eval()
            report(
                CompressionProgress(
                    layer=name,
                    done=len(solved),
                    total=len(order),
                    work=len(solved) / len(order),
                    seconds=time.perf_counter() - start,
                    error=solved[name][0].error,
                    cached=solved[name][1],
                )
            )
    return {name: solved[name] for name in plan.treatments}


def _stats_of(name: str, stats: Mapping[str, LayerStats] | None) -> LayerStats:
    if stats is None or name not in stats:
        raise InputError(
            f"{name}: not every batch calls this layer equally often, so it cannot be fitted in sequence, and there "
            "are no statistics of it; give {stats}, or sequential=False",
            parameters=("stats",),
        )
    return stats[name]


def target_layer(treatment: Treatment, layer: nn.Module, stats: LayerStats, cross: Tensor, output: Tensor) -> nn.Module:
    """The dense layer that is best on the inputs of ``stats``: ``cross`` is E[y ũᵀ] in the shape of the weight, without
    the bias of the layer in y, and ``output`` E[y].
    """
    geometry = treatment.geometry
    # For these the exact second moment of ũ is not at hand, so a regression would mix unlike things.
    if geometry.kind == "conv_transpose" or stats.rows is not None:
        return layer
    groups = geometry.groups
    centred = treatment.norm.moves_bias
    second = (stats.covariance if centred else stats.gram).double().reshape(groups, stats.d, stats.d)
    mean = means(geometry, stats).double().to(second.device)
    joint = torch.stack([part.flatten(1) for part in to_kernels(cross, geometry)]).double()
    if centred:
        joint = joint - output.double().reshape(groups, -1, 1) * mean[:, None, :]
    former = torch.stack([kernel.flatten(1) for kernel in kernels_of(layer)]).double()
    ridge = ridge_share(stats.count, stats.d) * second.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None].clamp_min(
        torch.finfo(former.dtype).tiny
    )
    eye = torch.eye(stats.d, dtype=second.dtype, device=second.device)
    best = torch.linalg.solve(second + ridge * eye, (joint + ridge * former).mT).mT
    target = copy.deepcopy(layer)
    shape = (groups, *kernels_of(layer)[0].shape)
    weight = layer.weight
    assert isinstance(weight, Tensor)
    target.weight = nn.Parameter(to_weight(best.reshape(shape).to(weight), geometry))
    if centred:
        shift = output.double() - (best @ mean[:, :, None]).flatten()
        bias = layer.bias
        if isinstance(bias, Tensor):
            shift = shift + bias.double()
        target.bias = nn.Parameter(shift.to(weight))
    return target


def ridge_share(n_rows: int, n_columns: int) -> float:
    """λ as a share of the mean variance of x̃.

    >>> ridge_share(100_000, 576), ridge_share(128, 128)
    (0.001, 0.3)
    """
    return RIDGE if n_rows >= _ENOUGH * n_columns else _RIDGE_OF_FEW * n_columns / n_rows


class _Reached(Exception):
    """The layer has been called; nothing behind it matters."""


class _Pair:
    """One layer in the original and in the network compressed so far."""

    def __init__(self, original: nn.Module, small: nn.Module, name: str, calls: int) -> None:
        self.original, self.small, self.name, self.calls = original, small, name, calls
        self.layer = original.get_submodule(name)
        self.geometry = Geometry.of(self.layer)

    def moments(self, batches: Batches) -> tuple[LayerStats, Tensor, Tensor]:
        """Moments of x̃; E[y ũᵀ] in the shape of the weight; E[y], both without the bias of the layer."""
        moments = Moments(self.geometry, name=self.name)
        cross: Tensor | float = 0.0
        output: Tensor | float = 0.0
        rows = samples = 0
        shapes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        for batch in batches:
            outputs = self._met(self.original, batch, lambda _, output: self._unbiased(output))
            inputs = self._met(self.small, batch, lambda input, _: input)
            if len(inputs) != len(outputs):
                raise InputError(
                    f"{self.name}: called {len(outputs)} times by the original and {len(inputs)} times by the "
                    "compressed network on the same batch; such networks need sequential=False"
                )
            samples += len(batch)
            for u, y in zip(map(summable, inputs), map(summable, outputs), strict=True):
                moments.update(u)
                axis = y.dim() - 1 - self.geometry.n_spatial
                first = int(u.dim() > self.geometry.n_spatial + 1)
                shapes = tuple(u.shape[first:]), tuple(y.shape[first:])
                output = output + y.double().sum([i for i in range(y.dim()) if i != axis])
                cross = cross + _products(self.layer, u, y).double()
                rows += y.numel() // y.shape[axis]
        stats = moments.finish().replace(samples=samples, input_shape=shapes[0], output_shape=shapes[1])
        assert isinstance(cross, Tensor)
        assert isinstance(output, Tensor)
        return stats, cross / rows, output / rows

    def _unbiased(self, output: Tensor) -> Tensor:
        bias = self.layer.bias
        if not isinstance(bias, Tensor):
            return output
        return output - bias.reshape(-1, *[1] * self.geometry.n_spatial)

    def _met(self, model: nn.Module, batch: Batch, keep: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        """What the layer meets in ``model``, one item for each call."""
        met: list[Tensor] = []

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
            kept = keep(args[0] if args else kwargs["input"], result)
            # What follows an earlier call may change its tensors in place before they are read.
            met.append(kept if self.calls == 1 else kept.clone())
            if len(met) == self.calls:
                raise _Reached

        handle = model.get_submodule(self.name).register_forward_hook(hook, with_kwargs=True)
        try:
            device = device_of(model)
            model(batch.inputs if device is None else batch.inputs.to(device))
        except _Reached:
            pass
        finally:
            handle.remove()
        return met


def _products(layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Σ y ũᵀ over samples and positions, in the shape of the weight: what a backward pass computes for the weight."""
    # Sums over all positions overflow half precision; and what inference mode has made takes part in no backward pass.
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, y = (tensor.to(dtype).clone() if tensor.is_inference() else tensor.to(dtype) for tensor in (x, y))
    parameters = {name: tensor.detach().to(x) for name, tensor in layer.named_parameters(recurse=False)}
    x, y, weight = safe_layout(layer, x, y, parameters["weight"])
    parameters["weight"] = weight.requires_grad_()
    with torch.enable_grad():
        (products,) = torch.autograd.grad(functional_call(layer, parameters, (x,)), parameters["weight"], y)
    return products


def _calls(model: nn.Module, names: list[str], batches: Batches) -> Mapping[str, int]:
    """How often every batch calls each layer, in the order of first calls; without those for which that varies."""
    counts: dict[str, int] = {}
    common: dict[str, int] | None = None

    def count(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counts[name] = counts.get(name, 0) + 1

        return hook

    handles = [model.get_submodule(name).register_forward_hook(count(name)) for name in names]
    try:
        for batch in batches:
            counts.clear()
            run(model, batch)
            common = dict(counts) if common is None else common
            common = {name: calls for name, calls in common.items() if counts.get(name) == calls}
    finally:
        for handle in handles:
            handle.remove()
    return common or {}

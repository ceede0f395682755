"""The dense layer that is best on new inputs, from the moments of two networks.

Let x̃ be the input of a layer in the network compressed so far, and y the output of the original layer in the original
network on the same sample. The dense layer that is best on x̃ is a ridge regression,

    M' = (Cov(y, x̃) + λM) (Cov(x̃) + λI)⁻¹,    b' = E[y] − M' E[x̃].

λ pulls towards the original weights, which inputs without variance keep.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tensigma.calibration import LayerStats, Moments, summable
from tensigma.compression.pooling import pooled
from tensigma.layers import Geometry, kernels_of, to_kernels, to_weight
from tensigma.running import safe_layout, together
from tensigma.solving import Treatment, means

#: λ as a share of the mean variance of x̃, given enough rows.
RIDGE = 1e-3
#: With fewer rows per column than this a regression would overfit, so λ grows as rows become fewer.
_ENOUGH = 10
_RIDGE_OF_FEW = 0.3

#: Inputs in the small network and outputs of the original, one of each per call of a layer, and the number of samples.
Activations = tuple[Sequence[Tensor], Sequence[Tensor], int]


def target_layer(treatment: Treatment, layer: nn.Module, stats: LayerStats, cross: Tensor, output: Tensor) -> nn.Module:
    """The dense layer that is best on the inputs of ``stats``: ``cross`` is E[y ũᵀ] in the shape of the weight, without
    the bias of the layer in y, and ``output`` E[y].
    """
    geometry = treatment.geometry
    # For these the exact second moment of ũ is not known, so a regression would mix moments that do not match.
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
    best = ridge_regression(second, joint, former, ridge_share(stats.count, stats.d), mean, stats.dtype)
    target = copy.deepcopy(layer)
    shape = (groups, *kernels_of(layer)[0].shape)
    weight = layer.weight
    assert isinstance(weight, Tensor)
    fitted = to_weight(best.reshape(shape).to(weight), geometry)
    if not fitted.isfinite().all():
        # Inputs so small that nothing can be learnt from them, as behind layers that have never been trained.
        return layer
    target.weight = nn.Parameter(fitted)
    if centred:
        shift = output.double() - (best @ mean[:, :, None]).flatten()
        bias = layer.bias
        if isinstance(bias, Tensor):
            shift = shift + bias.double()
        target.bias = nn.Parameter(shift.to(weight))
    return target


def ridge_regression(
    second: Tensor, joint: Tensor, former: Tensor, share: float, mean: Tensor, dtype: torch.dtype
) -> Tensor:
    """The weights best on inputs with the moments ``second`` and ``mean``, (groups, t, d), drawn towards ``former``.

    Inputs that vary by no more than the rounding of ``dtype``, in which they were gathered, tell nothing: a constant
    input, a dead layer before it, an offset far larger than the spread. There ``former`` stays.
    """
    variance = second.diagonal(dim1=-2, dim2=-1).mean(-1)
    rounding = torch.finfo(dtype).eps * (variance + mean.square().mean(-1))
    tells = variance > rounding.clamp_min(torch.finfo(torch.float64).tiny)
    # Relative to the variance, so that tiny and huge inputs stay within the range of the numbers. In place, because the
    # moments of wide layers are large.
    scale = torch.where(tells, variance, 1.0)[:, None, None]
    ridged, aim = second / scale, joint / scale
    ridged[~tells], aim[~tells] = 0.0, 0.0
    ridged.diagonal(dim1=-2, dim2=-1).add_(share)
    aim += share * former
    lower, info = torch.linalg.cholesky_ex(ridged)
    # Rounding may leave moments slightly indefinite.
    best = torch.linalg.solve(ridged, aim.mT) if info.any() else torch.cholesky_solve(aim.mT, lower)
    return torch.where(tells[:, None, None], best.mT, former)


def ridge_share(n_rows: int, n_columns: int) -> float:
    """λ as a share of the mean variance of x̃.

    >>> ridge_share(100_000, 576), ridge_share(128, 128)
    (0.001, 0.3)
    """
    return RIDGE if n_rows >= _ENOUGH * n_columns else _RIDGE_OF_FEW * n_columns / n_rows


def pair_moments(name: str, layer: nn.Module, activations: Iterable[Activations]) -> tuple[LayerStats, Tensor, Tensor]:
    """Moments of x̃; E[y ũᵀ] in the shape of the weight; E[y], both without the bias of the layer.

    Under ``torchrun`` they are those of the activations of all processes.
    """
    stats, cross, output, rows = together(lambda: _pair_sums(name, layer, activations))
    return pooled(name, stats, cross, output, rows)


def _pair_sums(
    name: str, layer: nn.Module, activations: Iterable[Activations]
) -> tuple[LayerStats, Tensor, Tensor, int]:
    """Moments of x̃; Σ y ũᵀ and Σ y; the number of rows."""
    geometry = Geometry.of(layer)
    moments = Moments(geometry, name=name)
    cross: Tensor | float = 0.0
    output: Tensor | float = 0.0
    rows = samples = 0
    shapes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    for inputs, outputs, n_samples in activations:
        samples += n_samples
        for u, y in zip(map(summable, inputs), map(summable, outputs), strict=True):
            moments.update(u)
            axis = y.dim() - 1 - geometry.n_spatial
            first = int(u.dim() > geometry.n_spatial + 1)
            shapes = tuple(u.shape[first:]), tuple(y.shape[first:])
            output = output + y.double().sum([i for i in range(y.dim()) if i != axis])
            cross = cross + _products(layer, u, y).double()
            rows += y.numel() // y.shape[axis]
    stats = moments.finish().replace(samples=samples, input_shape=shapes[0], output_shape=shapes[1])
    assert isinstance(cross, Tensor)
    assert isinstance(output, Tensor)
    return stats, cross, output, rows


def _products(layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Σ y ũᵀ over samples and positions, in the shape of the weight: what a backward pass computes for the weight."""
    # Sums over all positions overflow half precision, and inference tensors cannot take part in a backward pass.
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, y = (tensor.to(dtype).clone() if tensor.is_inference() else tensor.to(dtype) for tensor in (x, y))
    geometry = Geometry.of(layer)
    if geometry.kind == "linear":
        return y.reshape(-1, geometry.out_channels).T @ x.reshape(-1, geometry.in_channels)
    parameters = {name: tensor.detach().to(x) for name, tensor in layer.named_parameters(recurse=False)}
    x, y, weight = safe_layout(layer, x, y, parameters["weight"])
    if geometry.padding_mode == "zeros" and all(before == after for before, after in geometry.pads):
        return _weight_gradient(geometry, x, y, weight)
    parameters["weight"] = weight.requires_grad_()
    with torch.enable_grad():
        (products,) = torch.autograd.grad(functional_call(layer, parameters, (x,)), parameters["weight"], y)
    return products


def _weight_gradient(geometry: Geometry, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a convolution's weight, without the forward pass that autograd would run first."""
    batched = x.dim() == geometry.n_spatial + 2
    _, products, _ = torch.ops.aten.convolution_backward(
        y if batched else y.unsqueeze(0),
        x if batched else x.unsqueeze(0),
        weight,
        None,
        geometry.stride,
        [before for before, _ in geometry.pads],
        geometry.dilation,
        geometry.kind == "conv_transpose",
        geometry.output_padding,
        geometry.groups,
        (False, True, False),
    )
    return products

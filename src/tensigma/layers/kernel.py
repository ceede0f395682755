"""Kernels in the orientation the solvers take, and why some layers cannot be compressed."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tensigma.errors import InputError, UnsupportedLayer
from tensigma.layers.format import Format
from tensigma.layers.geometry import TARGETS, Geometry

#: Where torch keeps the hooks of a module.
_HOOKS = {
    "_forward_hooks": "forward hooks",
    "_forward_pre_hooks": "forward pre-hooks",
    "_backward_hooks": "backward hooks",
    "_backward_pre_hooks": "backward pre-hooks",
    "_state_dict_hooks": "hooks on its state dict",
    "_state_dict_pre_hooks": "hooks on its state dict",
    "_load_state_dict_pre_hooks": "hooks on loading its state dict",
    "_load_state_dict_post_hooks": "hooks on loading its state dict",
}
#: The same for a parameter.
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
#: Methods that compute a layer; set on an object, they hide those of its class.
_METHODS = ("forward", "_conv_forward")


def hooks_of(module: nn.Module) -> str | None:
    """The kinds of hooks that a module has, and methods set on the object, in words; None if it has none.

    >>> layer = nn.Linear(2, 2)
    >>> handle = layer.register_forward_hook(print)
    >>> hooks_of(layer)
    'forward hooks'
    """
    kinds = dict.fromkeys(words for attribute, words in _HOOKS.items() if getattr(module, attribute, None))
    parameters = module.parameters(recurse=False)
    if any(getattr(parameter, attribute, None) for parameter in parameters for attribute in _PARAMETER_HOOKS):
        kinds["hooks on its parameters"] = None
    if any(method in vars(module) for method in _METHODS):
        kinds["methods set on the object"] = None
    return " and ".join(kinds) or None


def kernels_of(module: nn.Module) -> tuple[Tensor, ...]:
    """The kernels of the groups of a layer, each (t/groups, s/groups, *taps); one kernel if it is not grouped.

    >>> [tuple(kernel.shape) for kernel in kernels_of(nn.Conv1d(4, 6, 3, groups=2))]
    [(3, 2, 3), (3, 2, 3)]
    """
    return tuple(to_kernels(module.weight.detach(), Geometry.of(module)))  # type: ignore[operator]


def to_kernels(weight: Tensor, geometry: Geometry) -> Tensor:
    """A layer's weight as one kernel per group, (groups, t/groups, s/groups, *taps)."""
    grouped = weight.unflatten(0, (geometry.groups, -1))
    # PyTorch stores transposed weights input channels first.
    return grouped.transpose(1, 2) if geometry.kind == "conv_transpose" else grouped


def to_weight(kernels: Tensor, geometry: Geometry) -> Tensor:
    """The inverse of :func:`to_kernels`: one kernel per group as a layer stores them."""
    expected = (geometry.groups, *geometry.kernel_shape)
    if tuple(kernels.shape) != expected:
        raise InputError(f"got kernels of shape {tuple(kernels.shape)}; this layer takes {expected}")
    return (kernels.transpose(1, 2) if geometry.kind == "conv_transpose" else kernels).flatten(0, 1)


def why_not(module: nn.Module, format: Format | type[Format] | None = None) -> str | None:
    """Why a layer cannot be compressed (into ``format``, if given), or None if it can.

    Reasons that need the whole model, such as tied weights, come from :func:`tensigma.layers.find_layers`.

    >>> from tensigma.layers import CPFormat
    >>> why_not(nn.Conv2d(8, 8, 3, groups=2), CPFormat)
    "CP cannot carry groups=2; use method='tucker2' for it"
    >>> why_not(nn.Conv2d(8, 8, 3), CPFormat)
    """
    if parametrize.is_parametrized(module):
        names = ", ".join(module.parametrizations)  # type: ignore[arg-type]
        return f"{names} is computed by torch.nn.utils.parametrize; call remove_parametrizations on the layer first"
    try:
        geometry = Geometry.of(module)
    except UnsupportedLayer as error:
        base = next((target.__name__ for target in TARGETS if isinstance(module, target)), None)
        if base is None:
            return str(error)
        path = f"{type(module).__module__}.{type(module).__qualname__}"
        return f"{path} is a subclass of nn.{base} and may compute something else; it is left alone"
    # The older weight_norm, spectral_norm and pruning recompute the weight before every call.
    if module._parameters.get("weight") is None:
        return "weight is recomputed by a hook (weight_norm, spectral_norm or pruning); remove that first"
    hooks = hooks_of(module)
    if hooks:
        return f"it has {hooks}, which a replaced layer would lose; remove them first"
    weight = module.weight
    assert isinstance(weight, Tensor)
    if not weight.is_floating_point():
        return f"weight has dtype {weight.dtype}; only real floating-point weights can be decomposed"
    if min(weight.shape) == 0:
        return f"weight of shape {tuple(weight.shape)} is empty"
    return _extreme(weight) or (None if format is None else format.why_not(geometry))


def _extreme(weight: Tensor) -> str | None:
    """Why a weight cannot be decomposed for its size: squares of its entries, times those of its inputs, must be
    numbers. NaN and infinity are an error of the checkpoint, not a reason to leave a layer alone."""
    if weight.is_meta:
        return None
    low, high = (bound.item() for bound in weight.detach().aminmax())
    largest = max(abs(low), abs(high))
    limit = 1e100 if weight.dtype == torch.float64 else 1e12
    if largest == 0 or not math.isfinite(largest) or 1 / limit < largest < limit:
        return None
    return f"weight has entries up to {largest:.0e}, whose squares leave the range of numbers; it is left alone"

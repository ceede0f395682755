"""Layers of a model by name: find them, say which must stay and why, and replace others."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from tensigma.errors import InputError, UnsupportedLayer
from tensigma.layers.format import Format
from tensigma.layers.geometry import TARGETS, Geometry
from tensigma.layers.kernel import why_not

_NEVER_CALLED = (
    "nn.MultiheadAttention reads the weight of this layer and never calls it; only an attention that calls its "
    "projections, as those of timm and transformers do, can have them compressed"
)
_NOT_CALLED = (
    "nn.TransformerEncoderLayer reads the weight of this layer on PyTorch's fast path; to have it compressed, switch "
    "that off with torch.backends.mha.set_fastpath_enabled(False), here and wherever the model runs"
)


@dataclass(frozen=True)
class Layer:
    """A linear or convolutional layer found in a model."""

    name: str
    module: nn.Module = field(repr=False)
    #: None for subclasses, whose meaning is unknown.
    geometry: Geometry | None = field(repr=False)
    #: Why the layer must stay as it is, or None if it may be compressed.
    reason: str | None = None

    def why_not(self, format: Format | type[Format]) -> str | None:
        """Why the layer cannot take ``format``, or None if it can."""
        return self.reason or why_not(self.module, format)


def find_layers(model: nn.Module) -> list[Layer]:
    """All linear and convolutional layers of ``model`` in order of definition, each under its first name.

    >>> shared = nn.Linear(4, 4)
    >>> for layer in find_layers(nn.Sequential(nn.Conv1d(4, 4, 3), nn.ReLU(), shared, shared)):
    ...     print(layer)
    Layer(name='0', reason=None)
    Layer(name='2', reason='the same module is also reachable as 3')
    """
    names: dict[nn.Module, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names[module].append(name)
    owners: dict[torch.Tensor, list[str]] = defaultdict(list)
    for module, (name, *_) in names.items():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners[parameter].append(f"{name}.{key}" if name else key)
    layers = []
    for module, module_names in names.items():
        if isinstance(module, TARGETS):
            reason = _reason(model, module, module_names, owners)
            layers.append(Layer(module_names[0], module, _geometry(module), reason))
    return layers


def _geometry(module: nn.Module) -> Geometry | None:
    try:
        return Geometry.of(module)
    except UnsupportedLayer:
        return None


def _reason(
    model: nn.Module, module: nn.Module, names: list[str], owners: Mapping[torch.Tensor, list[str]]
) -> str | None:
    name, *others = names
    if module is model:
        return "the model itself is this layer and has no name to replace it by; wrap it in nn.Sequential"
    if others:
        return f"the same module is also reachable as {', '.join(others)}"
    parent = model.get_submodule(name.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention):
        return _NEVER_CALLED
    if isinstance(parent, nn.TransformerEncoderLayer) and torch.backends.mha.get_fastpath_enabled():
        return _NOT_CALLED
    reason = why_not(module)
    if reason is not None:
        return reason
    for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        tied = [owner for owner in owners[parameter] if owner != f"{name}.{key}"]
        if tied:
            return f"{key} is tied to {', '.join(tied)}"
    return None


def replace_(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Replace the layers of these names by ``modules``, in ``model`` itself.

    Each takes over from the layer it replaces: device, dtype, training mode, ``requires_grad`` and memory format.
    All names are checked before anything is changed.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval().requires_grad_(False)
    >>> replace_(model, {"0": nn.Sequential(nn.Linear(8, 2, bias=False), nn.Linear(2, 8))})
    >>> model[0].training, model[0][1].bias.requires_grad
    (False, False)
    """
    current = dict(model.named_modules(remove_duplicate=False))
    for name in modules:
        if not name:
            raise InputError("the model itself cannot be replaced by name; wrap it in nn.Sequential")
        if name not in current:
            close = difflib.get_close_matches(name, current) or list(current)[1:4]
            raise InputError(f"the model has no module {name!r}; similar names: {', '.join(close)}")
    for name, new in modules.items():
        parent_name, _, attribute = name.rpartition(".")
        _take_over_(new, current[name])
        # Not from `current`: an outer module may have been replaced a moment ago.
        setattr(model.get_submodule(parent_name), attribute, new)


def _take_over_(new: nn.Module, old: nn.Module) -> None:
    new.train(old.training)
    parameters = dict(old.named_parameters())
    like = parameters.get("weight", next(iter(parameters.values()), None))
    if like is None:
        return
    new.to(device=like.device, dtype=like.dtype if like.is_floating_point() else None)
    memory_format = memory_format_of(old)
    if memory_format is not None:
        new.to(memory_format=memory_format)  # type: ignore[call-overload]
    for name, parameter in new.named_parameters():
        # A frozen bias stays frozen; a bias that the layer gains follows the weight.
        source = parameters.get("bias", like) if name.endswith("bias") else like
        parameter.requires_grad_(source.requires_grad)


def memory_format_of(module: nn.Module) -> torch.memory_format | None:
    """The memory format that the weights of a layer, dense or compressed, ask for; None for the usual one.

    >>> memory_format_of(nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last))
    torch.channels_last
    """
    for weight in module.parameters():
        if weight.is_contiguous():
            continue
        for axes, wanted in ((4, torch.channels_last), (5, torch.channels_last_3d)):
            if weight.ndim == axes and weight.is_contiguous(memory_format=wanted):
                return wanted
    return None

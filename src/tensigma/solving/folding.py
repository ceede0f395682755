"""BatchNorm folded into the layers before it: the same function with fewer numbers to store.

In evaluation mode a BatchNorm scales and shifts each channel by fixed numbers. If it is all that reads the output of a
convolution or Linear layer, the layer can do both: its kernel and bias take them up. ``nn.Identity`` takes the place of
the BatchNorm, so that names stay and every forward method still works; it carries a note of what it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tensigma.calibration import Calibration
from tensigma.errors import InputError
from tensigma.layers import Geometry, find_layers, hooks_of, replace_, to_kernels, to_weight
from tensigma.running import copied

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_NOTE = "folded_norm"
_UNKNOWN = (
    "calibration has not seen a layer whose output it alone reads; statistics gathered by an earlier version do not say"
)


@dataclass(frozen=True)
class Folding:
    """Which BatchNorms are folded into which layers, and what that saves by itself.

    >>> Folding().layers, Folding(layers={"conv": "norm"}).norms
    ({}, ('norm',))
    """

    #: Layer → the BatchNorm that goes into it.
    layers: Mapping[str, str] = field(default_factory=dict)
    #: Parameters and bytes, buffers included, that the model then has less.
    params: int = 0
    bytes: int = 0
    #: BatchNorm → why it stays.
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def norms(self) -> tuple[str, ...]:
        """The BatchNorms that are folded."""
        return tuple(self.layers.values())

    def in_words(self, most: int = 3) -> list[str]:
        """What is folded, and what is not: each reason once, a few of them.

        >>> Folding(layers={"a": "b"}, left={"c": "it has hooks", "d": "it has hooks"}).in_words()
        ['BatchNorm is folded into 1 of the layers', 'BatchNorm c and 1 more are not folded: it has hooks']
        """
        lines = [f"BatchNorm is folded into {len(self.layers)} of the layers"] if self.layers else []
        names: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            names.setdefault(reason, []).append(name)
        for reason, (first, *others) in list(names.items())[:most]:
            who = f"{first} and {len(others)} more are" if others else f"{first} is"
            lines.append(f"BatchNorm {who} not folded: {reason}")
        return lines

    def check(self, model: nn.Module) -> None:
        """Refuse a model in which these cannot be folded."""
        twice = next((norm for norm in self.norms if self.norms.count(norm) > 1), None)
        if twice is not None:
            raise InputError(f"{twice} cannot be folded into two layers")
        layers = {layer.name: layer.module for layer in find_layers(model) if layer.reason is None}
        modules = dict(model.named_modules())
        for name, norm in self.layers.items():
            if name not in layers:
                raise InputError(f"{norm} cannot be folded into {name}: the model has no such layer that may change")
            reason = _why_not(layers[name], modules.get(norm))
            if reason is not None:
                raise InputError(f"{norm} cannot be folded into {name}: {reason}")


def foldable(model: nn.Module, stats: Calibration | None) -> Folding:
    """What can be folded, as far as calibration has seen how the model uses its BatchNorms.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4)).eval()
    >>> from tensigma.calibration import calibrate
    >>> folding = foldable(model, calibrate(model, [torch.randn(8, 3, 5, 5)]))
    >>> folding.layers, list(folding.left), folding.params, folding.bytes
    ({'0': '1'}, ['3'], 8, 72)
    """
    layers = {layer.name: layer for layer in find_layers(model)}
    followed = {} if stats is None else {norm: layer for layer, norm in stats.normalised_by.items()}
    pairs, left = {}, {}
    for name, norm in _norms(model):
        layer = layers.get(followed.get(name, ""))
        reason = _UNKNOWN if layer is None else layer.reason or _why_not(layer.module, norm)
        if layer is not None and stats is not None and layer.name in stats.read_elsewhere:
            reason = f"the model reads the weight or bias of {layer.name} besides calling it"
        if reason is None:
            assert layer is not None
            pairs[layer.name] = name
        else:
            left[name] = reason
    # In the order of the layers.
    pairs = {name: pairs[name] for name in layers if name in pairs}
    n_params = n_bytes = 0
    for layer_name, norm_name in pairs.items():
        layer_module, norm = layers[layer_name].module, model.get_submodule(norm_name)
        gained = norm.num_features if layer_module.bias is None else 0
        n_params += sum(parameter.numel() for parameter in norm.parameters()) - int(gained)
        tensors = (*norm.parameters(), *norm.buffers())
        n_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors) - 4 * int(gained)
    return Folding(pairs, n_params, n_bytes, left)


def folded_copy(model: nn.Module, folding: Folding) -> nn.Module:
    """A copy of ``model``, in evaluation the same function, with BatchNorms folded; ``model`` itself if none are.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    >>> model[1].running_var.fill_(4.0).sum().item()
    16.0
    >>> folded, x = folded_copy(model, Folding(layers={"0": "1"})), torch.randn(5, 3)
    >>> type(folded[1]).__name__, torch.allclose(folded(x), model(x), atol=1e-6)
    ('Identity', True)
    """
    if not folding.layers:
        return model
    folding.check(model)
    folded = copied(model)
    with torch.no_grad():
        for name, norm in folding.layers.items():
            _fold_(folded.get_submodule(name), folded.get_submodule(norm))
    remove_norms_(folded, folding.norms)
    return folded


def remove_norms_(model: nn.Module, names: Iterator[str] | tuple[str, ...]) -> None:
    """Put identities in place of BatchNorms that have been folded, with a note that they were."""
    for name in names:
        identity = nn.Identity()
        setattr(identity, _NOTE, True)
        replace_(model, {name: identity})


def folded_norms(model: nn.Module) -> list[str]:
    """The names of modules that were BatchNorms before they were folded.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Identity()).eval()
    >>> folded_norms(folded_copy(model, Folding(layers={"0": "1"})))
    ['1']
    """
    return [
        name for name, module in model.named_modules() if type(module) is nn.Identity and getattr(module, _NOTE, False)
    ]


def _norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, _NORMS):
            yield name, module


def _why_not(layer: nn.Module, norm: nn.Module | None) -> str | None:
    """Why a BatchNorm cannot go into a layer, whatever is known about who reads what."""
    if type(norm) not in _NORMS:
        return "it is no plain BatchNorm of torch.nn"
    assert isinstance(norm, _NORMS)
    if norm.running_mean is None or norm.running_var is None:
        return "it keeps no statistics, and scales by those of each batch"
    if hooks_of(norm):
        return f"it has {hooks_of(norm)}, which it would lose"
    geometry = Geometry.of(layer)
    if norm.num_features != geometry.out_channels:
        return f"it has {norm.num_features} channels, the layer {geometry.out_channels}"
    if any(parameter.dtype != torch.float32 for parameter in (*layer.parameters(), *norm.parameters())):
        return "its weights or those of the layer are not in float32"
    return None


def _fold_(layer: nn.Module, norm: nn.Module) -> None:
    assert isinstance(norm, _NORMS)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, nn.Parameter)
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.double()
    shift = -norm.running_mean.double() * scale
    if norm.bias is not None:
        shift = shift + norm.bias.double()
    if isinstance(bias, Tensor):
        shift = shift + bias.double() * scale
    geometry = Geometry.of(layer)
    kernels = to_kernels(weight.double(), geometry)
    by_output = scale.reshape(geometry.groups, -1, *[1] * (kernels.dim() - 2))
    scaled = to_weight(kernels * by_output, geometry).to(weight)
    layout = torch.empty_like(weight)  # of the same memory format
    layer.weight = nn.Parameter(layout.copy_(scaled), requires_grad=weight.requires_grad)
    layer.bias = nn.Parameter(shift.to(weight), requires_grad=weight.requires_grad)

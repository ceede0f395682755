"""Channels between factors made equally large, so that eight bits serve all of them.

INT8 gives the whole tensor between two layers one scale. Inside a factorised layer one linear layer follows another, so
channel r may be divided by c_r after the first and multiplied by c_r before the second: the same function, with ranges
of our choosing. Weights are quantised per output channel and do not mind the division.

Signs are free too. With the longer side of every channel turned upwards the tensor covers [−t, 1] instead of [−1, 1];
t is chosen to make the noise that rounding leaves behind the second layer smallest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tensigma.calibration.batches import input_of, iterate
from tensigma.calibration.guard import borrowed, device_of
from tensigma.errors import InputError
from tensigma.layers import Geometry
from tensigma.layers.kernel import to_kernels, to_weight
from tensigma.pipeline.recognise import find_compressed


def equalise(
    model: nn.Module,
    batches: Any,
    *,
    strength: float = 1.0,
    max_samples: int | None = 256,
    input: str | int | None = None,
) -> nn.Module:
    """A copy of ``model`` that computes the same, with all channels between the factors of a layer equally large.

    Args:
        model: A compressed model; layers that are not factorised stay as they are.
        batches: Inputs to measure the ranges on, as :func:`tensigma.calibrate` takes them.
        strength: 1 makes ranges equal, 0 leaves them; between, they are drawn together.
        max_samples: Inputs that are enough.
        input: The entry or position of the model's input in a batch.

    >>> import tensigma as ts
    >>> model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> small, _ = ts.compress(model, ts.plan(model, ranks=ts.Ranks({"0": 4}), norm="frobenius"))
    >>> x = torch.randn(8, 16)
    >>> equal = equalise(small, [x])
    >>> torch.allclose(equal(x), small(x), atol=1e-5)
    True
    >>> between = equal[0].reduce(x)
    >>> torch.allclose(between.amax(0), between.amax(), rtol=0.6)
    True
    """
    if not 0 <= strength <= 1:
        raise InputError(f"strength={strength} came; give a share between 0 and 1")
    equal = copy.deepcopy(model)
    chains = _chains(equal)
    if not chains or strength == 0:
        return equal
    ranges = _ranges(equal, chains, batches, max_samples, input)
    for chain in chains:
        for before, after in pairwise(chain):
            if before in ranges:
                scales = _scales(*ranges[before], _gains(after), strength)
                _scale_(before, outputs=1 / scales)
                _scale_(after, inputs=scales)
    return equal


def _chains(model: nn.Module) -> list[list[nn.Module]]:
    """The layers of every factorised layer that shares no parameter with another part of the model."""
    users: dict[Tensor, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[parameter] = users.get(parameter, 0) + 1
    found = [list(model.get_submodule(name).children()) for name in find_compressed(model)]
    return [chain for chain in found if all(users[own] == 1 for layer in chain for own in layer.parameters())]


def _ranges(
    model: nn.Module, chains: list[list[nn.Module]], batches: Any, max_samples: int | None, input: str | int | None
) -> dict[nn.Module, tuple[Tensor, Tensor]]:
    """How far every output channel reaches below and above 0, for all layers but the last of each chain."""
    found: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    samples = 0
    with torch.inference_mode(), borrowed(model), ExitStack() as stack:
        for chain in chains:
            for layer in chain[:-1]:
                stack.callback(layer.register_forward_hook(_watch(found)).remove)
        for index, batch in enumerate(iterate(batches)):
            x = input_of(batch, input, index)
            x = x if max_samples is None else x[: max_samples - samples]
            model(x.to(device_of(model) or x.device))
            samples += len(x)
            if max_samples is not None and samples >= max_samples:
                break
    if not samples:
        raise InputError("no batches: the iterable given as batches is empty")
    return found


def _watch(found: dict[nn.Module, tuple[Tensor, Tensor]]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(layer: nn.Module, args: Any, output: Any) -> None:
        axis = output.dim() - 1 if isinstance(layer, nn.Linear) else output.dim() - Geometry.of(layer).n_spatial - 1
        values = output.double().movedim(axis, 0).flatten(1)
        below, above = (-values.amin(1)).clamp_min(0), values.amax(1).clamp_min(0)
        if layer in found:
            below, above = torch.maximum(found[layer][0], below), torch.maximum(found[layer][1], above)
        found[layer] = below, above

    return hook


def _scales(below: Tensor, above: Tensor, gains: Tensor, strength: float) -> Tensor:
    """What to divide each channel by; 1 where it is silent, and of size 1 on (geometric) average."""
    longer, shorter = torch.maximum(below, above), torch.minimum(below, above)
    alive = (longer > 0) & longer.isfinite()
    if not alive.any():
        return torch.ones_like(longer)
    # Channels within [−t, 1]: a step is (1 + t) ÷ 255, and reaches the output as gain · scale.
    shares = torch.linspace(0.05, 1, 20, dtype=longer.dtype, device=longer.device)
    reach = torch.maximum(longer, shorter / shares[:, None])  # (t, r)
    noise = (1 + shares).square() * (gains.square() * reach.square())[:, alive].sum(1)
    best = torch.where(alive, reach[noise.argmin()], 1.0)
    sizes = torch.where(alive, strength * (best.log() - best[alive].log().mean()), 0.0).exp()
    return torch.where(below > above, -sizes, sizes)


def _gains(layer: nn.Module) -> Tensor:
    """The length of the kernel that each input channel of a layer meets."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    kernels = to_kernels(weight.detach(), Geometry.of(layer)).double()  # (g, t/g, s/g, *taps)
    return (
        kernels.flatten(3).square().sum((1, 3)).sqrt().flatten() if kernels.dim() > 3 else kernels.norm(dim=1).flatten()
    )


@torch.no_grad()
def _scale_(layer: nn.Module, *, outputs: Tensor | None = None, inputs: Tensor | None = None) -> None:
    """Multiply the kernel of a layer by a factor per output or per input channel, in place."""
    geometry = Geometry.of(layer)
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    kernels = to_kernels(weight, geometry).double()  # (g, t/g, s/g, *taps)
    taps = (1,) * (kernels.dim() - 3)
    if outputs is not None:
        kernels = kernels * outputs.double().reshape(geometry.groups, -1, 1, *taps)
        if isinstance(bias, Tensor):
            bias.copy_(bias.double() * outputs)
    if inputs is not None:
        kernels = kernels * inputs.double().reshape(geometry.groups, 1, -1, *taps)
    weight.copy_(to_weight(kernels, geometry))

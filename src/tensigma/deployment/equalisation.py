"""Rescale the channels between factors to similar ranges, so that eight bits suit all of them.

INT8 gives the whole tensor between two layers one scale. Inside a factorised layer one linear layer follows another, so
channel r may be divided by c_r after the first and multiplied by c_r before the second: the same function, with ranges
of our choosing. Weights of the first are quantised per output channel, so the division costs nothing.

Signs are free too: with the longer side of every channel turned upwards the tensor covers [−t, 1] instead of [−1, 1].
The gain on activations may be lost on the weights of the second layer, whose columns then differ in size. Hence c_r is
range_r^β, with t and β chosen to minimise the noise that both kinds of rounding leave in the output of the whole
factorised layer, each output channel measured relative to its own spread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tensigma.errors import InputError
from tensigma.layers import Geometry, find_compressed, to_kernels, to_weight
from tensigma.running import Batches, Key, borrowed, copied, run, safe_backward

#: Number of random mixtures to measure gains with.
_PROBES = 8
#: The error of a weight is the same at all positions, so later sums over positions do not average it out.
_COHERENCE = 4.0
#: How far tensors may reach below 0, as a share of how far above.
_SHARES = [step / 8 for step in range(1, 9)]


def equalise(
    model: nn.Module,
    batches: Any,
    *,
    strength: float | None = None,
    max_samples: int | None = 256,
    input: Key = None,
) -> nn.Module:
    """A copy of ``model`` that computes the same, with the channels between factors rescaled to suit eight bits.

    Args:
        model: A compressed model; layers that are not factorised stay as they are.
        batches: Inputs to measure the ranges on, as :func:`tensigma.calibrate` takes them.
        strength: 1 makes ranges equal, 0 leaves them as they are, values between equalise in part. By default, chosen
            for the least noise in the output of each layer.
        max_samples: Number of inputs to measure on.
        input: The entry or position of the model's input in a batch.

    >>> import tensigma as ts
    >>> model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> small, _ = ts.compress(model, ts.plan(model, ranks=ts.Ranks({"0": 4}), norm="frobenius"))
    >>> x = torch.randn(8, 16)
    >>> equal = equalise(small, [x], strength=1)
    >>> torch.allclose(equal(x), small(x), atol=1e-5)
    True
    >>> between = equal[0].reduce(x)
    >>> torch.allclose(between.amax(0), between.amax(), rtol=0.6)
    True
    """
    if strength is not None and not 0 <= strength <= 1:
        raise InputError(f"got strength={strength}; give a number between 0 and 1")
    equal = copied(model)
    chains = _chains(equal)
    if not chains or strength == 0:
        return equal
    extents = _extents(equal, chains, batches, max_samples, input)
    powers = torch.linspace(0, 1, 9) if strength is None else torch.tensor([strength])
    for chain in chains:
        if any(layer not in extents for layer in chain):
            continue  # never called
        gains = _gains(chain, extents)
        for before, after in pairwise(chain):
            scales = _scales(extents[before], gains[before], after, gains[after], powers.tolist())
            if (scales != 1).any():
                _scale_(before, outputs=1 / scales)
                _scale_(after, inputs=scales)
    return equal


def _chains(model: nn.Module) -> list[list[nn.Module]]:
    """The layers of every factorised layer that shares no parameter with another part of the model."""
    users: dict[Tensor, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[parameter] = users.get(parameter, 0) + 1
    chains = [list(model.get_submodule(name).children()) for name in find_compressed(model)]
    return [chain for chain in chains if all(users[tensor] == 1 for layer in chain for tensor in layer.parameters())]


@dataclass(frozen=True)
class _Extent:
    """The output of a layer, by channel: how far it reaches below and above 0, its mean and its mean square."""

    below: Tensor  # (r,), like the others
    above: Tensor
    mean: Tensor
    square: Tensor
    samples: int
    #: Shape of one input of the layer.
    shape: tuple[int, ...]

    @property
    def variance(self) -> Tensor:
        return (self.square - self.mean.square()).clamp_min(0)

    def joined(self, other: _Extent) -> _Extent:
        samples = self.samples + other.samples
        share = self.samples / samples
        return _Extent(
            torch.maximum(self.below, other.below),
            torch.maximum(self.above, other.above),
            share * self.mean + (1 - share) * other.mean,
            share * self.square + (1 - share) * other.square,
            samples,
            self.shape,
        )


def _extents(
    model: nn.Module, chains: list[list[nn.Module]], batches: Any, max_samples: int | None, input: Key
) -> dict[nn.Module, _Extent]:
    """The extent of the output of every layer of the chains that is called."""
    extents: dict[nn.Module, _Extent] = {}
    with torch.inference_mode(), borrowed(model), ExitStack() as stack:
        for chain in chains:
            for layer in chain:
                stack.callback(layer.register_forward_hook(_watch(extents)).remove)
        for batch in Batches(batches, input=input, max_samples=max_samples):
            run(model, batch)
    return extents


def _watch(extents: dict[nn.Module, _Extent]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(layer: nn.Module, args: Any, output: Any) -> None:
        values = _by_channel(output.double(), layer)
        below, above = (-values.amin(1)).clamp_min(0), values.amax(1).clamp_min(0)
        shape = tuple(args[0].shape[1:])
        extent = _Extent(below, above, values.mean(1), values.square().mean(1), len(output), shape)
        extents[layer] = extents[layer].joined(extent) if layer in extents else extent

    return hook


def _by_channel(output: Tensor, layer: nn.Module) -> Tensor:
    axis = output.dim() - 1 if isinstance(layer, nn.Linear) else output.dim() - Geometry.of(layer).n_spatial - 1
    return output.movedim(axis, 0).flatten(1)


def _gains(chain: list[nn.Module], extents: dict[nn.Module, _Extent]) -> dict[nn.Module, Tensor]:
    """How much the variance of noise in a channel grows up to the output of the chain, relative to the spread there.

    Measured from gradients of random mixtures of outputs: the chain is linear, so any input gives the same.
    """
    spread = extents[chain[-1]].variance
    spread = spread.clamp_min(1e-3 * float(spread.mean())).sqrt()
    generator = torch.Generator().manual_seed(0)
    like = next(chain[0].parameters())
    with torch.enable_grad(), safe_backward(*chain):
        activations = [torch.zeros(_PROBES, *extents[chain[0]].shape, device=like.device, dtype=like.dtype)]
        activations[0].requires_grad_()
        for layer in chain:
            activations.append(layer(activations[-1]))
        last = _by_channel(activations[-1], chain[-1])  # (t, n)
        signs = torch.randint(0, 2, last.shape, generator=generator).to(last) * 2 - 1
        mixture = (last * signs / spread.to(last).clamp_min(torch.finfo(last.dtype).tiny)[:, None]).sum()
        gradients = torch.autograd.grad(mixture, activations[1:])
    return {
        layer: _by_channel(gradient.double(), layer).square().sum(1)
        for layer, gradient in zip(chain, gradients, strict=True)
    }


def _scales(extent: _Extent, gains: Tensor, after: nn.Module, gains_after: Tensor, powers: Sequence[float]) -> Tensor:
    """The divisor of each channel: 1 if it is silent, and of geometric mean 1 in absolute value."""
    longer, shorter = torch.maximum(extent.below, extent.above), torch.minimum(extent.below, extent.above)
    alive = (longer > 0) & longer.isfinite()
    if not alive.any():
        return torch.ones_like(longer)
    weight = after.weight
    assert isinstance(weight, Tensor)
    kernels = to_kernels(weight.detach(), Geometry.of(after)).double()
    kernels = kernels.flatten(3) if kernels.dim() > 3 else kernels[..., None]  # (g, t/g, s/g, k)
    best, least_noise = torch.ones_like(longer), math.inf
    for share in _SHARES:
        reach = torch.where(alive, torch.maximum(longer, shorter / share), 1.0)
        logs = reach.log() - reach[alive].log().mean()
        for power in powers:
            sizes = torch.where(alive, power * logs, 0.0).exp()
            noise = _noise(kernels, sizes, longer, shorter, extent.square, gains, gains_after)
            if noise < least_noise:
                best, least_noise = sizes, noise
    return torch.where(extent.below > extent.above, -best, best)


def _noise(
    kernels: Tensor, sizes: Tensor, longer: Tensor, shorter: Tensor, square: Tensor, gains: Tensor, gains_after: Tensor
) -> float:
    """Variance in the output, up to a constant factor, when the input channels of a layer are divided by ``sizes``.

    The error of an activation is the common step ÷ √12; that of a weight is its own step ÷ √12, times the input.
    """
    groups, n_out, n_in, n_taps = kernels.shape
    activation_step = float((longer / sizes).max() + (shorter / sizes).max()) / 255
    weight_steps = (kernels * sizes.reshape(groups, 1, n_in, 1)).abs().amax((2, 3)) / 127  # (g, t/g)
    input_energy = n_taps * (square / sizes.square()).reshape(groups, n_in).sum(1, keepdim=True)  # (g, 1)
    of_weights = weight_steps.square() * input_energy * gains_after.reshape(groups, n_out)
    return float(activation_step**2 * (gains * sizes.square()).sum() + _COHERENCE * of_weights.sum())


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

"""How sensitive the model's answers are to an error in each layer: weights for sharing out a budget.

With g the gradient of log p(label) with respect to a layer's output, labels drawn from the model's own predictions, an
error δ in that output changes the divergence from the original answers by about ½ E[(gᵀδ)²]. For an error of relative
size e that is independent of g, this is e² · E‖g‖² · Var(y) / 2, summed over positions and channels: the weight of e².
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tensigma.errors import InputError
from tensigma.layers import find_layers
from tensigma.running import (
    Batch,
    Batches,
    Key,
    borrowed,
    check_gradients,
    dense_scores_of,
    drawn_labels,
    run,
    safe_backward,
)


def sensitivities(
    model: nn.Module,
    batches: Any,
    *,
    power: float = 0.5,
    max_samples: int = 500,
    input: Key = None,
    seed: int = 0,
) -> dict[str, float]:
    """Weights of the layers of a classifier for ``tensigma.plan(…, weights=…)``, with a geometric mean of 1.

    Labels of the batches are not read. ``power`` below 1 damps the weights, which rest on small errors and
    independence; 0 makes all of them 1.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    >>> weights = sensitivities(model, [torch.randn(8, 3, 4, 4)])
    >>> sorted(weights), round(math.prod(weights.values()), 6)
    (['0', '3'], 1.0)
    """
    if not 0 <= power <= 1:
        raise InputError(f"power lies between 0 (all layers alike) and 1, got {power!r}")
    check_gradients(model, "measuring sensitivities", "weights='auto' of tensigma.plan measures by forward runs.")
    listener = _Listener(model)
    generator = torch.Generator().manual_seed(seed)
    samples = 0
    with borrowed(model), torch.enable_grad(), listener.attached(), safe_backward(model):
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for batch in Batches(batches, input=input, max_samples=max_samples):
            if not isinstance(batch.inputs, Tensor) or not batch.inputs.is_floating_point():
                kind = getattr(batch.inputs, "dtype", type(batch.inputs).__name__)
                raise InputError(
                    f"batch {batch.index}: sensitivities are gradients, which inputs of {kind} do not "
                    "have; use weights='auto' of tensigma.plan instead"
                )
            # Outputs have gradients only if something before them requires one.
            inputs = batch.inputs.detach().requires_grad_()
            scores = dense_scores_of(run(model, Batch(batch.index, inputs, None))).float()
            target = drawn_labels(scores, generator)
            functional.cross_entropy(scores, target, reduction="sum").backward()
            samples += len(batch)
    return _normalised(listener.weights(samples), power)


class _Listener:
    """Sums of squared gradients and the spread of outputs, for every layer."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [layer for layer in find_layers(model) if layer.geometry is not None]
        self._gradients: dict[str, float] = {}
        self._spread: dict[str, tuple[Tensor, Tensor, int]] = {}

    def attached(self) -> ExitStack:
        stack = ExitStack()
        for layer in self._layers:
            assert layer.geometry is not None
            hook = self._hook(layer.name, layer.geometry.n_spatial)
            stack.callback(layer.module.register_forward_hook(hook).remove)
        return stack

    def _hook(self, name: str, n_spatial: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            axis = output.dim() - 1 - n_spatial
            rows = output.detach().double().movedim(axis, -1).flatten(0, -2)
            total, squares, n = self._spread.get(name, (torch.zeros(1).to(rows), torch.zeros(1).to(rows), 0))
            self._spread[name] = total + rows.sum(0), squares + rows.square().sum(0), n + len(rows)
            output.register_hook(add)

        def add(gradient: Tensor) -> None:
            self._gradients[name] = self._gradients.get(name, 0.0) + gradient.double().square().sum().item()

        return hook

    def weights(self, samples: int) -> dict[str, float]:
        weights = {}
        for name, gradient in self._gradients.items():
            total, squares, n = self._spread[name]
            variance = (squares / n - (total / n).square()).mean().item()
            weights[name] = gradient / samples * variance
        return weights


def _normalised(weights: dict[str, float], power: float) -> dict[str, float]:
    """Damped, and with a geometric mean of 1; layers that nothing depends on take the smallest positive weight."""
    positive = [weight for weight in weights.values() if weight > 0]
    if not positive:
        return dict.fromkeys(weights, 1.0)
    mean = math.exp(sum(map(math.log, positive)) / len(positive))
    return {name: (max(weight, min(positive)) / mean) ** power for name, weight in weights.items()}

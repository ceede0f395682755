"""Squared gradients of single samples: the diagonal of the Fisher information, weight by weight."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from tensigma.errors import InputError
from tensigma.running import Inputs, call, dense_scores_of, drawn_labels, n_samples, taken


def squared_gradients(
    model: nn.Module, weights: Mapping[str, Tensor], x: Inputs, labels: Tensor | None, generator: torch.Generator
) -> dict[str, Tensor]:
    """Σ over samples of (∂ log p(label) / ∂ weight)², in float64; without labels they are drawn from the softmax.

    Samples run through the model one by one: the squares of single gradients cannot be recovered from the gradient of a
    batch, and layers that are called several times or in unusual ways need no special care.
    """
    sums = {name: torch.zeros_like(weight, dtype=torch.float64) for name, weight in weights.items()}
    with torch.enable_grad():
        for index in range(n_samples(x)):
            logits = dense_scores_of(call(model, taken(x, slice(index, index + 1))))
            if labels is None:
                target = drawn_labels(logits, generator)
            else:
                target = labels[index : index + 1].to(logits.device)
            loss = functional.cross_entropy(logits.float(), target, reduction="sum")
            for (name, total), gradient in zip(
                sums.items(), torch.autograd.grad(loss, list(weights.values()), allow_unused=True), strict=True
            ):
                if gradient is not None:
                    total += gradient.double().square()
                    _check(name, gradient)
    return sums


def _check(name: str, gradient: Tensor) -> None:
    if not torch.isfinite(gradient).all():
        raise InputError(f"layer {name!r}: the gradient of its weight contains NaN or infinite values")

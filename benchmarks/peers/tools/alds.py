"""ALDS: the rule of ``alds_rule.py``, our own implementation, over all layers but the first."""

from __future__ import annotations

import torch
from torch import nn

from peers.alds_rule import Choice, Spectrum, allocate, factors
from peers.factorised import conv, layers_of, linear, replace_
from peers.search import n_params
from peers.worker import Assignment, main


def compress(assignment: Assignment) -> nn.Module:
    model = assignment.model
    layers = layers_of(model)
    spectra = {name: Spectrum(layer) for name, layer in layers.items()}
    total = n_params(model)
    fixed = total - sum(spectrum.dense for spectrum in spectra.values())
    choices = allocate(spectra, total / assignment.job.rate - fixed, assignment.job.seed)
    for name, choice in choices.items():
        if choice is not None:
            with torch.no_grad():
                replace_(model, name, split(layers[name], choice))
    return model


def split(layer: nn.Conv2d | nn.Linear, choice: Choice) -> nn.Sequential:
    weight = layer.weight.detach()
    if isinstance(layer, nn.Linear):
        # Groups of a Linear layer are those of a pointwise convolution.
        inner, outer = factors(weight[..., None, None], choice)
        if choice.groups == 1:
            return nn.Sequential(linear(inner.flatten(1)), linear(outer, layer.bias))
        like = nn.Conv2d(weight.shape[1], weight.shape[0], 1)
        return nn.Sequential(
            nn.Unflatten(1, (-1, 1, 1)),
            conv(inner, like, groups=choice.groups),
            nn.Flatten(),
            linear(outer, layer.bias),
        )
    inner, outer = factors(weight, choice)
    return nn.Sequential(
        conv(inner, layer, axes="hw", groups=choice.groups), conv(outer[..., None, None], layer, bias=layer.bias)
    )


if __name__ == "__main__":
    main(compress)

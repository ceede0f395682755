"""Convolutions of channels_last weights while a model is trained on a CPU.

There depthwise and other thin layers, of which compressed models have many, run backwards much faster that way: a step
takes a half to two thirds of its time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tensigma.running.inputs import Inputs, call
from tensigma.running.onednn import put_back

_LAYERS = (nn.Conv2d, nn.ConvTranspose2d)


@contextmanager
def channels_last(*models: nn.Module, example: Inputs) -> Iterator[None]:
    """Inside, two-dimensional convolutions of ``models`` compute in channels_last where that is faster and works.

    That is with weights in single precision on a CPU, in a model that takes ``example`` so: some look at their maps in
    a way that needs the contiguous layout. On exit weights have the memory that they had before, with the values that
    they have now. Enter it before :func:`safe_backward`, which knows the layers that must not run like this.

    >>> layer = nn.Conv2d(2, 3, 3)
    >>> with channels_last(layer, example=torch.zeros(1, 2, 5, 5)):
    ...     layer.weight.is_contiguous(), layer.weight.is_contiguous(memory_format=torch.channels_last)
    (False, True)
    >>> layer.weight.is_contiguous()
    True
    """
    before: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for model in models:
            weights = _weights(model)
            before += weights
            for weight, data in weights:
                weight.data = data.contiguous(memory_format=torch.channels_last)
            if weights and not _runs(model, example):
                for weight, data in weights:
                    weight.data = data
        yield
    finally:
        for weight, data in before:
            put_back(weight, data)


def _weights(model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """Weights that may be laid out anew, and their memory."""
    layers = [layer for layer in model.modules() if isinstance(layer, _LAYERS)]
    # From the registry: a parametrised weight is computed anew in every call.
    weights = dict.fromkeys(weight for layer in layers if (weight := layer._parameters.get("weight")) is not None)
    return [(each, each.data) for each in weights if _gains(each) and not each.is_inference()]


def _gains(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32


@torch.no_grad()
def _runs(model: nn.Module, example: Inputs) -> bool:
    try:
        call(model, example)
    except RuntimeError:
        return False
    return True

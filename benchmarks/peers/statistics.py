"""BatchNorm statistics taken anew after compression, where that brings a model nearer to the original.

Channels that were removed or approximated leave statistics behind that no longer hold, and many tools leave it to their
users to take them anew. It needs no labels, so every tool gets the better of both. Needs torch alone.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

# Images for the statistics at most, and as many others to judge by.
_IMAGES = 256
_BATCH = 64


def with_better_statistics(small: nn.Module, original: nn.Module, images: Tensor) -> tuple[nn.Module, bool]:
    """``small``, or a copy with new statistics if its answers agree with the original's more often; and which it is."""
    if not any(isinstance(module, _BatchNorm) for module in small.modules()):
        return small, False
    count = min(_IMAGES, len(images) // 2)
    fitted, judged = images[:count], images[count : 2 * count]
    anew = copy.deepcopy(small).eval()
    take_statistics_(anew, fitted)
    wanted = answers(original, judged)
    better = agreement(answers(anew, judged), wanted) > agreement(answers(small, judged), wanted)
    return (anew if better else small), better


def take_statistics_(model: nn.Module, images: Tensor) -> None:
    """Mean and variance of every BatchNorm over ``images``, all batches counting alike."""
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None
        layer.train()
    answers(model, images)
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
        layer.eval()


def answers(model: nn.Module, images: Tensor) -> Tensor:
    """The class of every image. Modes are left as they are."""
    with torch.no_grad():
        return torch.cat([model(batch).argmax(1) for batch in images.split(_BATCH)])


def agreement(found: Tensor, wanted: Tensor) -> float:
    return (found == wanted).double().mean().item()

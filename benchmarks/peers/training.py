"""The training of both tracks that train: the same images, steps and choice of a learning rate for every tool.

A model that is near the original is led away by a rate that a broken one needs, so each is trained at the rate that
suits it, judged on images that it is not trained on.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tensigma.running import channels_last, safe_backward

#: What is tried, learning rates and whether BatchNorm keeps its statistics, and on which share of the steps.
SETTINGS = ((1e-3, False), (2e-4, False), (4e-5, True))
_TRIAL = 0.15
#: Images that judge and train nothing: at most so many, and at most so large a share.
_HELD_OUT, _HELD_OUT_SHARE = 500, 0.2
_JUDGED_AT_ONCE = 64


def trained(
    model: nn.Module, original: nn.Module, images: Tensor, labels: Tensor | None, *, batch: int, seed: int
) -> tuple[nn.Module, dict[str, Any]]:
    """A copy after one epoch of Adam, or ``model`` itself if that has a lower loss on the images held out; and facts.

    With ``labels`` the loss is their cross-entropy; without, the Kullback–Leibler divergence from the answers of
    ``original``.
    """
    count = min(_HELD_OUT, int(_HELD_OUT_SHARE * len(images)))
    parts = [part if part is None else (part[:-count], part[-count:]) for part in (images, labels)]
    (shown, judged), classes = parts[0] or (images, images), parts[1] or (None, None)

    def held_out_loss(each: nn.Module) -> float:
        value = mean_loss(each, original, judged, classes[1])
        return value if math.isfinite(value) else math.inf

    def after(setting: tuple[float, bool], share: float) -> nn.Module:
        rate, frozen = setting
        each = copy.deepcopy(model)
        train_(
            each, original, shown, classes[0], batch=batch, learning_rate=rate, frozen=frozen, seed=seed, share=share
        )
        return each

    setting = min(SETTINGS, key=lambda each: held_out_loss(after(each, _TRIAL)))
    long = after(setting, 1.0)
    losses = {"before": held_out_loss(model), "after": held_out_loss(long)}
    kept = losses["after"] < losses["before"]
    facts = {
        "training_steps": len(shown) // batch,
        "training_images": len(shown),
        "learning_rate": setting[0],
        "frozen_statistics": setting[1],
        "held_out_loss": {name: round(value, 4) for name, value in losses.items()},
        "trained": kept,
    }
    return (long if kept else model), facts


def train_(
    model: nn.Module,
    original: nn.Module,
    images: Tensor,
    labels: Tensor | None,
    *,
    batch: int,
    learning_rate: float,
    seed: int,
    frozen: bool = False,
    share: float = 1.0,
) -> int:
    """A share of an epoch, the learning rate falling to 0 along a cosine; returns the number of steps.

    ``frozen`` keeps the statistics of BatchNorm. Images are mirrored at random, and the last ones that fill no batch
    are left out.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator)
    parameters = [parameter.requires_grad_() for parameter in model.parameters()]
    optimiser = torch.optim.Adam(parameters, lr=learning_rate)
    n_steps = math.ceil(share * (len(images) // batch))
    original.eval()
    model.train()
    for module in model.modules():
        # Networks this small and an epoch this short have nothing to regularise.
        if isinstance(module, nn.Dropout) or (frozen and isinstance(module, _BatchNorm)):
            module.eval()
    with channels_last(model, original, example=images[:2]), safe_backward(model):
        for step in range(n_steps):
            chosen = order[step * batch : (step + 1) * batch]
            x = images[chosen]
            if torch.rand((), generator=generator) < 0.5:
                x = x.flip(-1)
            for group in optimiser.param_groups:
                group["lr"] = learning_rate * 0.5 * (1 + math.cos(math.pi * step / n_steps))
            optimiser.zero_grad()
            loss(model(x), original, x, None if labels is None else labels[chosen]).backward()
            optimiser.step()
    model.eval()
    return n_steps


def loss(answers: Tensor, original: nn.Module, x: Tensor, labels: Tensor | None) -> Tensor:
    if labels is not None:
        return F.cross_entropy(answers, labels)
    with torch.no_grad():
        target = original(x)
    return F.kl_div(answers.log_softmax(1), target.log_softmax(1), reduction="batchmean", log_target=True)


@torch.no_grad()
def mean_loss(model: nn.Module, original: nn.Module, images: Tensor, labels: Tensor | None) -> float:
    """The loss per image, in evaluation mode."""
    model.eval()
    total = 0.0
    for begin in range(0, len(images), _JUDGED_AT_ONCE):
        part = slice(begin, begin + _JUDGED_AT_ONCE)
        x = images[part]
        total += len(x) * float(loss(model(x), original, x, None if labels is None else labels[part]))
    return total / len(images)

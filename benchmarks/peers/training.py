"""The training of both tracks that train: the same steps for every tool. Needs torch alone."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def train_(
    model: nn.Module,
    original: nn.Module,
    images: Tensor,
    labels: Tensor | None,
    *,
    batch: int,
    learning_rate: float,
    seed: int,
) -> int:
    """One epoch of Adam, the learning rate falling to 0 along a cosine; returns the number of steps.

    With ``labels`` the loss is their cross-entropy; without, the Kullback–Leibler divergence from the answers of
    ``original``. Images are mirrored at random, and the last ones that fill no batch are left out.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.Adam(parameters, lr=learning_rate)
    n_steps = len(images) // batch
    original.eval()
    model.train()
    for module in model.modules():
        # Networks this small and an epoch this short have nothing to regularise.
        if isinstance(module, nn.Dropout):
            module.eval()
    for step in range(n_steps):
        chosen = order[step * batch : (step + 1) * batch]
        # A plain copy in the contiguous layout: torch's oneDNN has a fault in another one.
        x = images[chosen].contiguous()
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

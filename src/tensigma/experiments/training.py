"""Training a small network where there are no trained weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tensigma.experiments.demo import TrainingProgress
from tensigma.experiments.settings import Training
from tensigma.running import safe_backward
from tensigma.zoo import load_model


def train(
    spec: str,
    data: Any,
    settings: Training,
    *,
    epochs: int | None = None,
    report: Callable[[TrainingProgress], None] = lambda state: None,
) -> nn.Module:
    """Train the model of this name on images that fit in memory; the same seed gives the same weights.

    Images are mirrored at random and shifted around their edges by up to four pixels, all of a batch alike.
    """
    start = time.perf_counter()
    batches = list(data)
    images, labels = torch.cat([batch[0] for batch in batches]), torch.cat([batch[1] for batch in batches])
    size = min(settings.batch_size, len(images))
    total = settings.epochs if epochs is None else epochs
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        model = load_model(spec).train()
        optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
        steps = max(1, total * (len(images) // size))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, settings.learning_rate, total_steps=steps)
        # Data from a user's own factory may be in channels_last, and so is then the whole pass.
        with safe_backward(model):
            for epoch in range(total):
                loss_sum = 0.0
                order = torch.randperm(len(images))[: len(images) // size * size]
                for chosen in order.split(size):
                    loss = functional.cross_entropy(model(_varied(images[chosen])), labels[chosen])
                    optimiser.zero_grad()
                    loss.backward()
                    optimiser.step()
                    schedule.step()
                    loss_sum += loss.item()
                mean = loss_sum * size / len(order)
                report(TrainingProgress(done=epoch + 1, total=total, loss=mean, seconds=time.perf_counter() - start))
    return model.eval()


def _varied(images: Tensor) -> Tensor:
    mirrored = images.flip(-1) if torch.rand(()) < 0.5 else images
    down, right = (int(shift) for shift in torch.randint(-4, 5, (2,)))
    return mirrored.roll((down, right), (-2, -1))

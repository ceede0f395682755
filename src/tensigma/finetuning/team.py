"""Several processes that train one model: each takes a part of every batch, and all make the same step.

Every process reads the same batches. The gradient of a batch is the sum of the gradients of its parts, each weighed by
its share of the samples, and BatchNorm layers normalise by the moments of the whole batch. So the weights are those of
one process that trains on the same batches, to rounding, if the loss of a batch is a mean over its samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from tensigma.errors import InputError
from tensigma.running import all_notes, common_device, n_samples, rank_and_size, taken, tensors_of, weights_digest


class Team:
    """The processes that train together; made and used inside a process group. One process is a team too."""

    def __init__(self) -> None:
        self.rank, self.size = rank_and_size()

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def check_same(self, model: nn.Module) -> None:
        """Refuse models with different weights."""
        digests = all_notes(weights_digest(model))
        if len(set(digests)) > 1:
            raise InputError("the processes have models with different weights; load the same weights in all of them")

    def agreed(self, value: Any) -> Any:
        """The value of the first process, so that all decide alike."""
        return all_notes(value)[0]

    def part(self, x: Any, labels: Any) -> tuple[Any, Any, float]:
        """Inputs and labels of this process, and their share of the batch.

        A batch of fewer samples than processes is taken whole by each.
        """
        count = n_samples(x)
        if self.size == 1 or count < self.size:
            return x, labels, 1.0
        rows = torch.arange(self.rank, count, self.size)
        return taken(x, rows), None if labels is None else taken(labels, rows), len(rows) / count

    def add_up_(self, parameters: Sequence[nn.Parameter], loss: Tensor) -> float:
        """Add up the gradients of all parts in place; returns the sum of their losses."""
        sizes = [parameter.numel() for parameter in parameters]
        # The last entries: whether each parameter has a gradient at all, which an optimizer treats differently.
        whole = torch.zeros(1 + sum(sizes) + len(sizes), dtype=torch.float64, device=common_device())
        whole[0] = loss.detach()
        slots = whole[1 : 1 + sum(sizes)].split(sizes)
        for index, (parameter, slot) in enumerate(zip(parameters, slots, strict=True)):
            if parameter.grad is not None:
                slot.copy_(parameter.grad.flatten())
                whole[1 + sum(sizes) + index] = 1
        dist.all_reduce(whole)
        for index, (parameter, slot) in enumerate(zip(parameters, slots, strict=True)):
            if whole[1 + sum(sizes) + index] > 0:
                parameter.grad = slot.view_as(parameter).to(parameter)
        return float(whole[0])

    def align_(self, model: nn.Module) -> None:
        """Take the weights and buffers of the first process, should rounding differ on another kind of machine."""
        if self.size == 1:
            return
        device = common_device()
        for tensor in tensors_of(model).values():
            shared = tensor.detach().to(device, copy=True)
            dist.broadcast(shared, src=0)
            with torch.no_grad():
                tensor.copy_(shared)

    @contextmanager
    def normalising_together(self, model: nn.Module) -> Iterator[None]:
        """BatchNorm layers in training mode normalise by the moments of all parts inside the block."""
        norms = [
            module
            for module in model.modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
            and not isinstance(module, nn.SyncBatchNorm)
            and module.training
        ]
        try:
            for norm in norms:
                norm.forward = partial(_normalised, norm)  # type: ignore[method-assign]
            yield
        finally:
            for norm in norms:
                vars(norm).pop("forward", None)


class _Sum(torch.autograd.Function):
    """The sum over all processes, which a gradient passes in the same way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _summed(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _summed(gradient)


def _summed(tensor: Tensor) -> Tensor:
    whole = tensor.detach().to(common_device(), copy=True).contiguous()
    dist.all_reduce(whole)
    return whole.to(tensor.device)


def _normalised(norm: Any, x: Tensor) -> Tensor:
    """What a BatchNorm layer in training mode computes, with mean and variance over all parts."""
    axes = [0, *range(2, x.dim())]
    shape = (1, -1, *[1] * (x.dim() - 2))
    count = x.new_tensor([x.numel() // x.shape[1]])
    total = _Sum.apply(torch.cat([x.sum(axes), count]))
    mean, n = total[:-1] / total[-1], float(total[-1].detach())
    centred = x - mean.reshape(shape)
    variance = _Sum.apply(centred.square().sum(axes)) / n
    if norm.track_running_stats and norm.running_mean is not None:
        with torch.no_grad():
            norm.num_batches_tracked += 1
            # Without a momentum, the mean over all batches so far.
            factor = norm.momentum if norm.momentum is not None else 1.0 / float(norm.num_batches_tracked)
            norm.running_mean.lerp_(mean.to(norm.running_mean), factor)
            norm.running_var.lerp_((variance * n / max(n - 1, 1)).to(norm.running_var), factor)
    y = centred * (variance + norm.eps).rsqrt().reshape(shape)
    return y if norm.weight is None else y * norm.weight.reshape(shape) + norm.bias.reshape(shape)

"""Whether data looks like that of training.

Images in 0–255 or 0–1 where the model expects others give statistics, and a compression, for inputs that it will never
see. The running mean and variance of the first BatchNorm that is called know what the training data looked like there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

# Real data sets differ by a factor of two or so; a forgotten normalisation by twenty or more.
_FARTHEST_MEAN = 3.0
_LARGEST_RATIO = 6.0
# A few batches tell enough.
_BATCHES = 4


class FirstNorm:
    """Listens to the first BatchNorm that a model calls, of those that have seen training data."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
        self._name: str | None = None
        self._calls = 0
        self._count = 0
        self._sum: Tensor | float = 0.0
        self._squares: Tensor | float = 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen while the block runs."""
        with ExitStack() as stack:
            for name, layer in self.layers.items():
                stack.callback(layer.register_forward_pre_hook(self._hook(name)).remove)
            yield

    def _hook(self, name: str) -> Any:
        @torch.inference_mode(False)
        @torch.no_grad()
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self._name is None:
                self._name = name
            if self._name != name or self._calls >= _BATCHES or not args or not isinstance(args[0], Tensor):
                return
            self._calls += 1
            rows = args[0].detach().transpose(0, 1).flatten(1).float()
            self._count += rows.shape[1]
            self._sum = self._sum + rows.sum(1).double().cpu()
            self._squares = self._squares + rows.square().sum(1).double().cpu()

        return hook

    def doubt(self) -> str | None:
        """What does not fit, with the numbers; None if nothing is wrong or nothing is known."""
        if self._name is None or not self._count:
            return None
        layer = self.layers[self._name]
        if layer.running_mean is None or layer.running_var is None:
            return None
        mean = torch.as_tensor(self._sum) / self._count
        variance = (torch.as_tensor(self._squares) / self._count - mean.square()).clamp_min(0)
        usual_mean, usual_variance = layer.running_mean.double().cpu(), layer.running_var.double().cpu()
        # As they begin: it has seen no data. The number of batches does not tell, since many published weights lack it.
        if not usual_mean.any() and usual_variance.eq(1).all():
            return None
        alive = usual_variance > 1e-12 * usual_variance.max().clamp_min(1e-30)
        if not alive.any():
            return None
        ratio = (variance[alive] / usual_variance[alive]).median().item()
        distance = ((mean - usual_mean)[alive].abs() / usual_variance[alive].sqrt()).median().item()
        if 1 / _LARGEST_RATIO <= ratio <= _LARGEST_RATIO and distance <= _FARTHEST_MEAN:
            return None
        return (
            f"the data does not look like what the model was trained on: at {self._name!r}, its first BatchNorm, the "
            f"variance is {ratio:.3g} times the one remembered from training, and the mean lies {distance:.2g} "
            "standard deviations away; check the normalisation of the images (0–255, 0–1, mean and std)"
        )

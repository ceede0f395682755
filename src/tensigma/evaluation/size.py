"""What a model costs: parameters, multiply-adds, bytes."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tensigma.layers import TARGETS, packed_bias_bytes, packed_bytes
from tensigma.running import Batch, Inputs, borrowed, run


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a model: parameters, multiply-adds for one sample (None: unknown) and bytes in a file.

    Weights on a grid of few bits count as their packed integers and scales, and biases beside them as half precision;
    in memory they take four bytes each.
    """

    params: int
    macs: int | None
    bytes: int


def count_params(model: nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, tied ones once: the size of a file of them, except for its small header.

    >>> count_bytes(nn.Linear(10, 5).half())
    110
    """
    sizes = {id(tensor): tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        packed = packed_bytes(module)
        if packed is not None:
            sizes[id(module.weight)] = packed
        bias = packed_bias_bytes(module)
        if bias is not None:
            sizes[id(module.bias)] = bias
    return sum(sizes.values())


def count_macs(model: nn.Module, sample: Inputs) -> int:
    """Multiply-adds of all convolutions and Linear layers, as often as they are called, for one ``sample`` (1, …).

    >>> count_macs(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8, 2)), torch.ones(1, 3, 1, 1))
    232
    """
    total = 0

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        nonlocal total
        if not isinstance(output, Tensor):
            return
        weight = module.weight
        assert isinstance(weight, Tensor)
        # Each output value takes prod(weight.shape[1:]) products; in a transposed convolution, each input value.
        transposed = bool(getattr(module, "transposed", False))
        values = (args[0] if args else kwargs["input"]) if transposed else output
        total += values.numel() * math.prod(weight.shape[1:])

    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(borrowed(model))
        for module in model.modules():
            if isinstance(module, TARGETS):
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        run(model, Batch(0, sample, None))
    return total


def size_of(model: nn.Module, sample: Inputs | None = None) -> Size:
    """Parameters, MACs and bytes; MACs only if there is a ``sample`` to run."""
    macs = None if sample is None else count_macs(model, sample)
    return Size(params=count_params(model), macs=macs, bytes=count_bytes(model))

"""Layers whose weights a model reads besides calling them: a smaller layer in their place has no such weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn


class _Watched(dict[str, Any]):
    """The parameters of a layer, which tell when one of them is looked up by name."""

    def __init__(self, parameters: dict[str, Any], note: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._note = note

    def __getitem__(self, key: str) -> Any:
        self._note()
        return super().__getitem__(key)


@contextmanager
def weight_reads(model: nn.Module, layers: Mapping[str, nn.Module]) -> Iterator[set[str]]:
    """The names of ``layers`` whose weight or bias ``model`` reads inside the block, other than by calling them.

    Only reads during calls of ``model`` count. Going through ``model.parameters()`` does not: any layer allows it. Of a
    compiled model, which reads all weights by itself, none counts.

    >>> import torch
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
    ...
    ...     def forward(self, x):
    ...         return self.second(self.first(x.to(self.first.weight.device)))
    >>> net = Net()
    >>> with weight_reads(net, {"first": net.first, "second": net.second}) as read:
    ...     _ = net(torch.ones(1, 2))
    >>> read
    {'first'}
    """
    read: set[str] = set()
    if any(is_compiled(module) for module in model.modules()):
        yield read
        return
    # The model and the layers that are being called; others may read weights between calls of the model.
    called: list[nn.Module] = []

    def enter(module: nn.Module, args: Any) -> None:
        called.append(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        called.remove(module)

    with ExitStack() as stack:
        for name, layer in (("", model), *layers.items()):
            # First of all hooks before a call, and called after one that fails too.
            stack.callback(layer.register_forward_pre_hook(enter, prepend=True).remove)
            stack.callback(layer.register_forward_hook(leave, always_call=True).remove)
            if layer is not model and type(layer._parameters) is dict:

                def note(name: str = name, layer: nn.Module = layer) -> None:
                    if model in called and layer not in called:
                        read.add(name)

                stack.callback(_restore_, layer, layer._parameters)
                layer._parameters = _Watched(layer._parameters, note)
        yield read


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` runs the module."""
    # By name, because importing the compiler takes seconds.
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def _restore_(layer: nn.Module, parameters: dict[str, Any]) -> None:
    """Give a layer its own dict again, with what may have been assigned to it meanwhile."""
    current = dict(layer._parameters)
    parameters.clear()
    parameters.update(current)
    layer._parameters = parameters

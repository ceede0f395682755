"""Which layers a BatchNorm follows: it can be folded into a layer if it is all that reads the layer's output.

That is seen while the model runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from tensigma.layers import Geometry, is_compiled
from tensigma.running import leaves


class Followers(TorchDispatchMode):
    """Sees which of ``layers`` hand their output to one BatchNorm and to nothing else.

    Every operation that takes the output of a layer counts, also one that changes it in place or takes a view of it.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1), nn.ReLU()).eval()
    >>> followers = Followers(model, {name: model.get_submodule(name) for name in ("0", "2")})
    >>> with followers.watching():
    ...     followers.see(model(torch.ones(1, 3, 5, 5)))
    >>> followers.found()
    {'0': '1'}
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        norms = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
        # A compiled model calls no modules one by one.
        usable = bool(norms) and not any(is_compiled(module) for module in model.modules())
        self._layers, self._norms = (layers, norms) if usable else ({}, {})
        #: Output → the layer that it came from, for as long as it is alive.
        self._outputs = WeakIdKeyDictionary()
        #: Layer → names of the BatchNorms that read its output, and None for any other reader.
        self._readers: dict[str, set[str | None]] = {name: set() for name in self._layers}
        #: BatchNorm → layers whose outputs it reads, and None for anything else.
        self._read: dict[str, set[str | None]] = {name: set() for name in self._norms}
        self._inside: str | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the calls inside the block. Hooks that a layer has already may read its output unseen."""
        if not self._layers:
            yield
            return
        with ExitStack() as stack:
            for name, layer in self._layers.items():
                # Worked out here: reading the weight of a layer between calls would count as a use of it.
                hook = self._after_layer(name, Geometry.of(layer).n_spatial + 2)
                stack.callback(layer.register_forward_hook(hook).remove)
            for name, norm in self._norms.items():
                stack.callback(norm.register_forward_pre_hook(self._before_norm(name), prepend=True).remove)
                stack.callback(norm.register_forward_hook(self._after_norm, always_call=True).remove)
            stack.enter_context(self)
            yield

    def see(self, output: Any) -> None:
        """What the model returns is read by others."""
        for leaf in leaves(output).values():
            self._note(leaf, None)

    def found(self) -> dict[str, str]:
        """Layer → the BatchNorm that alone reads its output, and reads nothing else."""
        pairs = {}
        for name, readers in self._readers.items():
            (norm,) = readers if len(readers) == 1 else (None,)
            if norm is not None and self._read[norm] == {name}:
                pairs[name] = norm
        return pairs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            self._note(leaf, self._inside)
        return func(*args, **(kwargs or {}))

    def _note(self, leaf: Any, reader: str | None) -> None:
        if isinstance(leaf, Tensor) and leaf in self._outputs:
            self._readers[self._outputs[leaf]].add(reader)

    def _after_layer(self, name: str, n_axes: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            # BatchNorm takes the second axis for that of channels, which it is only in outputs of so many axes.
            if isinstance(output, Tensor) and output.dim() == n_axes:
                self._outputs[output] = name
            else:
                self._readers[name].add(None)

        return hook

    def _before_norm(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self._inside = name
            self._read[name].add(self._outputs.get(args[0]) if args and isinstance(args[0], Tensor) else None)

        return hook

    def _after_norm(self, *_: Any) -> None:
        self._inside = None

"""What the BatchNorms of a model meet: data like that of training or not, and which layers they follow.

Images in 0–255 or 0–1 where the model expects others give statistics, and a compression, for inputs that it will never
see. The running mean and variance of the first BatchNorm that is called know what the training data looked like there.

A BatchNorm can be folded into a layer if it is all that reads the layer's output, which is seen while the model runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from tensigma.layers import Geometry, is_compiled
from tensigma.running import leaves

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
        seen, remembered = getattr(layer, "num_batches_tracked", None), layer.running_mean
        if remembered is None or layer.running_var is None or seen is None or not int(seen):
            return None
        mean = torch.as_tensor(self._sum) / self._count
        variance = (torch.as_tensor(self._squares) / self._count - mean.square()).clamp_min(0)
        usual_mean, usual_variance = remembered.double().cpu(), layer.running_var.double().cpu()
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


class Followers(TorchDispatchMode):
    """Sees which of ``layers`` hand their output to one BatchNorm and to nothing else.

    Every operation that takes the output of a layer counts, also one that changes it in place or takes a view of it.

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

"""A copy of a model, also of one that holds what :func:`copy.deepcopy` refuses."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

from tensigma.errors import InputError

ModuleT = TypeVar("ModuleT", bound=nn.Module)
# Tensors that a model keeps from its last pass lie in its attributes, or in lists and dicts there.
_DEPTH = 3


def copied(model: ModuleT, shared: Iterable[str] = ()) -> ModuleT:
    """A deep copy of ``model``.

    Tensors that were computed and are kept as attributes (the weight of a pruned or weight-normed layer, an output of
    the last pass) are copied without their history. Modules named in ``shared`` are not copied: the copy has those of
    ``model``, to be replaced next. Of a large network, their weights may be most of the memory that a copy takes.

    >>> import torch
    >>> from torch.nn.utils import prune
    >>> layer = prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=0.5)
    >>> torch.equal(copied(layer).weight, layer.weight)
    True
    """
    modules = dict(model.named_modules())
    memo: dict[int, Any] = {id(modules[name]): modules[name] for name in shared if name in modules}
    for module in modules.values():
        if id(module) in memo:
            continue
        for tensor in _tensors(vars(module), _DEPTH):
            if not tensor.is_leaf or tensor.is_inference():
                memo[id(tensor)] = _without_history(tensor)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise InputError(f"the model cannot be copied: {_culprit(model)}{error}") from error


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item, depth - 1)


def _without_history(tensor: Tensor) -> Tensor:
    plain = tensor.detach().clone()
    return nn.Parameter(plain, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else plain


def _culprit(model: nn.Module) -> str:
    """The attribute that cannot be copied, in words for the front of a message."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            try:
                copy.deepcopy(value)
            except Exception:
                return f"its attribute {f'{name}.{key}' if name else key!s} is a {type(value).__name__}; remove it: "
    return ""

"""Models that cannot be differentiated, because part of them runs outside PyTorch."""

from __future__ import annotations

from torch import nn

from tensigma.errors import InputError


def has_gradients(model: nn.Module) -> bool:
    """Whether gradients pass through ``model``: not if a module in it has the attribute ``has_gradients = False``.

    >>> black_box = nn.Identity()
    >>> black_box.has_gradients = False
    >>> has_gradients(nn.Linear(2, 2)), has_gradients(nn.Sequential(nn.Linear(2, 2), black_box))
    (True, False)
    """
    return all(getattr(module, "has_gradients", True) for module in model.modules())


def check_gradients(model: nn.Module, what: str, instead: str) -> None:
    """Refuse ``what`` for a model without gradients, and say what to do instead."""
    if not has_gradients(model):
        raise InputError(
            f"{what} needs gradients, and a model that came as an ONNX file has none: nodes between its layers run in "
            f"ONNX Runtime. {instead}"
        )

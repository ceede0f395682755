"""Borrowing a model: whatever happens inside, it is handed back as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from tensigma.errors import InputError


@contextmanager
def borrowed(model: nn.Module, device: torch.device | str | None = None) -> Iterator[nn.Module]:
    """``model`` in evaluation mode, on ``device`` if given; mode, gradient flags, device and RNG are restored on exit.

    >>> model = nn.Sequential(nn.Dropout())
    >>> with borrowed(model):
    ...     inside = model[0].training
    >>> inside, model[0].training
    (False, True)
    """
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    home = device_of(model)
    with kept_rng():
        try:
            model.eval()
            if device is not None:
                _refuse_many_devices(model)
                model.to(device)
            yield model
        finally:
            if device is not None and home is not None:
                model.to(home)
            for module, training in modes:
                module.training = training
            for parameter, requires_grad in flags:
                parameter.requires_grad_(requires_grad)


@contextmanager
def kept_rng() -> Iterator[None]:
    """Leave the random number generators of torch, NumPy and Python as they were found."""
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    # Asking an unused GPU for its state would start it.
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])  # noqa: NPY002
        torch.set_rng_state(state[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def device_of(model: nn.Module) -> torch.device | None:
    """Where the first parameter or buffer of ``model`` lives; None for a model without any."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return None


def _refuse_many_devices(model: nn.Module) -> None:
    devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        raise InputError(
            f"the model is spread over {', '.join(sorted(devices))}; call calibrate without device= to leave it so"
        )

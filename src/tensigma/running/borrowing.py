"""Using a model and restoring its state afterwards, also after an error."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from tensigma.errors import InputError, TensigmaError
from tensigma.running.batches import Batch
from tensigma.running.inputs import call, moved, shape_of


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
                # Parameters made in inference mode can be changed only there.
                with torch.inference_mode(parameter.is_inference()):
                    parameter.requires_grad_(requires_grad)


@contextmanager
def kept_rng() -> Iterator[None]:
    """Restore the random number generators of torch, NumPy and Python on exit."""
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    # Asking an unused GPU for its state would initialise it.
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])  # noqa: NPY002
        torch.set_rng_state(state[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def seed_all(seed: int) -> None:
    """Seed every generator that a loader, an augmentation or a dropout layer may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


def run(model: nn.Module, batch: Batch) -> Any:
    """The output of ``model`` for a batch, on the model's own device; an error in its forward pass names the batch.

    >>> run(nn.Linear(3, 2), Batch(0, torch.zeros(4, 3), None)).shape
    torch.Size([4, 2])
    """
    device = device_of(model)
    x = moved(batch.inputs, device)
    try:
        return call(model, x)
    except TensigmaError:
        raise
    except Exception as error:
        raise InputError(
            f"the model rejected batch {batch.index} ({shape_of(x)}): {type(error).__name__}: {error}"
        ) from error


def allows_gradients(model: nn.Module, names: Iterable[str], batch: Batch) -> bool:
    """Whether gradients can pass through the layers ``names``.

    They cannot if the model computes inside ``torch.no_grad`` or ``torch.inference_mode`` of its own, or was built in
    inference mode.

    >>> allows_gradients(nn.Sequential(nn.Linear(3, 2)), ["0"], Batch(0, torch.zeros(4, 3), None))
    True
    """
    if any(parameter.is_inference() for parameter in model.parameters()):
        return False
    allowed: list[bool] = []

    def hook(*_: Any) -> None:
        allowed.append(torch.is_grad_enabled() and not torch.is_inference_mode_enabled())

    with borrowed(model), torch.enable_grad(), ExitStack() as stack:
        for name in names:
            stack.callback(model.get_submodule(name).register_forward_hook(hook).remove)
        run(model, Batch(batch.index, batch.inputs[:1], None))
    return all(allowed)


def device_of(model: nn.Module) -> torch.device | None:
    """The device of the first parameter or buffer of ``model``; None if it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return None


def _refuse_many_devices(model: nn.Module) -> None:
    devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        raise InputError(
            f"the model is spread over {', '.join(sorted(devices))}; call calibrate without {{device}} to keep it so",
            parameters=("device",),
        )

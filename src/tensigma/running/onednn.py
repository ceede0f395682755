"""Backward passes that keep clear of a memory error in oneDNN.

In the weight gradient of a strided 1×1 convolution in channels_last, oneDNN 3.12 (in torch 2.13) writes past its
workspace if the layer has fewer input channels than a block: 8 with AVX2, as measured, and 16 with AVX-512, as reported
in https://github.com/uxlfoundation/oneDNN/issues/6035. The process dies, hangs or goes on with wrong numbers. For a
transposed convolution it is the output channels that count. Contiguous tensors are safe.

PyTorch decides by strides: the convolution runs in channels_last if either the input or the weight looks like it. A 1×1
weight, or an input of one channel, can look like it and yet be contiguous by ``is_contiguous()``, so that
``contiguous()`` returns it unchanged. Hence this module sets the strides themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from tensigma.errors import InputError

__all__ = ["at_risk", "put_back", "safe_backward", "safe_layout"]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
#: The largest block of channels in oneDNN, that of AVX-512. It is used on every CPU, so that all behave alike.
BLOCK = 16


def at_risk(layer: nn.Module) -> bool:
    """Whether the weight gradient of ``layer`` may reach the faulty code of oneDNN, for some input and on some CPU.

    >>> [at_risk(nn.Conv2d(4, 64, kernel_size, stride)) for kernel_size, stride in [(1, 2), (1, 1), (3, 2)]]
    [True, False, False]
    """
    # Layers with groups or padding, and those in one or three dimensions, were safe in torch 2.13 with AVX2. They count
    # all the same: they are saved by choices inside torch and oneDNN, and a contiguous layout costs them little.
    if isinstance(layer, CONVOLUTIONS):
        n_channels = layer.in_channels // layer.groups
    elif isinstance(layer, TRANSPOSED):
        n_channels = layer.out_channels // layer.groups
    else:
        return False
    return n_channels < BLOCK and max(layer.kernel_size) == 1 and max(layer.stride) > 1


def safe_layout(layer: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
    """``tensors`` in a layout in which ``layer`` can be differentiated; unchanged if the layer is not at risk.

    For single calls with parameters from outside: the input, the weight and the gradient of the output all have to go
    through here, before the weight is marked as requiring a gradient or with the result in its place.
    """
    return tuple(map(_plain, tensors)) if at_risk(layer) else tensors


# What torch says where a model switches gradients off itself.
_NO_GRADIENTS = ("does not require grad", "Inference tensors cannot be saved for backward")


@contextmanager
def safe_backward(*models: nn.Module) -> Iterator[None]:
    """Inside, the layers of ``models`` that are at risk compute in the contiguous layout; all others run as usual.

    Both the forward and the backward pass have to be inside. Parameters may be trained inside; on exit they have the
    strides that they had before. Layers are recognised by their class: a convolution that a model computes by
    ``torch.nn.functional`` or in TorchScript is not covered.
    """
    layers = dict.fromkeys(layer for model in models for layer in model.modules() if at_risk(layer))
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(_plain_inputs, with_kwargs=True).remove)
            # All parameters, not the weight alone: a parametrised weight is computed from others and inherits strides.
            for parameter in layer.parameters():
                stack.callback(put_back, parameter, parameter.data)
                parameter.data = _plain(parameter.data)
        try:
            yield
        except RuntimeError as error:
            if any(sign in str(error) for sign in _NO_GRADIENTS):
                raise InputError(
                    "no gradients pass through the model: it computes inside torch.no_grad or torch.inference_mode; "
                    "take that out of its forward"
                ) from error
            raise


def _plain(tensor: Tensor) -> Tensor:
    """``tensor`` with the strides of a new tensor of its shape, copied only if its elements are in another order."""
    return tensor.reshape(-1).view(tensor.shape)


def _plain_inputs(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    plain = [_plain(value) if isinstance(value, Tensor) else value for value in (*args, *kwargs.values())]
    return tuple(plain[: len(args)]), dict(zip(kwargs, plain[len(args) :], strict=True))


def put_back(parameter: nn.Parameter, before: Tensor) -> None:
    """Give ``parameter`` back the memory ``before``, filled with the values that it has now."""
    values = parameter.data
    if (values.shape, values.dtype, values.device) != (before.shape, before.dtype, before.device):
        return  # The model was converted inside; the old memory no longer fits.
    # As a rule the memory is the same and only strides differ, in which case copy_ would complain about the overlap.
    if values.data_ptr() != before.data_ptr():
        before.copy_(values)
    parameter.data = before

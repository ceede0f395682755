"""Check that an exported file computes what the model computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tensigma.errors import ExportError
from tensigma.running import Inputs, call, copied, leaves, mapped, taken, tensors_in

_SIZES = (1, 3, 5)
#: Two ways of summing differ by more than each differs from the exact sum.
_SLACK = 4


def sizes_to_check(size: int, dynamic_batch: bool) -> tuple[int, ...]:
    """Batch sizes other than that of the example, or only that one if it is fixed.

    >>> sizes_to_check(8, True), sizes_to_check(3, True), sizes_to_check(8, False)
    ((1, 3, 5), (1, 5), (8,))
    """
    return tuple(other for other in _SIZES if other != size) if dynamic_batch else (size,)


def parity(
    model: nn.Module,
    written: Callable[..., Any],
    x: Inputs,
    sizes: tuple[int, ...],
    tolerance: float,
    most: float | None = None,
) -> tuple[float, float]:
    """The largest difference and the largest value of an output on batches like ``x``; raises if they differ much.

    ``tolerance`` and ``most`` are shares of the largest value. Each of several outputs is compared with its own largest
    value, and the one that differs most is returned. Large terms that cancel make a model round badly; if the model is
    itself that far from its result in double precision, up to ``most`` is allowed.

    >>> parity(nn.Identity(), lambda x: x, torch.ones(2, 3), (1, 3), 1e-4)
    (0.0, 1.0)
    """
    differences: list[float] = []
    largest: list[float] = []
    for size in sizes:
        inputs = _varied(x, size)
        try:
            answer = call(model, inputs)
        except RuntimeError as error:
            raise ExportError(
                f"the model itself rejects a batch of {size} ({error}); pass {{dynamic_batch}} if it takes one size",
                parameters=("dynamic_batch=False",),
            ) from error
        expected, outputs = list(leaves(answer).values()), list(leaves(call(written, inputs)).values())
        expected_shapes, shapes = ([tuple(tensor.shape) for tensor in side] for side in (expected, outputs))
        if expected_shapes != shapes:
            raise ExportError(
                f"for a batch of {size} the file gives outputs of shape {shapes}, the model {expected_shapes}; "
                "the file was not kept"
            )
        pairs = zip(expected, outputs, strict=True)
        gaps = [_largest(output.double() - target.detach().double()) for target, output in pairs]
        reached = [_largest(target.detach().double()) for target in expected]
        differences = [_larger(*pair) for pair in zip(gaps, differences or gaps, strict=True)]
        largest = [_larger(*pair) for pair in zip(reached, largest or reached, strict=True)]
        for index, (difference, scale) in enumerate(zip(differences, largest, strict=True)):
            if difference <= tolerance * scale:
                continue
            if difference <= min(_SLACK * _rounding(model, inputs, expected)[index], (most or 0.0) * scale):
                continue
            which = f" in output {list(leaves(answer))[index]!r}" if len(expected) > 1 else ""
            raise ExportError(
                f"the file differs from the model by up to {difference:.2e}{which}, where values reach {scale:.2e} and"
                f" the tolerance is {tolerance:.0e} of that; the file was not kept. Pass a larger tolerance if that is"
                " acceptable"
            )
    return max(zip(differences, largest, strict=True), key=lambda pair: pair[0] / (pair[1] or 1.0), default=(0.0, 0.0))


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _larger(one: float, other: float) -> float:
    """The larger of the two; NaN if either is NaN."""
    return one if math.isnan(one) else max(other, one)


def _rounding(model: nn.Module, inputs: Inputs, outputs: list[Tensor]) -> list[float]:
    """How far each output is from that in double precision; 0 if the model does not run in it."""
    zeros = [0.0] * len(outputs)
    if not all(tensor.is_floating_point() for tensor in tensors_in(inputs)):
        return zeros
    try:
        exact = leaves(call(copied(model).double(), mapped(inputs, Tensor.double))).values()
        return [_largest(output.double() - truth) for output, truth in zip(outputs, exact, strict=True)]
    except (RuntimeError, ValueError):
        return zeros


def _varied(x: Inputs, size: int) -> Inputs:
    """``size`` inputs like those of ``x``, all different, so that mixed-up samples are noticed."""
    generator = torch.Generator().manual_seed(size)

    def varied(chosen: Tensor) -> Tensor:
        if not chosen.is_floating_point():
            return chosen
        noise = torch.randn(chosen.shape, generator=generator).to(chosen)
        return chosen + 0.1 * chosen.std(correction=0) * noise

    chosen: Inputs = mapped(taken(x, torch.arange(size) % len(x)), varied)
    return chosen

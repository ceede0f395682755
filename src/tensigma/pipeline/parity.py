"""Whether what was written computes what the model computes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tensigma.errors import ExportError

_SIZES = (1, 3, 5)
#: Two ways of summing are apart by more than each is from the truth.
_SLACK = 4


def sizes_to_check(size: int, dynamic_batch: bool) -> tuple[int, ...]:
    """Sizes of batch other than that of the example, or that one where there is no other.

    >>> sizes_to_check(8, True), sizes_to_check(3, True), sizes_to_check(8, False)
    ((1, 3, 5), (1, 5), (8,))
    """
    return tuple(each for each in _SIZES if each != size) if dynamic_batch else (size,)


def parity(
    model: nn.Module,
    written: Callable[[Tensor], Any],
    x: Tensor,
    sizes: tuple[int, ...],
    tolerance: float,
    most: float | None = None,
) -> tuple[float, float]:
    """The largest difference and the largest output on batches like ``x``; an error where the former is too large.

    ``tolerance`` and ``most`` are shares of the largest output. Large terms that cancel make a model round worse than
    others; where it is itself that far from what it gives in double precision, up to ``most`` is allowed.

    >>> parity(nn.Identity(), lambda x: x, torch.ones(2, 3), (1, 3), 1e-4)
    (0.0, 1.0)
    """
    difference = largest = 0.0
    for size in sizes:
        inputs = _varied(x, size)
        try:
            expected = leaves(model(inputs))
        except RuntimeError as error:
            raise ExportError(
                f"the model itself rejects a batch of {size} ({error}); pass dynamic_batch=False if it takes one size"
            ) from error
        found = leaves(written(inputs))
        wanted, came = ([tuple(each.shape) for each in outputs] for outputs in (expected, found))
        if wanted != came:
            raise ExportError(
                f"for a batch of {size} the file gives outputs of shape {came}, the model {wanted}; it was not kept"
            )
        for own, other in zip(expected, found, strict=True):
            if own.numel():
                own_values = own.detach().double()
                gap = float((other.double() - own_values).abs().max())
                difference = gap if math.isnan(gap) else max(difference, gap)
                largest = max(largest, float(own_values.abs().max()))
        if not difference <= tolerance * largest and not difference <= min(
            _SLACK * _rounding(model, inputs, expected), (most or 0.0) * largest
        ):
            raise ExportError(
                f"the file differs from the model by up to {difference:.2e}, where outputs reach {largest:.2e} and the"
                f" tolerance is {tolerance:.0e} of that; it was not kept. Pass a larger tolerance if that is acceptable"
            )
    return difference, largest


def _rounding(model: nn.Module, inputs: Tensor, outputs: list[Tensor]) -> float:
    """How far outputs are from those in double precision; 0 where that cannot be had."""
    if not inputs.is_floating_point():
        return 0.0
    try:
        exact = leaves(copy.deepcopy(model).double()(inputs.double()))
        return max(float((own.double() - other).abs().max()) for own, other in zip(outputs, exact, strict=True))
    except (RuntimeError, ValueError):
        return 0.0


def _varied(x: Tensor, size: int) -> Tensor:
    """So many inputs like those of ``x``, no two the same, so that samples which are mixed up show."""
    chosen = x[torch.arange(size) % len(x)]
    if not chosen.is_floating_point():
        return chosen
    generator = torch.Generator().manual_seed(size)
    noise = torch.randn(chosen.shape, generator=generator).to(chosen)
    return chosen + 0.1 * chosen.std(correction=0) * noise


def leaves(output: Any) -> list[Tensor]:
    """All tensors that a model returned, in order.

    >>> [int(each) for each in leaves({"a": torch.tensor(1), "b": (torch.tensor(2), [torch.tensor(3)])})]
    [1, 2, 3]
    """
    if isinstance(output, Tensor):
        return [output]
    items = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return [leaf for item in items for leaf in leaves(item)]

"""Settings of a tool that lead to a wanted number of parameters."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def n_params(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def nearest_above(
    count: Callable[[float], int], wanted: float, *, low: float, high: float, scan: int = 1, steps: int = 12
) -> float:
    """The setting between ``low`` (large model) and ``high`` (small model) that leaves the fewest parameters that are
    not below ``wanted``: a tool that cannot hit a rate exactly stays below it, which is to its advantage.

    Where the number of parameters does not fall all the way, ``scan`` settings are tried in rising order, and the
    first that leaves too few bounds the search. Raises ValueError where none comes near.
    """
    settings = [low + (high - low) * index / scan for index in range(1, scan + 1)]
    counts: list[int] = []
    for setting in settings:
        counts.append(count(setting))
        if counts[-1] < wanted:
            break
    if counts[-1] >= wanted:
        least = min(counts)
        if least > 1.05 * wanted:
            raise ValueError(f"the smallest setting leaves {least:,} parameters; {wanted:,.0f} were wanted")
        return settings[counts.index(least)]
    high = settings[len(counts) - 1]
    low = settings[len(counts) - 2] if len(counts) > 1 else low
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if count(middle) >= wanted else (low, middle)
    return low

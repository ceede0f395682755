"""Whether a smaller model is a faster one: both in turn, for about a second."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from tensigma.running import Inputs, borrowed, call, device_of, n_samples, processor_clock, taken, threads

# The fewest rounds, the most, and the most samples of a batch.
_ROUNDS, _MOST_ROUNDS, _MOST_SAMPLES = 3, 20, 16
#: A ratio of times that is more than noise.
_CLEARLY = 1.1


def speed_note(
    original: nn.Module,
    small: nn.Module,
    inputs: Inputs,
    *,
    seconds: float = 1.0,
    clock: Callable[[], float] | None = None,
) -> dict[str, Any] | None:
    """Times of both models in PyTorch on one thread of the CPU, as plain data, for the notes of a report.

    ``report.with_notes(speed=note)`` shows them in the last line of the report and on its page, and :func:`is_slower`
    says whether the smaller model is the slower one.

    It takes about ``seconds``, on as many of ``inputs`` as allow that, up to 16. None for a model that takes too long
    for it even with one, and for one on another device: :func:`tensigma.evaluate` with ``latency=True`` times those.

    >>> note = speed_note(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 8)), torch.ones(4, 8))
    >>> sorted(note), note["batch"], speedup_of(note) == note["before"] / note["after"]
    (['after', 'batch', 'before'], 4, True)
    """
    if any((device or torch.device("cpu")).type != "cpu" for device in map(device_of, (original, small))):
        return None
    clock = clock or processor_clock()

    def timed(model: nn.Module, x: Inputs) -> float:
        start = clock()
        call(model, x)
        return clock() - start

    with ExitStack() as stack, torch.inference_mode(), threads(1):
        for model in (original, small):
            stack.enter_context(borrowed(model))
        one = taken(inputs, slice(1))
        timed(original, one)
        alone = max(timed(original, one), 1e-9)
        if alone > seconds / 4:
            return None
        # The small model may be the slower one, hence half of the time for the fewest rounds.
        batch = max(1, min(n_samples(inputs), _MOST_SAMPLES, int(seconds / (4 * _ROUNDS * alone))))
        x = taken(inputs, slice(batch))
        best, spent = [math.inf, math.inf], 0.0
        for turn in range(_MOST_ROUNDS):
            for index, model in enumerate((original, small)):
                taking = timed(model, x)
                spent += taking
                # The first run of a shape prepares what later ones use.
                best[index] = taking if turn < 2 else min(best[index], taking)
            if turn + 1 >= _ROUNDS and spent > seconds:
                break
    before, after = (max(value, 1e-9) for value in best)
    return {"batch": batch, "before": before, "after": after}


def speedup_of(note: Mapping[str, Any]) -> float:
    """How many times faster the small model is."""
    return float(note["before"] / note["after"])


def is_slower(note: Mapping[str, Any]) -> bool:
    """Whether such a note says that the small model takes clearly longer.

    >>> is_slower({"before": 0.6, "after": 1.0}), is_slower({"before": 0.95, "after": 1.0})
    (True, False)
    """
    return speedup_of(note) * _CLEARLY < 1


def speed_in_words(note: Mapping[str, Any]) -> str:
    """What such a note says.

    >>> speed_in_words({"batch": 16, "before": 0.01, "after": 0.016})
    '1.60 times slower in PyTorch: 16 instead of 10 ms for 16 samples on one thread'
    """
    before, after = 1000 * note["before"], 1000 * note["after"]
    ratio = speedup_of(note)
    words = f"{ratio:.2f} times faster" if ratio >= 1 else f"{1 / ratio:.2f} times slower"
    samples = "1 sample" if note["batch"] == 1 else f"{note['batch']} samples"
    return f"{words} in PyTorch: {after:.3g} instead of {before:.3g} ms for {samples} on one thread"

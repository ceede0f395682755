"""How long models take, measured in turn on one thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from tensigma.graphs import deployed
from tensigma.running import Inputs, borrowed, call, device_of, moved, n_samples, tensors_in, threads

_WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds for one batch. The minimum is what the machine can do; the spread is what its other work adds."""

    batch: int
    rounds: int
    minimum: float
    median: float
    #: (90th percentile − minimum) ÷ minimum: how much to trust a single run.
    spread: float


def measure_latency(models: Sequence[nn.Module], inputs: Inputs, *, rounds: int = 20) -> list[Timing]:
    """Forward passes of all models, taken in turn so that other load on the machine affects all alike.

    A model that came as an ONNX file is measured as it will be used, whole in ONNX Runtime.

    >>> one, other = measure_latency([nn.Linear(8, 8), nn.Identity()], torch.ones(4, 8), rounds=5)
    >>> one.batch, one.rounds, 0 < one.minimum <= one.median
    (4, 5, True)
    """
    models = [deployed(model) for model in models]
    times: list[list[float]] = [[] for _ in models]
    with ExitStack() as stack, torch.inference_mode(), threads(1):
        for model in models:
            stack.enter_context(borrowed(model))
        placed = [moved(inputs, device_of(model)) for model in models]
        gpus = {tensor.device for x in placed for tensor in tensors_in(x) if tensor.is_cuda}
        for turn in range(_WARM_UP + rounds):
            for model, x, seconds in zip(models, placed, times, strict=True):
                start = time.perf_counter()
                call(model, x)
                for gpu in gpus:
                    torch.cuda.synchronize(gpu)
                if turn >= _WARM_UP:
                    seconds.append(time.perf_counter() - start)
    return [_summary(seconds, n_samples(inputs)) for seconds in times]


def _summary(times: list[float], batch: int) -> Timing:
    ordered = sorted(times)
    high = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    minimum = ordered[0]
    return Timing(
        batch=batch,
        rounds=len(ordered),
        minimum=minimum,
        median=statistics.median(ordered),
        spread=(high - minimum) / minimum if minimum > 0 else 0.0,
    )

"""Latencies of several models in one run, and sizes of files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from tensigma.evaluation import Size, Timing, measure_latency


def measure_together(models: Mapping[str, nn.Module], inputs: Tensor, *, rounds: int = 20) -> dict[str, Timing]:
    """Latencies by name, measured in turn on one thread.

    >>> import torch
    >>> times = measure_together({"one": nn.Identity(), "other": nn.Linear(4, 4)}, torch.ones(2, 4), rounds=2)
    >>> list(times), times["one"].batch
    (['one', 'other'], 2)
    """
    return dict(zip(models, measure_latency(list(models.values()), inputs, rounds=rounds), strict=True))


def file_size(size: Size, path: Path) -> Size:
    """The same size, with the bytes of the file ``path``."""
    return replace(size, bytes=path.stat().st_size)

"""Models and data for commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tensigma.cli.screen import Screen
from tensigma.deployment import load
from tensigma.errors import InputError
from tensigma.running import Batches, shard
from tensigma.zoo import Data, load_data, load_model

#: Schemes whose models come with random weights unless a file is given.
_UNTRAINED = ("zoo", "torchvision", "timm")


def is_untrained(name: str, weights: Path | None) -> bool:
    """Whether a model of this name would have random weights."""
    return weights is None and name.partition(":")[0] in _UNTRAINED


def model_of(
    screen: Screen, name: str, weights: Path | None, device: torch.device | None, seed: int = 0, *, warn: bool = True
) -> nn.Module:
    """The model of this name on its device."""
    torch.manual_seed(seed)
    model = load_model(name, weights)
    if warn and is_untrained(name, weights):
        screen.warn(f"the weights of {name} are random; give trained ones with --weights FILE")
    if warn and weights is None and name.partition("?")[0].rpartition(":")[0].endswith(".py"):
        screen.note(f"no --weights: those that {name} makes are taken for the trained ones")
    return model if device is None else model.to(device)


def compressed_of(screen: Screen, folder: Path, original: nn.Module) -> nn.Module:
    """The compressed model in a folder, in the precision in which the original computes."""
    model = load(folder, original)
    own = next((parameter.dtype for parameter in original.parameters()), torch.float32)
    halves = (torch.float16, torch.bfloat16)
    if own not in halves and any(parameter.dtype in halves for parameter in model.parameters()):
        screen.note(f"{folder} is stored in half precision; it is computed with in {str(own).removeprefix('torch.')}")
        model = model.to(own)
    return model


def data_of(names: Sequence[str] | None, batch_size: int, workers: int) -> Any:
    """The data of these names; None where nothing was named."""
    return load_data(names, batch_size=batch_size, workers=workers) if names else None


def needed(value: Any, message: str) -> Any:
    """``value``, or the error that says why it is needed."""
    if value is None:
        raise InputError(message)
    return value


def own_share(screen: Screen, data: Any, max_samples: int | None) -> tuple[Any, int | None]:
    """What this process calibrates with, and how many samples at most."""
    if isinstance(data, Data):
        limited = data if max_samples is None else data.take(max_samples)
        if screen.size > limited.n_samples:
            raise InputError(f"{limited.n_samples} images cannot be shared by {screen.size} processes; start fewer")
        return (limited if screen.size == 1 else limited.shard(screen.rank, screen.size)), None
    if screen.size == 1:
        return data, max_samples
    most = None if max_samples is None else max(1, (max_samples + screen.size - 1 - screen.rank) // screen.size)
    return shard(data, rank=screen.rank, size=screen.size), most


class _First:
    """The first samples of batches, pass after pass."""

    def __init__(self, batches: Any, n_samples: int) -> None:
        self._batches, self._n_samples = batches, n_samples

    def __iter__(self) -> Iterator[Any]:
        for batch in Batches(self._batches, max_samples=self._n_samples, name="data"):
            labels = batch.labels
            yield batch.inputs if labels is None else (batch.inputs, labels)

    @property
    def name(self) -> str:
        """What the data is called in results."""
        return str(self._batches.name)


def first_of(data: Any, max_samples: int | None) -> Any:
    """No more than so many samples of the data."""
    if data is None or max_samples is None:
        return data
    return data.take(max_samples) if isinstance(data, Data) else _First(data, max_samples)


def name_of(data: Any) -> str:
    """What the data is called in results."""
    return str(data.name)

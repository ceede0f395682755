"""Models and data for commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tensigma as ts
from tensigma.cli.screen import Screen
from tensigma.errors import InputError

#: A torch.nn.Module. Commands are defined without torch, which is imported when one of them starts.
Network = Any
#: Schemes whose models have random weights unless a file is given.
_UNTRAINED = ("zoo", "torchvision", "timm")


def is_untrained(name: str, weights: Path | None) -> bool:
    """Whether the model of this name has random weights."""
    return weights is None and name.partition(":")[0] in _UNTRAINED


def model_of(
    screen: Screen, name: str, weights: Path | None, device: Any, seed: int = 0, *, warn: bool = True
) -> Network:
    """The model of this name, on its device."""
    ts.running.seed_all(seed)
    model = ts.zoo.load_model(name, weights)
    if warn and is_untrained(name, weights):
        screen.warn(f"the weights of {name} are random; give trained ones with --weights FILE")
    if warn and weights is None and name.partition("?")[0].rpartition(":")[0].endswith(".py"):
        screen.note(f"no --weights: the weights that {name} returns are taken as trained")
    return model if device is None else model.to(device)


def compressed_of(screen: Screen, folder: Path, original: Network) -> Network:
    """The compressed model in a folder, in the precision of the original if that is higher."""
    model = ts.load(folder, original)
    precision = next((parameter.dtype for parameter in original.parameters()), None)
    halves = [parameter for parameter in model.parameters() if parameter.dtype.itemsize == 2]
    if halves and precision is not None and precision.itemsize > 2:
        shown = str(precision).removeprefix("torch.")
        screen.note(f"{folder} is stored in half precision; computations use {shown}")
        model = model.to(precision)
    return model


def data_of(names: Sequence[str] | None, batch_size: int, workers: int) -> Any:
    """The data of these names; None without names."""
    return ts.zoo.load_data(names, batch_size=batch_size, workers=workers) if names else None


def required_data(names: Sequence[str] | None, batch_size: int, workers: int) -> Any:
    """The same for a command that cannot do without."""
    if not names:
        raise InputError("no images to work on; name them with --data, for example --data imagefolder:DIR")
    return data_of(names, batch_size, workers)


def share_of_process(screen: Screen, data: Any, max_samples: int | None) -> tuple[Any, int | None]:
    """The data that this process calibrates with, and its ``max_samples``."""
    if isinstance(data, ts.zoo.Data):
        limited = data if max_samples is None else data.take(max_samples)
        if screen.size > limited.n_samples:
            raise InputError(
                f"{limited.n_samples} images cannot be shared among {screen.size} processes; start fewer processes"
            )
        return (limited if screen.size == 1 else limited.shard(screen.rank, screen.size)), None
    if screen.size == 1:
        return data, max_samples
    most = None if max_samples is None else max(1, (max_samples + screen.size - 1 - screen.rank) // screen.size)
    return ts.running.shard(data, rank=screen.rank, size=screen.size), most


def own_share(screen: Screen, data: Any) -> Any:
    """The data that this process fits layers on and tries plans with; None if there is none."""
    count = None if data is None else ts.running.count_batches(data)
    # Batches that are too few for all processes are taken whole by each; means over them are the same.
    if data is None or screen.size == 1 or (not isinstance(data, ts.zoo.Data) and count and count < screen.size):
        return data
    return share_of_process(screen, data, None)[0]


class _First:
    """The first samples of batches, in every pass."""

    def __init__(self, batches: Any, n_samples: int) -> None:
        self._batches, self._n_samples = batches, n_samples

    def __iter__(self) -> Iterator[Any]:
        for batch in ts.running.Batches(self._batches, max_samples=self._n_samples, name="data"):
            labels = batch.targets
            yield (batch.inputs,) if labels is None else (batch.inputs, labels)

    @property
    def name(self) -> str:
        """The name of the data in results."""
        return str(self._batches.name)


def first_of(data: Any, max_samples: int | None) -> Any:
    """At most ``max_samples`` samples of the data."""
    if data is None or max_samples is None:
        return data
    return data.take(max_samples) if isinstance(data, ts.zoo.Data) else _First(data, max_samples)


def name_of(data: Any) -> str:
    """The name of the data in results."""
    return str(data.name)

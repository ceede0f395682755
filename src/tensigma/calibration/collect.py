"""Running a model over data and gathering the moments of its layers."""

from __future__ import annotations

import difflib
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from tensigma.calibration.batches import count_batches, input_of, iterate
from tensigma.calibration.guard import borrowed, device_of
from tensigma.calibration.moments import Moments
from tensigma.calibration.stats import Calibration, LayerStats, compressible, fingerprint
from tensigma.errors import CalibrationWarning, InputError, TensigmaError
from tensigma.layers import Geometry

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a calibration has come, in batches.

    >>> Progress(done=5, total=20, samples=80, seconds=2.0).remaining
    6.0
    """

    done: int
    total: int | None
    samples: int
    seconds: float

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def remaining(self) -> float | None:
        """Seconds to go at the present rate, where the end is known."""
        if self.total is None or not self.done:
            return None
        return self.seconds / self.done * (self.total - self.done)


def calibrate(
    model: nn.Module,
    batches: Any,
    *,
    layers: str | Sequence[str] | None = None,
    max_samples: int | None = None,
    max_batches: int | None = None,
    input: str | int | None = None,
    device: torch.device | str | None = None,
    progress: bool | Callable[[Progress], None] = False,
    data_name: str | None = None,
) -> Calibration:
    """Gather the moments of the input of every convolution and Linear layer of ``model`` while it runs over ``batches``.

    Labels are never read. ``batches`` is any iterable of tensors, tuples (first item is the input) or dicts (``input``
    names the entry), or a list of several such loaders. The model runs in evaluation mode and comes back as it was.

    ``layers`` are names or patterns such as ``"layer1.*"`` (default: all).

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 10))
    >>> stats = calibrate(model, [torch.randn(4, 3, 4, 4) for _ in range(2)])
    >>> {name: (layer.d, layer.count) for name, layer in stats.items()}
    {'0': (27, 128), '3': (128, 8)}
    """
    targets = select_layers(model, layers)
    with borrowed(model, device), torch.no_grad():
        collector = Collector(targets)
        with collector.attached():
            done = run(
                model,
                batches,
                collector,
                max_samples=max_samples,
                max_batches=max_batches,
                input=input,
                report=reporter(progress),
            )
        if not done:
            raise InputError("no batches: the iterable given as batches is empty")
        found = collector.finish()
    unreached = tuple(name for name in targets if name not in found)
    if unreached:
        warnings.warn(
            f"no batch reached {_listing(unreached)}: the model does not call it in its forward pass"
            if len(unreached) == 1
            else f"no batch reached {_listing(unreached)}: the model does not call them in its forward pass",
            CalibrationWarning,
            stacklevel=2,
        )
    return Calibration(found, fingerprint=fingerprint(model), data=data_name, unreached=unreached)


def select_layers(model: nn.Module, layers: str | Sequence[str] | None) -> dict[str, nn.Module]:
    """The compressible layers of ``model`` that match one of the names or patterns, in the order of the model.

    >>> list(select_layers(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Linear(2, 2)), "2"))
    ['2']
    """
    every = dict(compressible(model))
    if not every:
        raise InputError(f"{type(model).__name__} has no convolution or Linear layer that Tensigma can read")
    if layers is None:
        return every
    patterns = [layers] if isinstance(layers, str) else list(layers)
    chosen: set[str] = set()
    for pattern in patterns:
        matches = [name for name in every if name == pattern or fnmatchcase(name, pattern)]
        if not matches:
            close = difflib.get_close_matches(pattern, every, n=3, cutoff=0.4) or list(every)[:3]
            raise InputError(
                f"no layer is called {pattern!r}; close names: {', '.join(close)} (of {len(every)} layers)"
            )
        chosen.update(matches)
    return {name: module for name, module in every.items() if name in chosen}


class Collector:
    """Moments of chosen layers, fed by forward hooks while it is attached."""

    def __init__(self, targets: dict[str, nn.Module]) -> None:
        self.targets = targets
        self.moments: dict[str, Moments] = {}
        self.shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.outputs: dict[str, tuple[Tensor, int]] = {}
        self.samples: dict[str, int] = {}
        self._reached: set[str] = set()

    @contextmanager
    def attached(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in self.targets.items():
                handle = module.register_forward_hook(self._hook(name, Geometry.of(module)), with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def _hook(self, name: str, geometry: Geometry) -> Callable[..., None]:
        n_spatial = geometry.n_spatial

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            x = args[0] if args else kwargs["input"]
            if name not in self.moments:
                self.moments[name] = Moments(geometry, name=name)
                batched = x.dim() > n_spatial + 1
                self.shapes[name] = (
                    tuple(x.shape[1:] if batched else x.shape),
                    tuple(output.shape[1:] if batched else output.shape),
                )
            self.moments[name].update(x.detach())
            self._reached.add(name)
            axis = output.dim() - 1 - n_spatial
            sizes, n = self.outputs.get(name, (0.0, 0))
            self.outputs[name] = (sizes + _abs_sum(output.detach(), axis), n + output.numel() // output.shape[axis])

        return hook

    def end_batch(self, n_samples: int) -> None:
        for name in self._reached:
            self.samples[name] = self.samples.get(name, 0) + n_samples
        self._reached.clear()

    def finish(self) -> dict[str, LayerStats]:
        found = {}
        for name in self.targets:
            # Taken out one by one, so that sums and results of all layers never exist together.
            moments = self.moments.pop(name, None)
            if moments is None or not moments.count:
                continue
            stats = moments.finish()
            input_shape, output_shape = self.shapes[name]
            sizes, n = self.outputs[name]
            found[name] = LayerStats(
                mean=stats._mean,
                covariance=stats._covariance,
                rows=stats._rows,
                count=stats.count,
                samples=self.samples.get(name, 0),
                input_shape=input_shape,
                output_shape=output_shape,
                output_abs_mean=(sizes / n).to(stats.dtype),
                output_count=n,
            )
        return found


def run(
    model: nn.Module,
    batches: Any,
    collector: Collector,
    *,
    max_samples: int | None,
    max_batches: int | None,
    input: str | int | None,
    report: Callable[[Progress], None],
) -> int:
    """Feed batches to the model until they or the limits end; returns the number of batches."""
    device = device_of(model)
    total = count_batches(batches)
    if max_batches is not None:
        total = max_batches if total is None else min(total, max_batches)
    start = time.perf_counter()
    state = Progress(done=0, total=total, samples=0, seconds=0.0)
    if max_batches == 0 or max_samples == 0:
        raise InputError("max_batches and max_samples must be at least 1")
    for index, batch in enumerate(iterate(batches)):
        x = input_of(batch, input, index)
        if max_samples is not None:
            x = x[: max_samples - state.samples]
        if not len(x):
            continue
        forward(model, x.to(device) if device is not None else x, index)
        collector.end_batch(len(x))
        state = replace(state, done=state.done + 1, samples=state.samples + len(x), seconds=time.perf_counter() - start)
        if max_samples is not None and state.total is None:
            state = replace(state, total=-(-max_samples // len(x)))
        report(state)
        if state.done == max_batches or state.samples == max_samples:
            break
    return state.done


def forward(model: nn.Module, x: Tensor, index: int) -> Any:
    try:
        return model(x)
    except TensigmaError:
        raise
    except Exception as error:
        kind = f"shape {tuple(x.shape)}, {str(x.dtype).removeprefix('torch.')}"
        raise InputError(f"the model rejected batch {index} ({kind}): {type(error).__name__}: {error}") from error


def reporter(progress: bool | Callable[[Progress], None]) -> Callable[[Progress], None]:
    """What to do with progress: nothing, a line of the log, or the caller's own function."""
    if callable(progress):
        return progress
    if not progress:
        return lambda state: None

    def log(state: Progress) -> None:
        total = "" if state.total is None else f" of {state.total}"
        remaining = "" if state.remaining is None else f", {state.remaining:.0f} s to go"
        logger.info("calibration: batch %d%s, %.1f samples/s%s", state.done, total, state.rate, remaining)

    return log


def _abs_sum(output: Tensor, axis: int) -> Tensor:
    """Σ|y| for each channel, in float64."""
    others = [i for i in range(output.dim()) if i != axis]
    if not others:
        return output.abs().double()
    return torch.linalg.vector_norm(
        output, ord=1, dim=others, dtype=torch.promote_types(output.dtype, torch.float32)
    ).double()


def _listing(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(map(repr, names[:most]))
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")

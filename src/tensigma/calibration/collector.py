"""Gather the moments of layers with forward hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tensigma.calibration.fisher import squared_gradients
from tensigma.calibration.layer_stats import LayerStats
from tensigma.calibration.moments import PENDING_BYTES, Moments
from tensigma.calibration.scratch import Scratch
from tensigma.layers import Geometry
from tensigma.running import Inputs, n_samples


class Collector:
    """Moments of chosen layers, fed by forward hooks while it is attached."""

    def __init__(
        self,
        targets: Mapping[str, nn.Module],
        before: Mapping[str, LayerStats] | None = None,
        pending_bytes: int = PENDING_BYTES,
    ) -> None:
        self.targets = targets
        #: Statistics of earlier batches, merged with those of this collector at the end.
        self.before = dict(before or {})
        self.pending_bytes = pending_bytes
        self._scratch = Scratch()
        self._moments: dict[str, Moments] = {}
        self._shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._outputs: dict[str, tuple[Tensor, int]] = {}
        self._samples: dict[str, int] = {}
        self._fisher: dict[str, tuple[Tensor, int]] = {}
        self._reached: set[str] = set()
        self._listening = True

    @contextmanager
    def attached(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in self.targets.items():
                handle = module.register_forward_hook(self._hook(name, Geometry.of(module)), with_kwargs=True)
                stack.callback(handle.remove)
            yield

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """Let the model run without taking part."""
        self._listening = False
        try:
            yield
        finally:
            self._listening = True

    def _hook(self, name: str, geometry: Geometry) -> Callable[..., None]:
        n_spatial = geometry.n_spatial

        # Sums outlive the pass, so they must not be inference tensors, also where the model itself switches that on.
        @torch.inference_mode(False)
        @torch.no_grad()
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if not self._listening:
                return
            x, output = (summable(tensor) for tensor in (args[0] if args else kwargs["input"], output))
            if name not in self._moments:
                self._moments[name] = Moments(
                    geometry, name=name, pending_bytes=self.pending_bytes, scratch=self._scratch
                )
                first = int(x.dim() > n_spatial + 1)  # skip the batch axis, if there is one
                self._shapes[name] = (tuple(x.shape[first:]), tuple(output.shape[first:]))
            self._moments[name].update(x)
            self._reached.add(name)
            axis = output.dim() - 1 - n_spatial
            total, n = _abs_sum(output, axis), output.numel() // max(1, output.shape[axis])
            if name in self._outputs:
                total, n = total + self._outputs[name][0], n + self._outputs[name][1]
            self._outputs[name] = total, n

        return hook

    def add_fisher(
        self, model: nn.Module, weights: Mapping[str, Tensor], x: Inputs, labels: Tensor | None, seed: int
    ) -> None:
        """Add the squared gradients of each sample of one batch."""
        with self.deaf():
            # One generator per batch, so that a resumed run draws the same labels as an uninterrupted one.
            sums = squared_gradients(model, weights, x, labels, torch.Generator().manual_seed(seed))
        # A batch that does not reach a layer says nothing about its weights.
        for name, total in ((name, total) for name, total in sums.items() if name in self._reached):
            older, n = self._fisher.get(name, (0.0, 0))
            self._fisher[name] = total + older, n + n_samples(x)

    def end_batch(self, n_samples: int) -> None:
        for name in self._reached:
            self._samples[name] = self._samples.get(name, 0) + n_samples
        self._reached.clear()

    def peek(self) -> dict[str, LayerStats]:
        """The statistics so far; more batches may follow."""
        return {name: stats for name in self.targets if (stats := self._stats(name)) is not None}

    def finish(self) -> dict[str, LayerStats]:
        """The statistics of all batches. Sums are freed layer by layer, so that all sums and all results never exist at
        once.
        """
        finished = {}
        for name in self.targets:
            stats = self._stats(name)
            self._moments.pop(name, None)
            if stats is not None:
                finished[name] = stats
        return finished

    def _stats(self, name: str) -> LayerStats | None:
        moments = self._moments.get(name)
        before = self.before.get(name)
        if moments is None or not moments.count:
            return before
        stats = moments.finish()
        input_shape, output_shape = self._shapes[name]
        total, n_outputs = self._outputs[name]
        squares, n_fisher = self._fisher.get(name, (None, 0))
        complete = stats.replace(
            samples=self._samples.get(name, 0),
            input_shape=input_shape,
            output_shape=output_shape,
            output_abs_mean=(total / max(1, n_outputs)).to(stats.dtype),
            output_count=n_outputs,
            fisher=None if squares is None else (squares / n_fisher).to(stats.dtype),
            fisher_samples=n_fisher,
        )
        return complete if before is None else before.merge(complete)


def summable(tensor: Tensor) -> Tensor:
    """The tensor without its graph, on a device that supports float64."""
    tensor = tensor.detach()
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def _abs_sum(output: Tensor, axis: int) -> Tensor:
    """Σ|y| for each channel, in float64."""
    others = [i for i in range(output.dim()) if i != axis]
    if not others:
        return output.abs().double()
    return torch.linalg.vector_norm(
        output, ord=1, dim=others, dtype=torch.promote_types(output.dtype, torch.float32)
    ).double()

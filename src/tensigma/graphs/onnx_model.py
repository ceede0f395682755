"""ONNX files in ONNX Runtime, wrapped as modules so that they can be measured like models."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tensigma.errors import InputError, MissingExtra, StoreError
from tensigma.graphs.output_names import usual_names
from tensigma.graphs.packages import first_line, session_of
from tensigma.graphs.pieces import joined, repeated
from tensigma.graphs.value_types import TYPES, sizes_of


class OnnxModel(nn.Module):
    """The network in an ONNX file, run by ONNX Runtime on the CPU.

    Called with a tensor it returns a tensor; a network of several inputs is called with all of them, in order or by
    name. Several outputs come as a dict by name, or as a tuple if they are only numbered. :func:`tensigma.evaluate`
    takes it like any model. Where the file fixes the batch size, larger batches are run in pieces of that size.

    Args:
        path: The file. It is read once and may be removed afterwards.
        threads: Number of ONNX Runtime's threads. Latencies are measured with one.
        fixed: The values of inputs that are always the same, by name.
    """

    #: Nothing that runs in ONNX Runtime can be differentiated.
    has_gradients = False

    def __init__(
        self, path: str | os.PathLike[str], *, threads: int = 1, fixed: Mapping[str, np.ndarray] | None = None
    ) -> None:
        super().__init__()
        self.path, self._fixed = Path(path), dict(fixed or {})
        try:
            self.bytes = self.path.stat().st_size
            self._session = session_of(path, threads=threads)
        except MissingExtra:
            raise
        except Exception as error:  # the runtime raises a dozen types without a common base class
            raise StoreError(f"ONNX Runtime cannot open {self.path}: {first_line(error)}") from error
        inputs = self._session.get_inputs()
        self._shapes = {value.name: sizes_of(value.shape) for value in inputs}
        given = [value for value in inputs if value.name not in self._fixed]
        #: The names of the inputs that are given in a call, and their types.
        self._types = {value.name: TYPES[value.type][0] if value.type in TYPES else None for value in given}
        self._outputs = [node.name for node in self._session.get_outputs()]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs that are given in a call."""
        return tuple(self._types)

    @property
    def batch_size(self) -> int | None:
        """The batch size that the file fixes; None if any is accepted."""
        shape = self._shapes[self.inputs[0]]
        return shape[0] if shape else None

    def forward(self, *args: Tensor, **named: Tensor) -> Tensor | tuple[Tensor, ...] | dict[str, Tensor]:
        given = self._given(args, named)
        sizes = [len(next(iter(piece.values()))) for piece in self._pieces(given)]
        results = list(zip(*(self._run(feed, given) for feed in self.feeds(*args, **named)), strict=True))
        outputs = tuple(joined(result, sizes) for result in results)
        if len(outputs) == 1:
            return outputs[0]
        numbered = self._outputs == usual_names(len(outputs))
        return outputs if numbered else dict(zip(self._outputs, outputs, strict=True))

    def feeds(self, *args: Tensor, **named: Tensor) -> Iterator[dict[str, np.ndarray]]:
        """The inputs of the network, one set for every piece that it is run on."""
        for piece in self._pieces(self._given(args, named)):
            arrays = {
                name: tensor.detach().to(device="cpu", dtype=self._types[name]).contiguous().numpy()
                for name, tensor in piece.items()
            }
            size = len(next(iter(piece.values())))
            fixed = {name: repeated(value, self._shapes[name], size) for name, value in self._fixed.items()}
            yield {**arrays, **{name: value.numpy() for name, value in fixed.items()}}

    def _given(self, args: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs of a call by name, in the order of the file."""
        given = {**dict(zip(self.inputs, args, strict=False)), **named}
        if len(args) + len(named) != len(self.inputs) or set(given) != set(self.inputs):
            names = ", ".join([*map(str, range(len(args))), *named])
            raise InputError(
                f"{self.path} takes {len(self.inputs)} inputs ({', '.join(self.inputs)}); it was called with {names}"
            )
        return {name: given[name] for name in self.inputs}

    def _pieces(self, given: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        size, n = self.batch_size, len(given[self.inputs[0]])
        if size is None or n <= size:
            return [given]
        # What has not one entry a sample belongs to every piece.
        return [
            {name: x[start : start + size] if x.dim() and len(x) == n else x for name, x in given.items()}
            for start in range(0, n, size)
        ]

    def _run(self, feed: dict[str, np.ndarray], given: Mapping[str, Tensor]) -> list[Any]:
        try:
            results = self._session.run(None, feed)
        except Exception as error:
            shapes = ", ".join(str(tuple(x.shape)) for x in given.values())
            raise InputError(f"{self.path} rejects an input of shape {shapes}: {first_line(error)}") from error
        return [torch.from_numpy(np.asarray(result)) for result in results]

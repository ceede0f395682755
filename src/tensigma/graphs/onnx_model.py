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

    Called with a tensor it returns a tensor; several outputs come as a dict by name, or as a tuple if they are only
    numbered. :func:`tensigma.evaluate` takes it like any model. Where the file fixes the batch size, larger batches are
    run in pieces of that size.

    Args:
        path: The file. It is read once and may be removed afterwards.
        threads: Number of ONNX Runtime's threads. Latencies are measured with one.
        fixed: The values of all inputs but one, by name, if the network has several.
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
        if len(inputs) != 1 + len(self._fixed):
            names = ", ".join(node.name for node in inputs)
            raise InputError(f"{self.path} takes {len(inputs)} inputs ({names}); only networks with one can be run")
        self._shapes = {value.name: sizes_of(value.shape) for value in inputs}
        (value,) = (value for value in inputs if value.name not in self._fixed)
        self.input, self._dtype = value.name, TYPES[value.type][0] if value.type in TYPES else None
        self._outputs = [node.name for node in self._session.get_outputs()]

    @property
    def batch_size(self) -> int | None:
        """The batch size that the file fixes; None if any is accepted."""
        shape = self._shapes[self.input]
        return shape[0] if shape else None

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...] | dict[str, Tensor]:
        sizes = [len(piece) for piece in self._pieces(x)]
        results = list(zip(*(self._run(feed, x) for feed in self.feeds(x)), strict=True))
        outputs = tuple(joined(result, sizes) for result in results)
        if len(outputs) == 1:
            return outputs[0]
        numbered = self._outputs == usual_names(len(outputs))
        return outputs if numbered else dict(zip(self._outputs, outputs, strict=True))

    def feeds(self, x: Tensor) -> Iterator[dict[str, np.ndarray]]:
        """The inputs of the network for ``x``, one set for every piece that it is run on."""
        for piece in self._pieces(x):
            array = piece.detach().to(device="cpu", dtype=self._dtype).contiguous().numpy()
            fixed = {name: repeated(value, self._shapes[name], len(piece)) for name, value in self._fixed.items()}
            yield {self.input: array, **{name: value.numpy() for name, value in fixed.items()}}

    def _pieces(self, x: Tensor) -> list[Tensor]:
        size = self.batch_size
        return [x] if size is None or len(x) <= size else list(x.split(size))

    def _run(self, feed: dict[str, np.ndarray], x: Tensor) -> list[Any]:
        try:
            results = self._session.run(None, feed)
        except Exception as error:
            raise InputError(f"{self.path} rejects an input of shape {tuple(x.shape)}: {first_line(error)}") from error
        return [torch.from_numpy(np.asarray(result)) for result in results]

"""ONNX files in ONNX Runtime, wrapped as modules so that they can be measured like models."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tensigma.deployment.onnx_names import usual_names
from tensigma.errors import InputError, MissingExtra, StoreError
from tensigma.evaluation import Size, Timing, measure_latency

_ERRORS_ONLY = 3
_TYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(double)": torch.float64,
    "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32,
    "tensor(uint8)": torch.uint8,
}


def onnx_module(name: str) -> Any:
    """A module of the extra ``onnx``, imported when it is first needed.

    >>> onnx_module("onnx").__name__
    'onnx'
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise MissingExtra(
            f"ONNX files need {package}, which is not installed ({error}); run: pip install 'tensigma[onnx]'"
        ) from None


class OnnxModel(nn.Module):
    """The network in an ONNX file, run by ONNX Runtime on the CPU.

    Called with a tensor it returns a tensor; several outputs come as a dict by name, or as a tuple if they are only
    numbered. :func:`tensigma.evaluate` takes it like any model.

    Args:
        path: The file. It is read once and may be removed afterwards.
        threads: Number of ONNX Runtime's threads. Latencies are measured with one.
    """

    def __init__(self, path: str | os.PathLike[str], *, threads: int = 1) -> None:
        super().__init__()
        runtime = onnx_module("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.log_severity_level = _ERRORS_ONLY
        self.path = Path(path)
        try:
            self.bytes = self.path.stat().st_size
            self._session = runtime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the runtime raises a dozen types without a common base class
            raise StoreError(f"ONNX Runtime cannot open {self.path}: {_first_line(error)}") from error
        inputs = self._session.get_inputs()
        if len(inputs) != 1:
            names = ", ".join(node.name for node in inputs)
            raise InputError(f"{self.path} takes {len(inputs)} inputs ({names}); only networks with one can be run")
        self._input = inputs[0].name
        self._dtype = _TYPES.get(inputs[0].type)
        self._outputs = [node.name for node in self._session.get_outputs()]

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...] | dict[str, Tensor]:
        array = x.detach().to(device="cpu", dtype=self._dtype).contiguous().numpy()
        try:
            results = self._session.run(None, {self._input: array})
        except Exception as error:
            raise InputError(f"{self.path} rejects an input of shape {tuple(x.shape)}: {_first_line(error)}") from error
        outputs = tuple(torch.from_numpy(np.asarray(result)) for result in results)
        if len(outputs) == 1:
            return outputs[0]
        numbered = self._outputs == usual_names(len(outputs))
        return outputs if numbered else dict(zip(self._outputs, outputs, strict=True))


def measure_together(models: Mapping[str, nn.Module], inputs: Tensor, *, rounds: int = 20) -> dict[str, Timing]:
    """Latencies by name, measured in turn on one thread.

    >>> times = measure_together({"one": nn.Identity(), "other": nn.Linear(4, 4)}, torch.ones(2, 4), rounds=2)
    >>> list(times), times["one"].batch
    (['one', 'other'], 2)
    """
    return dict(zip(models, measure_latency(list(models.values()), inputs, rounds=rounds), strict=True))


def file_size(size: Size, path: Path) -> Size:
    """The same size, with the bytes of the file ``path``."""
    return replace(size, bytes=path.stat().st_size)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]

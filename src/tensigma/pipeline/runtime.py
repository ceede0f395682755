"""ONNX files in ONNX Runtime, as modules: whatever measures a model measures a file of one just as well."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tensigma.calibration.batches import count_batches, input_of, iterate
from tensigma.calibration.guard import borrowed
from tensigma.errors import InputError, MissingExtra, StoreError
from tensigma.pipeline.evaluation import Evaluation, EvaluationProgress, _reporter, _Tally
from tensigma.pipeline.latency import Timing, measure_latency
from tensigma.pipeline.outputs import usual_names
from tensigma.pipeline.report import Size
from tensigma.planning.answers import class_labels, scores_of

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

    Called with a tensor it returns a tensor, or where the file has several outputs a dict of them by name, or a tuple
    where they are only numbered, so that :func:`tensigma.evaluate` takes it like any model.

    Args:
        path: The file. It is read once and may be removed afterwards.
        threads: Of ONNX Runtime. One is what latencies here are measured with.
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
        except Exception as error:  # the runtime has a dozen kinds, without a common root of its own
            raise StoreError(f"ONNX Runtime cannot open {self.path}: {_first_line(error)}") from error
        inputs = self._session.get_inputs()
        if len(inputs) != 1:
            names = ", ".join(each.name for each in inputs)
            raise InputError(f"{self.path} takes {len(inputs)} inputs ({names}); networks with one can be run")
        self._input = inputs[0].name
        self._dtype = _TYPES.get(inputs[0].type)
        self._outputs = [each.name for each in self._session.get_outputs()]

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...] | dict[str, Tensor]:
        given = x.detach().to(device="cpu", dtype=self._dtype).contiguous().numpy()
        try:
            found = self._session.run(None, {self._input: given})
        except Exception as error:
            raise InputError(f"{self.path} rejects an input of shape {tuple(x.shape)}: {_first_line(error)}") from error
        outputs = tuple(torch.from_numpy(np.asarray(each)) for each in found)
        if len(outputs) == 1:
            return outputs[0]
        numbered = self._outputs == usual_names(len(outputs))
        return outputs if numbered else dict(zip(self._outputs, outputs, strict=True))


def compare(
    models: Mapping[str, nn.Module],
    data: Any,
    *,
    reference: str | None = None,
    sizes: Mapping[str, Size] | None = None,
    latency: bool = True,
    latency_batch: int = 1,
    rounds: int = 20,
    max_samples: int | None = None,
    input: str | int | None = None,
    progress: bool | Callable[[EvaluationProgress], None] = False,
) -> dict[str, Evaluation]:
    """Several models over the same data, read once: accuracy, agreement with ``reference``, and time taken in turns.

    ``sizes`` are theirs to give, because a file does not know how many multiply-adds it stands for.

    >>> models = {"one": nn.Identity(), "other": nn.Softmax(1)}
    >>> found = compare(models, [(torch.eye(6), torch.arange(6))], reference="one", rounds=2)
    >>> found["other"].top1, found["other"].agreement, found["other"].latency.rounds
    (1.0, 1.0, 2)
    """
    tallies = {name: _Tally(name) for name in models}
    report = _reporter(progress)
    samples, first = 0, None
    with torch.inference_mode(), borrowed(nn.ModuleList(models.values())):
        for index, batch in enumerate(iterate(data)):
            x, labels = input_of(batch, input, index), class_labels(batch)
            if max_samples is not None:
                x = x[: max_samples - samples]
                labels = None if labels is None else labels[: len(x)]
            if not len(x):
                continue
            first = x if first is None else first
            scores = {name: scores_of(model, x, index) for name, model in models.items()}
            for name, own in scores.items():
                tallies[name].add(own, labels, None if reference is None else scores[reference])
            samples += len(x)
            report(EvaluationProgress(done=index + 1, total=count_batches(data), samples=samples))
            if samples == max_samples:
                break
    if first is None:
        raise InputError("no batches: the iterable given as data is empty")
    times: Mapping[str, Timing | None] = dict.fromkeys(models)
    if latency:
        times = measure_together(models, first[:latency_batch], rounds=rounds)
    nothing = Size(params=0, macs=None, bytes=0)
    return {name: tally.result((sizes or {}).get(name, nothing), times[name]) for name, tally in tallies.items()}


def measure_together(models: Mapping[str, nn.Module], inputs: Tensor, *, rounds: int = 20) -> dict[str, Timing]:
    """Latencies by name, on one thread and in turns.

    >>> found = measure_together({"one": nn.Identity(), "other": nn.Linear(4, 4)}, torch.ones(2, 4), rounds=2)
    >>> list(found), found["one"].batch
    (['one', 'other'], 2)
    """
    found = measure_latency(list(models.values()), inputs, rounds=rounds)
    return dict(zip(models, found, strict=True))


def file_size(size: Size, path: Path) -> Size:
    """The size of a model whose weights are in ``path``: what that file takes."""
    return replace(size, bytes=path.stat().st_size)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]

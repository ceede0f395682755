"""Fewer bits for the weights (FP16) or for weights and activations (INT8), calibrated on unlabelled images."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from tensigma.deployment.archive import save
from tensigma.deployment.equalisation import equalise as equalised
from tensigma.deployment.exporting import export
from tensigma.deployment.measuring import file_size
from tensigma.deployment.qdq import check_half, needs_reduced_range, with_half_weights, write_qdq
from tensigma.errors import InputError
from tensigma.evaluation import Evaluation, compare, size_of
from tensigma.files import whole_file
from tensigma.graphs import OnnxModel, OnnxNetwork, onnx_module
from tensigma.running import (
    Batch,
    Batches,
    Key,
    Wanted,
    Wish,
    borrowed,
    copied,
    first_answers,
    leaves,
    mapped,
    run,
    taken,
)

Precision = Literal["int8", "fp16"]
PRECISIONS: tuple[Precision, ...] = ("int8", "fp16")


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A model in fewer bits, compared with what it was. Times are those of ONNX Runtime if the file is an ONNX file.

    >>> import tempfile
    >>> import torch
    >>> import tensigma as ts
    >>> model, batches = torch.nn.Linear(4, 3), [torch.randn(8, 4, generator=torch.Generator().manual_seed(0))]
    >>> with tempfile.TemporaryDirectory() as place:
    ...     half = ts.quantize(model, f"{place}/half", batches, precision="fp16", latency=False)
    >>> half.form, half.samples, half.before.size.bytes, half.after.size.bytes, half.error < 1e-3
    ('archive', 0, 60, 30, True)
    """

    path: Path
    precision: str
    #: "onnx", or "archive" for a folder that :func:`tensigma.load` reads.
    form: str
    bytes: int
    #: Samples that ranges were measured on; 0 for fp16, which needs none.
    samples: int
    #: Whether channels between factors were equalised first, and whether weights take seven bits.
    equalised: bool
    reduce_range: bool
    #: Relative error of the output on the calibration samples, √(Σ|Δy|² ÷ Σ|y|²); of several outputs, the
    #: worst.
    error: float
    #: The model before, in single precision, and after.
    before: Evaluation
    after: Evaluation
    #: The model before compression, if given.
    original: Evaluation | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "path": str(self.path)}


def quantize(
    model: nn.Module,
    path: str | os.PathLike[str],
    batches: Any,
    *,
    precision: Precision = "int8",
    data: Any = None,
    original: nn.Module | None = None,
    equalise: bool = True,
    reduce_range: bool | None = None,
    max_samples: int = 256,
    latency: bool = True,
    latency_batch: int = 1,
    rounds: int = 20,
    input: Key = None,
    answers: Wish = None,
    force: bool = False,
    progress: Wanted = False,
) -> Quantized:
    """Write ``model`` to ``path`` in fewer bits, and measure what that saves and costs.

    Args:
        model: Any model with one tensor as its input, compressed or not. It stays as it is. An archive is written of
            models with other inputs too.
        path: ``int8`` gives an ONNX file. ``fp16`` gives one if the name ends with ``.onnx``, otherwise a folder for
            :func:`tensigma.load`.
        batches: Inputs as :func:`tensigma.calibrate` takes them. Labels are not used for quantization.
        precision: ``"int8"``, weights and activations in eight bits, or ``"fp16"``, weights stored in sixteen and
            computation in thirty-two.
        data: Batches to measure accuracy and agreement on; by default the samples used from ``batches``.
        original: The model before compression, to measure agreement with; by default ``model``.
        equalise: Equalise the channels between factors before INT8; the function stays the same.
        reduce_range: Seven bits for weights, so that CPUs without VNNI instructions do not overflow; by default, if
            this one lacks them.
        max_samples: Inputs to measure ranges on.
        latency: Measure time too, on one thread and in turns, ``rounds`` passes over ``latency_batch`` inputs.
        answers: What the model answers, as :func:`tensigma.evaluate` takes it; by default it is guessed.
        force: Replace an existing archive. An existing file is always replaced, in one step.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     small = quantize(model, f"{place}/small.onnx", [torch.randn(16, 3, 8, 8)], rounds=2)
    >>> small.after.size.bytes < small.before.size.bytes, small.after.agreement > 0.5, small.error < 0.1
    (True, True, True)
    """
    if precision not in PRECISIONS:
        raise InputError(f"got precision={precision!r}; choose one of {', '.join(PRECISIONS)}")
    if max_samples < 1:
        raise InputError(f"got max_samples={max_samples}; ranges need at least one sample")
    target = Path(path)
    if isinstance(model, OnnxNetwork):
        _check_graph(model, target, precision)
    form = "archive" if precision == "fp16" and target.suffix != ".onnx" else "onnx"
    if form == "onnx":
        for name in ("onnx", "onnxscript", "onnxruntime"):
            onnx_module(name)
    samples = _first_samples(batches, input, max_samples)
    inputs = [x for x, _ in samples]
    if form == "onnx" and not isinstance(inputs[0], Tensor):
        raise InputError(
            "only models with one tensor as their input become ONNX files; for others use {precision} and a folder",
            parameters=("precision='fp16'",),
        )
    reduced = precision == "int8" and (needs_reduced_range() if reduce_range is None else reduce_range)
    equal = precision == "int8" and equalise
    evaluation_data = data if data is not None else [(x,) if labels is None else (x, labels) for x, labels in samples]
    judged = model if original is None else original
    # ONNX files no longer tell which layer an answer comes from.
    with torch.inference_mode(), borrowed(judged):
        first = Batch(0, inputs[0], None if samples[0][1] is None else samples[0])
        reading = first_answers(judged, first, answers)[1]
    with tempfile.TemporaryDirectory(prefix="tensigma-") as scratch:
        models: dict[str, nn.Module] = {}
        sizes = {"before": size_of(model, taken(inputs[0], slice(1)))}
        if original is not None:
            sizes["original"] = size_of(original, taken(inputs[0], slice(1)))
        if form == "archive":
            half = _halved(model)
            models = {"before": model, "after": copied(half).float()}
            if original is not None:
                models["original"] = original
            sizes["after"] = size_of(half)
        else:
            files = _write_onnx(
                model, original, inputs, Path(scratch), precision=precision, equal=equal, reduce_range=reduced
            )
            models = {name: OnnxModel(file, fixed=_fixed(model)) for name, file in files.items()}
            sizes = {name: file_size(sizes.get(name, sizes["before"]), file) for name, file in files.items()}
        figures = compare(
            models,
            evaluation_data,
            reference="before" if original is None else "original",
            sizes=sizes,
            latency=latency and form == "onnx",
            latency_batch=latency_batch,
            rounds=rounds,
            input=input if data is not None else None,
            answers=reading,
            progress=progress,
        )
        error = _error(models["before"], models["after"], inputs)
        if form == "archive":
            save(half, target, force=force)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(target) as partial:
                partial.write_bytes(files["after"].read_bytes())
    return Quantized(
        path=target,
        precision=precision,
        form=form,
        bytes=figures["after"].size.bytes,
        samples=sum(map(len, inputs)) if precision == "int8" else 0,
        equalised=equal,
        reduce_range=reduced,
        error=error,
        before=figures["before"],
        after=figures["after"],
        original=figures.get("original"),
    )


def _write_onnx(
    model: nn.Module,
    original: nn.Module | None,
    inputs: list[Any],
    folder: Path,
    *,
    precision: Precision,
    equal: bool,
    reduce_range: bool,
) -> dict[str, Path]:
    """ONNX files of the model before and after quantization, and of the original if there is one."""
    single = _single(model)
    files = {"before": folder / "before.onnx", "after": folder / "after.onnx"}
    # Equalising changes nothing in single precision, so the equalised file serves as "before" too.
    export(equalised(single, inputs, max_samples=None) if equal else single, files["before"], inputs[0])
    if precision == "fp16":
        with_half_weights(files["before"], files["after"])
    else:
        write_qdq(files["before"], files["after"], inputs, reduce_range=reduce_range, fixed=_fixed(model))
    if original is not None:
        files["original"] = folder / "original.onnx"
        export(_single(original), files["original"], inputs[0])
    return files


def _fixed(model: nn.Module) -> Mapping[str, np.ndarray] | None:
    """The values of inputs that are always the same."""
    return model.fixed_inputs if isinstance(model, OnnxNetwork) else None


def _check_graph(network: OnnxNetwork, target: Path, precision: Precision) -> None:
    """Refuse what cannot be done with a network that came as an ONNX file."""
    if precision == "fp16" and target.suffix != ".onnx":
        raise InputError(
            f"a model that came as an ONNX file goes into one; give a name that ends with .onnx, not {target}"
        )
    if any(parameter.dtype != torch.float32 for parameter in network.parameters()):
        raise InputError(
            f"{network.source.path} has weights of other precision than float32; quantise the original file"
        )


def _first_samples(batches: Any, input: Key, most: int) -> list[tuple[Any, Any]]:
    """The first samples, kept: they are needed more than once, and not every iterable can be read twice."""
    samples = []
    for batch in Batches(batches, input=input, max_samples=most):
        inputs, targets = (mapped(each, lambda x: x.detach().cpu()) for each in (batch.inputs, batch.targets))
        samples.append((inputs, targets))
    return samples


def _single(model: nn.Module) -> nn.Module:
    """The model in single precision on the CPU; a copy only if it is not."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    if all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in tensors):
        return model
    return copied(model).cpu().float()


def _halved(model: nn.Module) -> nn.Module:
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and tensor.numel():
            check_half(name, float(tensor.abs().max()))
    return copied(model).half()


@torch.inference_mode()
def _error(before: nn.Module, after: nn.Module, inputs: list[Any]) -> float:
    """Relative error of the output; of several, the worst."""
    error_energy: dict[int, float] = defaultdict(float)
    energy: dict[int, float] = defaultdict(float)
    with borrowed(before), borrowed(after):
        for number, x in enumerate(inputs):
            outputs = (leaves(run(model, Batch(number, x, None))).values() for model in (before, after))
            for index, pair in enumerate(zip(*outputs, strict=True)):
                expected, actual = (tensor.double().cpu() for tensor in pair)
                error_energy[index] += float((expected - actual).square().sum())
                energy[index] += float(expected.square().sum())
    return max(((error_energy[index] / energy[index]) ** 0.5 for index in energy if energy[index]), default=0.0)

"""Fewer bits for the weights (FP16) or for weights and activations (INT8), calibrated on unlabelled images."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from tensigma.deployment.archive import plain_bytes, save, stored_bytes
from tensigma.deployment.equalisation import equalise as equalised
from tensigma.deployment.exporting import export
from tensigma.deployment.graph_packing import weights_of_few_bits
from tensigma.deployment.int8 import Int8File, relative_error, write_int8
from tensigma.deployment.measuring import file_size
from tensigma.deployment.qdq import check_half, needs_reduced_range, with_half_weights
from tensigma.deployment.ranges import RULES, RangeRule
from tensigma.errors import InputError
from tensigma.evaluation import Evaluation, compare, size_of
from tensigma.files import whole_file
from tensigma.graphs import OnnxModel, OnnxNetwork, onnx_module
from tensigma.layers import find_compressed
from tensigma.running import (
    Batch,
    Batches,
    Key,
    Several,
    Wanted,
    Wish,
    borrowed,
    copied,
    first_answers,
    mapped,
    shape_of,
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
    >>> half.form, half.samples, half.before.size.bytes - half.after.size.bytes, half.error < 1e-3
    ('archive', 0, 30, True)
    """

    path: Path
    precision: str
    #: "onnx", or "archive" for a folder that :func:`tensigma.load` reads.
    form: str
    #: Bytes of the file, or of the weights in the folder, on disk; those of the models beside it are files too.
    bytes: int
    #: Samples that ranges were measured on; 0 for fp16, which needs none.
    samples: int
    #: Whether channels between factors were equalised first, and whether weights take seven bits.
    equalised: bool
    reduce_range: bool
    #: Relative error of the output on the calibration samples, √(Σ|Δy|² ÷ Σ|y|²); of several outputs, the
    #: worst.
    error: float
    #: The rule by which the ranges of activations were chosen; None for fp16, which has none.
    ranges: str | None = None
    #: How many weights of few bits kept their integers.
    kept: int = 0
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
    ranges: RangeRule | Literal["auto"] = "auto",
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

    The file is written before it is measured, and stays if the measurement fails.

    Args:
        model: Any model whose inputs are tensors, compressed or not. It stays as it is. An archive is written of
            models with other inputs too, such as lists of images.
        path: ``int8`` gives an ONNX file. ``fp16`` gives one if the name ends with ``.onnx``, otherwise a folder for
            :func:`tensigma.load`.
        batches: Inputs as :func:`tensigma.calibrate` takes them. Labels are not used for quantization.
        precision: ``"int8"``, weights and activations in eight bits, or ``"fp16"``, weights stored in sixteen and
            computation in thirty-two.
        data: Batches to measure accuracy and agreement on; by default the samples used from ``batches``.
        original: The model before compression, to measure agreement with; by default ``model``.
        equalise: Equalise the channels between factors before INT8; the function stays the same. Weights of few bits
            keep their integers only without it, so both are tried if a compressed model has such weights.
        reduce_range: Seven bits for weights, so that CPUs without VNNI instructions do not overflow; by default, if
            this one lacks them.
        ranges: Where activations are clipped for INT8: ``"minmax"``, nowhere; ``"mse"``, at the least mean square error
            of each tensor; ``"p99.999"``, ``"p99.99"`` or ``"p99.9"``, outside the middle share of its values in per
            cent. By default the one of these whose answers are closest to those of the model on up to 128 inputs.
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
    if ranges not in ("auto", *RULES):
        raise InputError(f"got ranges={ranges!r}; choose one of auto, {', '.join(RULES)}")
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
    values = inputs[0].values if isinstance(inputs[0], Several) else [inputs[0]]
    if form == "onnx" and not all(isinstance(value, Tensor) for value in values):
        raise InputError(
            f"only models whose inputs are tensors become ONNX files; the input is {shape_of(inputs[0])}. Quantize a "
            "part that takes tensors, such as the backbone of a detector, or use {precision} and a folder",
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
    chosen: Int8File | None = None
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
            save(half, Path(scratch) / "after")
            sizes = {name: replace(size, bytes=plain_bytes(models[name])) for name, size in sizes.items()}
            sizes["after"] = replace(size_of(half), bytes=stored_bytes(Path(scratch) / "after"))
        else:
            files, chosen, equal = _write_onnx(
                model,
                original,
                inputs,
                Path(scratch),
                precision=precision,
                equal=equal,
                reduce_range=reduced,
                rules=RULES if ranges == "auto" else (ranges,),
            )
            models = {name: OnnxModel(file, fixed=_fixed(model)) for name, file in files.items()}
            sizes = {name: file_size(sizes.get(name, sizes["before"]), file) for name, file in files.items()}
        # Before anything is measured, so that data which cannot be evaluated costs no file.
        if form == "archive":
            save(half, target, force=force)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(target) as partial:
                partial.write_bytes(files["after"].read_bytes())
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
        error = relative_error(models["before"], models["after"], inputs, reading if form == "archive" else None)
    return Quantized(
        path=target,
        precision=precision,
        form=form,
        bytes=figures["after"].size.bytes,
        samples=sum(map(len, inputs)) if precision == "int8" else 0,
        equalised=equal,
        reduce_range=reduced,
        error=error,
        ranges=None if chosen is None else chosen.rule,
        kept=0 if chosen is None else chosen.kept,
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
    rules: Sequence[RangeRule],
) -> tuple[dict[str, Path], Int8File | None, bool]:
    """ONNX files of the model before and after quantization, and of the original if there is one.

    Beside them, how ranges were chosen for INT8, and whether channels were equalised.
    """
    single = _single(model)
    files = {"before": folder / "before.onnx", "after": folder / "after.onnx"}
    chosen = None
    if precision == "fp16":
        export(single, files["before"], inputs[0], pack=False)
        with_half_weights(files["before"], files["after"])
    else:
        weights = weights_of_few_bits(single)
        # Equalising changes nothing in single precision, so an equalised file serves as "before" too. It takes weights
        # off their grids; only trying tells what is worse.
        variants = [False, True] if equal and weights and find_compressed(single) else [equal]
        sources = {folder / f"before-{number}.onnx": equalise for number, equalise in enumerate(variants)}
        for file, equalise in sources.items():
            export(equalised(single, inputs, max_samples=None) if equalise else single, file, inputs[0], pack=False)
        chosen = write_int8(
            list(sources),
            files["after"],
            inputs,
            rules=rules,
            reduce_range=reduce_range,
            weights=weights,
            fixed=_fixed(model),
        )
        files["before"] = chosen.source
        equal = sources[chosen.source]
    if original is not None:
        files["original"] = folder / "original.onnx"
        export(_single(original), files["original"], inputs[0], pack=False)
    return files, chosen, equal


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

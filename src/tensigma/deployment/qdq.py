"""ONNX files with fewer bits: quantised by ONNX Runtime's own tools, or with weights stored in half precision."""

from __future__ import annotations

import logging
import platform
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tensigma.deployment.exporting import clean
from tensigma.errors import ExportError, InputError
from tensigma.graphs import OnnxModel, onnx_module

#: Instructions that add up products of 8-bit numbers in 32 bits. Without them sums overflow 16 bits.
_VNNI = {"avx512_vnni", "avx_vnni"}
_LARGEST_HALF = float(np.finfo(np.float16).max)


def needs_reduced_range(cpuinfo: Path = Path("/proc/cpuinfo"), machine: str | None = None) -> bool:
    """Whether this CPU needs weights of seven bits: x86 without VNNI, or with unknown features.

    >>> needs_reduced_range(machine="aarch64"), needs_reduced_range(Path("/nowhere"), machine="x86_64")
    (False, True)
    """
    if (machine or platform.machine()).lower() not in ("x86_64", "amd64", "i386", "i686"):
        return False
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return True
    flags = {flag for line in lines if line.startswith("flags") for flag in line.partition(":")[2].split()}
    return not flags & _VNNI


def check_half(name: str, largest: float) -> None:
    """Refuse a tensor whose ``largest`` value half precision cannot hold."""
    if largest > _LARGEST_HALF:
        raise InputError(f"{name} reaches {largest:.3g}; half precision ends at {_LARGEST_HALF:g}")


def write_qdq(
    source: Path,
    target: Path,
    inputs: Sequence[Tensor],
    *,
    reduce_range: bool,
    fixed: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Quantise the ONNX file ``source``: activations in uint8 by their range on ``inputs``, weights in int8 by channel.

    ``fixed`` are the values of other inputs, if it has any.

    Operators are fused and shapes inferred first, in a file beside ``target``.
    """
    quantization = onnx_module("onnxruntime.quantization")
    preparing = onnx_module("onnxruntime.quantization.shape_inference")
    onnx = onnx_module("onnx")

    opened = OnnxModel(source, fixed=fixed)
    pieces = iter([piece for x in inputs for piece in opened.feeds(x)])

    class Reader(quantization.CalibrationDataReader):  # type: ignore[name-defined]
        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(pieces, None)

    prepared = target.with_name("prepared.onnx")
    try:
        with _quiet():
            # Symbolic inference is for transformers; plain inference knows every operator of a CNN.
            preparing.quant_pre_process(source, prepared, skip_symbolic_shape=True)
            quantization.quantize_static(
                prepared,
                target,
                Reader(),
                quant_format=quantization.QuantFormat.QDQ,
                per_channel=True,
                reduce_range=reduce_range,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
            )
    except Exception as error:
        raise ExportError(f"ONNX Runtime cannot quantise this model: {type(error).__name__}: {error}") from error
    finally:
        prepared.unlink(missing_ok=True)
    proto = onnx.load(target)
    clean(proto)
    onnx.save_model(proto, target)


def with_half_weights(source: Path, target: Path) -> None:
    """Write the ONNX file ``source`` with weights in half precision, converted back when the file is opened.

    ONNX Runtime then computes in single precision, as fast as before: on CPUs half precision only makes the file
    smaller. Vectors (biases, statistics) are kept as they are; they are small.
    """
    onnx = onnx_module("onnx")
    proto = onnx.load(source)
    _store_constants(proto.graph)
    casts = []
    for tensor in proto.graph.initializer:
        if tensor.data_type != onnx.TensorProto.FLOAT or len(tensor.dims) < 2:
            continue
        values = onnx.numpy_helper.to_array(tensor)
        check_half(tensor.name, float(np.abs(values).max()) if values.size else 0.0)
        name, stored = tensor.name, f"{tensor.name}.half"
        tensor.CopyFrom(onnx.numpy_helper.from_array(values.astype(np.float16), stored))
        casts.append(onnx.helper.make_node("Cast", [stored], [name], name=f"{name}.single", to=onnx.TensorProto.FLOAT))
    operators = list(proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend([*casts, *operators])
    onnx.save_model(proto, target)
    OnnxModel(target)  # raises if ONNX Runtime cannot open the file


def _store_constants(graph: Any) -> None:
    """Turn tensors in Constant nodes into stored ones."""
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        tensor = next((item.t for item in node.attribute if item.name == "value" and node.op_type == "Constant"), None)
        if tensor is None:
            graph.node.append(node)
        else:
            graph.initializer.add().CopyFrom(tensor)
            graph.initializer[-1].name = node.output[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what the tools print, log through the root logger, or warn about."""
    root = logging.getLogger()

    def foreign(record: logging.LogRecord) -> bool:
        return "onnxruntime" not in record.pathname

    # Logging through a root logger without handlers would install one for good.
    silent = logging.NullHandler()
    root.addFilter(foreign)
    root.addHandler(silent)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield
    finally:
        root.removeFilter(foreign)
        root.removeHandler(silent)

"""ONNX files with fewer bits: quantised by ONNX Runtime's own tools, or with weights stored in half precision."""

from __future__ import annotations

import logging
import platform
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from tensigma.deployment.exporting import clean
from tensigma.deployment.graph_packing import matching, stored_weights
from tensigma.deployment.ranges import Ranges
from tensigma.errors import ExportError, InputError
from tensigma.graphs import FewBits, OnnxModel, onnx_module

#: Instructions that add up products of 8-bit numbers in 32 bits. Without them sums overflow 16 bits.
_VNNI = {"avx512_vnni", "avx_vnni"}
#: From this version on, integers may have one scale for each channel. Operators of earlier ones are converted first.
_QUANTISABLE = 13
#: The axis of a weight that holds the outputs.
_CHANNELS = {"Conv": 0, "MatMul": 1}
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


def prepare(source: Path, folder: Path) -> Any:
    """The model in the file ``source`` with operators fused and the shapes of its tensors inferred."""
    preparing = onnx_module("onnxruntime.quantization.shape_inference")
    onnx = onnx_module("onnx")
    file = folder / "prepared.onnx"
    try:
        with _quiet():
            # Symbolic inference is for transformers; plain inference knows every operator of a CNN.
            preparing.quant_pre_process(source, file, skip_symbolic_shape=True)
            proto = onnx.load(file)
            if _opset(proto) < _QUANTISABLE:
                proto = onnx.version_converter.convert_version(proto, _QUANTISABLE)
            return onnx.shape_inference.infer_shapes(proto)
    except Exception as error:
        raise _refused(error) from error
    finally:
        file.unlink(missing_ok=True)


def _opset(proto: Any) -> int:
    return next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 1)


def write_qdq(
    proto: Any, target: Path, ranges: Ranges, *, reduce_range: bool, weights: Mapping[str, FewBits] | None = None
) -> int:
    """Quantise a model from :func:`prepare`: activations in uint8 by these ranges, weights in int8 by channel.

    Weights that are integers of few bits keep their integers, if there is one scale for each channel and they fit.
    Returns how many do.
    """
    quantization = onnx_module("onnxruntime.quantization")
    calibration = onnx_module("onnxruntime.quantization.calibrate")
    registry = onnx_module("onnxruntime.quantization.registry")
    quantizers = onnx_module("onnxruntime.quantization.qdq_quantizer")
    onnx = onnx_module("onnx")
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    limits = {name: tuple(np.array(end, np.float32) for end in ends) for name, ends in ranges.items()}
    kept = _kept_scales(proto, weights or {}, 64 if reduce_range else 127)
    channels = {
        name: [{"axis": axis, "scale": scale, "zero_point": 0} for scale in scales]
        for name, (axis, scales) in kept.items()
    }
    try:
        with _quiet():
            quantizer = quantizers.QDQQuantizer(
                model,
                per_channel=True,
                reduce_range=reduce_range,
                weight_qType=quantization.QuantType.QInt8,
                activation_qType=quantization.QuantType.QUInt8,
                tensors_range=calibration.TensorsData(quantization.CalibrationMethod.MinMax, limits),
                nodes_to_quantize=[],
                nodes_to_exclude=[],
                op_types_to_quantize=sorted({*registry.QLinearOpsRegistry, *registry.QDQRegistry}),
                extra_options={"TensorQuantOverrides": channels},
            )
            quantizer.quantize_model()
            quantizer.model.topological_sort()
            quantised = quantizer.model.model
    except Exception as error:
        raise _refused(error) from error
    clean(quantised)
    onnx.save_model(quantised, target)
    return len(kept)


def _kept_scales(proto: Any, weights: Mapping[str, FewBits], largest: int) -> dict[str, tuple[int, list[np.ndarray]]]:
    """The weights in a model that keep their integers: the axis of their channels, and a scale for each."""
    # Axis of the outputs, which have scales in ONNX Runtime. Those of a transposed convolution are not ours.
    axes = {node.input[1]: _CHANNELS[node.op_type] for node in proto.graph.node if node.op_type in _CHANNELS}
    gemms = [node for node in proto.graph.node if node.op_type == "Gemm"]
    axes |= {node.input[1]: 0 if any(a.name == "transB" and a.i for a in node.attribute) else 1 for node in gemms}
    integers = {name: few for name, few in weights.items() if few.bits <= 8 and few.scales.shape[1] == 1}
    kept = {}
    for tensor, array in stored_weights(proto):
        match = matching(tensor.name, array, integers) if tensor.name in axes else None
        if match is None or axes[tensor.name] != int(match[1]):
            continue
        few = match[0]
        # A negative factor turns the signs of integers around.
        if np.abs(few.values.astype(int)).max() > largest:
            continue
        scales = np.abs(few.scales.reshape(-1))
        if not scales.any():
            continue
        # Channels that are 0 take any scale; that of their bias depends on it.
        scales = np.where(scales > 0, scales, scales[scales > 0].mean()).astype(np.float32)
        kept[tensor.name] = (axes[tensor.name], list(scales))
    return kept


def _refused(error: Exception) -> ExportError:
    return ExportError(f"ONNX Runtime cannot quantise this model: {type(error).__name__}: {error}")


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

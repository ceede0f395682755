"""Weights of few bits in ONNX files: stored as integers or in half precision, and made single when a file is opened.

Cast and Mul make the weight from what is stored. Both read constants alone, so that runtimes compute them once, when
they open the file, and are then as fast as with the weight itself. DequantizeLinear would say the same in one node, but
ONNX Runtime computes it anew in every run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from tensigma.graphs.packages import onnx_module, session_of
from tensigma.layers import HALF, Grid

#: From this version of the operators on, Cast takes integers of four bits.
INT4_OPSET = 21
_INT4_IR = 10
# Scaled once more and rounded in single precision, products of integers and scales differ by a few units of 6e-8.
_ROUNDING = 1e-6


@dataclass(frozen=True, eq=False)
class FewBits:
    """``weight = values · scales``, as a file stores it."""

    values: np.ndarray  # (t, groups, n), int8 or float16
    scales: np.ndarray  # (t, groups, 1), float32
    shape: tuple[int, ...]
    bits: int

    @staticmethod
    def of(weight: Tensor, grid: Grid) -> FewBits:
        """A weight that lies on ``grid``."""
        array = weight.detach().cpu().numpy()
        if grid.scales is None:
            values = array.reshape(len(array), 1, -1).astype(np.float16)
            return FewBits(values, np.ones((len(array), 1, 1), np.float32), array.shape, HALF)
        integers = grid.integers(weight)
        assert integers is not None
        scales = grid.scales.cpu().numpy()[..., None]
        return FewBits(integers.numpy().reshape(*scales.shape[:2], -1), scales, array.shape, grid.bits)

    def dense(self) -> np.ndarray:
        """The weight."""
        return (self.values.astype(np.float32) * self.scales).reshape(self.shape)

    def rescaled_to(self, weight: np.ndarray) -> FewBits | None:
        """The same values with scales that give ``weight``, as after BatchNorm was folded into it; None if none do."""
        if weight.shape != self.shape:
            return None
        if np.array_equal(self.dense(), weight):
            return self
        wanted, values = weight.reshape(self.values.shape).astype(np.float64), self.values.astype(np.float64)
        energy = (values**2).sum(2, keepdims=True)
        scales = (wanted * values).sum(2, keepdims=True) / np.where(energy, energy, 1)
        fitted = replace(self, scales=scales.astype(np.float32))
        return fitted if np.all(np.abs(fitted.dense() - weight) <= _ROUNDING * np.abs(weight)) else None

    def written(
        self, name: str, new: Callable[[str], str], *, int4: bool, transposed: bool = False
    ) -> tuple[list[Any], list[Any], str]:
        """Tensors to store, nodes that make the value ``name`` from them, and the type in which weights are stored.

        ``new`` makes names that the graph does not have yet. ``transposed`` is for matrices that are stored so.
        """
        onnx = onnx_module("onnx")
        make, from_array = onnx.helper.make_node, onnx.numpy_helper.from_array
        grouped = self.scales.shape[1] > 1
        values = self.values if grouped else self.values.reshape(self.shape)
        scales = self.scales if grouped else self.scales.reshape(-1, *(1,) * (len(self.shape) - 1))
        kind = "FP16" if self.bits == HALF else "INT4" if int4 and self.bits <= 4 else "INT8"
        stored = new(f"{name}.half" if self.bits == HALF else f"{name}.integers")
        tensors = [_int4_tensor(onnx, stored, values) if kind == "INT4" else from_array(values, stored)]
        steps: list[tuple[str, list[str], dict[str, Any]]] = [("Cast", [], {"to": onnx.TensorProto.FLOAT})]
        if not np.all(scales == 1):
            tensors.append(from_array(np.ascontiguousarray(scales), new(f"{name}.scales")))
            steps.append(("Mul", [tensors[-1].name], {}))
        if grouped:
            tensors.append(from_array(np.array(self.shape, np.int64), new(f"{name}.shape")))
            steps.append(("Reshape", [tensors[-1].name], {}))
        if transposed:
            steps.append(("Transpose", [], {"perm": [1, 0]}))
        nodes, value = [], stored
        for index, (operator, others, settings) in enumerate(steps):
            output = name if index == len(steps) - 1 else new(f"{name}.{operator.lower()}")
            nodes.append(make(operator, [value, *others], [output], name=output, **settings))
            value = output
        return tensors, nodes, kind


def few_bits_in(proto: Any) -> dict[str, int]:
    """How many weights a model stores in which type of few bits."""
    onnx = onnx_module("onnx")
    kinds = {onnx.TensorProto.INT4: "INT4", onnx.TensorProto.INT8: "INT8", onnx.TensorProto.FLOAT16: "FP16"}
    stored = {tensor.name: tensor.data_type for tensor in proto.graph.initializer if len(tensor.dims) > 1}
    stored |= {node.output[0]: tensor.data_type for node in proto.graph.node for tensor in _constants(node)}
    casts = [node for node in proto.graph.node if node.op_type == "Cast" and _is_single(onnx, node)]
    types = [stored[node.input[0]] for node in casts if node.input[0] in stored]
    return dict(Counter(kinds[each] for each in types if each in kinds))


def _is_single(onnx: Any, cast: Any) -> bool:
    return any(item.name == "to" and item.i == onnx.TensorProto.FLOAT for item in cast.attribute)


def _constants(node: Any) -> Iterator[Any]:
    if node.op_type == "Constant":
        yield from (item.t for item in node.attribute if item.name == "value" and len(item.t.dims) > 1)


def takes_int4(proto: Any, opset: int) -> bool:
    """Whether a file of these versions may hold integers of four bits, and the installed ONNX Runtime reads them."""
    return opset >= INT4_OPSET and proto.ir_version >= _INT4_IR and runs_int4()


@cache
def runs_int4() -> bool:
    """Whether the installed ONNX Runtime makes numbers of four bits single; some earlier ones do not."""
    onnx = onnx_module("onnx")
    integers = np.array([[-8, 7, 3]], np.int8)
    few = FewBits(integers[:, None], np.full((1, 1, 1), 0.5, np.float32), (1, 3), 4)
    tensors, nodes, _ = few.written("weight", str, int4=True)
    make, float32 = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(nodes, "probe", [], [make("weight", float32, (1, 3))], tensors)
    versions = [onnx.helper.make_opsetid("", INT4_OPSET)]
    model = onnx.helper.make_model(graph, opset_imports=versions, ir_version=_INT4_IR)
    try:
        result = session_of(model.SerializeToString(), lean=True).run(None, {})[0]
    except Exception:  # the runtime raises a dozen types without a common base class
        return False
    return bool(np.array_equal(result, 0.5 * integers))


def _int4_tensor(onnx: Any, name: str, values: np.ndarray) -> Any:
    """Two numbers a byte, the first in the lower half."""
    halves = (values.reshape(-1) & 15).astype(np.uint8)
    halves = np.append(halves, np.uint8(0)) if len(halves) % 2 else halves
    packed = halves[::2] | (halves[1::2] << 4)
    return onnx.helper.make_tensor(name, onnx.TensorProto.INT4, values.shape, packed.tobytes(), raw=True)

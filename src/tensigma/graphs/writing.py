"""Layers back into the graph they came from: changed layers become new nodes, everything else stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tensigma.errors import ExportError
from tensigma.graphs.few_bits import FewBits, takes_int4
from tensigma.graphs.layer_nodes import LayerNode, weights_of
from tensigma.graphs.network import OnnxNetwork
from tensigma.graphs.packages import onnx_module
from tensigma.graphs.source import reads
from tensigma.layers import TARGETS, Geometry, grid_of

#: From this version on, stored tensors need not be listed among the inputs.
_FREE_INITIALIZERS = 4
#: From this version on, the third input of Gemm may be left out.
_GEMM_WITHOUT_BIAS = 11


def to_proto(network: OnnxNetwork, *, pack: bool = True) -> Any:
    """The graph of the file with the layers of ``network`` in it.

    Inputs, outputs, names, versions and metadata are those of the file. Only layers that were replaced, or whose
    weights were changed, have other nodes. With ``pack``, their weights of few bits take few bits.
    """
    onnx = onnx_module("onnx")
    proto = onnx.ModelProto()
    proto.CopyFrom(network.source.model)
    writer = _Writer(network, proto, pack=pack)
    for name, layer in network.layers.items():
        module = network.get_submodule(name)
        if not _is_unchanged(network, layer, module):
            writer.replace(name, layer, _stages(name, module))
    writer.finish()
    return proto


def _is_unchanged(network: OnnxNetwork, layer: LayerNode, module: nn.Module) -> bool:
    if type(module) not in TARGETS or replace(Geometry.of(module), bias=layer.geometry.bias) != layer.geometry:
        return False
    weight, bias = weights_of(network.source, layer)
    return _is_same(module.weight, weight) and _is_same(module.bias, bias)


def _is_same(value: Any, former: Tensor | None) -> bool:
    if value is None or former is None:
        return value is former
    return torch.equal(value.detach().cpu(), former)


def _stages(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """The plain layers that compute in place of a layer, in order; ``""`` is the layer itself."""
    if type(module) in TARGETS:
        return {"": module}
    stages = dict(module.named_children())
    if type(module) is not nn.Sequential or not stages or not all(type(stage) in TARGETS for stage in stages.values()):
        raise ExportError(
            f"{name} has become a {type(module).__name__}, which cannot be written into the graph; plain layers and "
            "sequences of them can"
        )
    return stages


class _Writer:
    """Puts layers into a copy of the graph."""

    def __init__(self, network: OnnxNetwork, proto: Any, *, pack: bool) -> None:
        self.network, self.proto, self.graph = network, proto, proto.graph
        self._pack, self._int4 = pack, pack and takes_int4(proto, network.source.opset)
        self.onnx = onnx_module("onnx")
        self._nodes = list(self.graph.node)
        # By output: the copy has other node objects than the file, and their names may be missing or used twice.
        self._place = {output: index for index, node in enumerate(self._nodes) for output in node.output if output}
        self._instead: dict[int, list[Any]] = {}
        self._stored: list[Any] = []
        self._unpacking: list[Any] = []
        self._names = {name for node in self._nodes for name in (*node.input, *node.output)}
        self._names |= {value.name for value in (*self.graph.input, *self.graph.initializer)}
        self._freed: set[str] = set()

    def replace(self, name: str, layer: LayerNode, stages: dict[str, nn.Module]) -> None:
        """Let ``stages`` compute what the node of ``layer`` computed."""
        node = layer.node
        values = [layer.input, *(self._new(f"{layer.output}/{stage}") for stage in list(stages)[:-1]), layer.output]
        pads = _pads(layer, [Geometry.of(stage) for stage in stages.values()])
        instead: list[Any] = []
        for index, (stage, module) in enumerate(stages.items()):
            label = f"{name}.{stage}" if stage else name
            title = "/".join(filter(None, (node.name or name, stage)))
            bias = self._bias(layer, module, last=index == len(stages) - 1)
            nodes = self._linear if isinstance(module, nn.Linear) else self._convolution
            instead += nodes(layer, module, bias, values[index], values[index + 1], label, title, pads[index])
        self._instead[self._place[layer.output]] = instead
        self._freed.update(node.input[1:])

    def _convolution(
        self,
        layer: LayerNode,
        module: nn.Module,
        bias: Tensor | None,
        x: str,
        y: str,
        label: str,
        title: str,
        pads: dict[str, Any],
    ) -> list[Any]:
        geometry = Geometry.of(module)
        inputs = [x, self._store_weight(label, module)]
        if bias is not None:
            inputs.append(self._store(f"{label}.bias", bias))
        settings = {
            "kernel_shape": geometry.kernel_size,
            "strides": geometry.stride,
            "dilations": geometry.dilation,
            "group": geometry.groups,
            **pads,
        }
        if geometry.kind == "conv_transpose" and any(geometry.output_padding):
            settings["output_padding"] = geometry.output_padding
        operator = "ConvTranspose" if geometry.kind == "conv_transpose" else "Conv"
        return [self.onnx.helper.make_node(operator, inputs, [y], name=title, **settings)]

    def _linear(
        self,
        layer: LayerNode,
        module: nn.Module,
        bias: Tensor | None,
        x: str,
        y: str,
        label: str,
        title: str,
        pads: dict[str, Any],
    ) -> list[Any]:
        make = self.onnx.helper.make_node
        weight = module.weight
        assert isinstance(weight, Tensor)
        if layer.node.op_type == "Gemm":
            if bias is None and self.network.source.opset < _GEMM_WITHOUT_BIAS:
                bias = weight.new_zeros(len(weight))
            inputs = [x, self._store_weight(label, module)]
            inputs += [] if bias is None else [self._store(f"{label}.bias", bias)]
            return [make("Gemm", inputs, [y], name=title, transB=1)]
        product = y if bias is None else self._new(f"{y}/product")
        nodes = [make("MatMul", [x, self._store_weight(label, module, transposed=True)], [product], name=title)]
        if bias is not None:
            nodes.append(make("Add", [product, self._store(f"{label}.bias", bias)], [y], name=f"{title}/bias"))
        return nodes

    def _bias(self, layer: LayerNode, module: nn.Module, *, last: bool) -> Tensor | None:
        """The bias of a stage; None if it went into the constant that is added to the output of the layer anyway."""
        bias = module.bias
        if not isinstance(bias, Tensor):
            return None
        if layer.node.op_type != "MatMul" or not last:
            return bias
        source = self.network.source
        readers = [node for node in self._nodes if layer.output in reads(node)]
        outputs = {output.name for output in self.graph.output}
        if len(readers) != 1 or readers[0].op_type != "Add" or layer.output in outputs:
            return bias
        (addition,) = readers
        other = addition.input[1] if addition.input[0] == layer.output else addition.input[0]
        if other not in source.constants:
            return bias
        former = source.array(other)
        if former.shape != (len(bias),):
            return bias
        total = torch.from_numpy(np.array(former)).double() + bias.detach().cpu().double()
        stored = self._store(f"{other}.moved", total.to(bias.dtype))
        addition.input[:] = [stored if name == other else name for name in addition.input]
        self._freed.add(other)
        return None

    def finish(self) -> None:
        """Put the new nodes in place, and leave out what nothing reads any more."""
        nodes = [new for index, node in enumerate(self._nodes) for new in self._instead.get(index, [node])]
        nodes = self._unpacking + nodes
        if self.proto.ir_version < _FREE_INITIALIZERS:
            constants = [
                self.onnx.helper.make_node("Constant", [], [tensor.name], name=tensor.name, value=tensor)
                for tensor in self._stored
            ]
            nodes = constants + nodes
        else:
            for tensor in self._stored:
                self._add(tensor)
        nodes = self._without_unread(nodes)
        # New objects: a list of messages cannot be assigned, and clearing it would empty those taken from it.
        copies = [self._copy(node) for node in nodes]
        del self.graph.node[:]
        self.graph.node.extend(copies)
        values = {name for node in copies for name in node.output}
        described = [self._copy(value) for value in self.graph.value_info if value.name in values]
        del self.graph.value_info[:]
        self.graph.value_info.extend(described)

    def _add(self, tensor: Any) -> None:
        """Store a tensor. Copying one message into another goes through bytes, of which there may be 2 GB at most."""
        if not tensor.raw_data:
            self.graph.initializer.append(tensor)
            return
        added = self.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        added.raw_data = tensor.raw_data

    def _without_unread(self, nodes: list[Any]) -> list[Any]:
        """Without constants that only replaced nodes have read, and what those were made from."""
        freed = {*self._freed}
        while True:
            used = {name for node in nodes for name in reads(node)} | {output.name for output in self.graph.output}
            unread = {name for name in freed - used if name}
            gone = [node for node in nodes if node.output and unread.issuperset(node.output)]
            if not gone:
                break
            freed.update(name for node in gone for name in node.input)
            nodes = [node for node in nodes if not any(node is other for other in gone)]
        for stored in (self.graph.initializer, self.graph.input):
            for index in reversed(range(len(stored))):
                if stored[index].name in unread and stored[index].name in self.network.source.initializers:
                    del stored[index]
        return nodes

    def _store_weight(self, label: str, module: nn.Module, *, transposed: bool = False) -> str:
        weight, grid = module.weight, grid_of(module) if self._pack else None
        assert isinstance(weight, Tensor)
        if grid is None:
            return self._store(f"{label}.weight", weight.T if transposed else weight)
        name = self._new(f"{label}.weight")
        few = FewBits.of(weight, grid)
        tensors, nodes, _ = few.written(name, self._new, int4=self._int4, transposed=transposed)
        self._stored += tensors
        self._unpacking += nodes
        return name

    def _store(self, name: str, tensor: Any) -> str:
        stored = self._new(name)
        array = np.ascontiguousarray(tensor.detach().cpu().numpy())
        self._stored.append(self.onnx.numpy_helper.from_array(array, stored))
        return stored

    def _new(self, name: str) -> str:
        """``name``, with a number if the graph has it already."""
        candidates = (name if number == 0 else f"{name}_{number}" for number in range(len(self._names) + 1))
        free = next(candidate for candidate in candidates if candidate not in self._names)
        self._names.add(free)
        return free

    @staticmethod
    def _copy(message: Any) -> Any:
        copied = type(message)()
        copied.CopyFrom(message)
        return copied


def _pads(layer: LayerNode, stages: Sequence[Geometry]) -> list[dict[str, Any]]:
    """The padding attributes of each stage.

    A layer whose zeros are added by the module before it gives them to the stage that has the taps of an axis: no stage
    but the last has a bias, so that zeros at its input are zeros at the input of the next.
    """
    if layer.padding is None:
        return [_symmetric(stage) for stage in stages]
    if layer.padding.kind != "NOTSET":
        return [{"auto_pad": layer.padding.kind} if stage.n_taps > 1 else _symmetric(stage) for stage in stages]
    places = [
        next((index for index, stage in enumerate(stages) if stage.kernel_size[axis] > 1), 0)
        for axis in range(len(layer.padding.fixed))
    ]
    result = []
    for index in range(len(stages)):
        pairs = [pair if places[axis] == index else (0, 0) for axis, pair in enumerate(layer.padding.fixed)]
        result.append({"pads": [before for before, _ in pairs] + [after for _, after in pairs]})
    return result


def _symmetric(stage: Geometry) -> dict[str, Any]:
    return (
        {"pads": [before for before, _ in stage.pads] + [after for _, after in stage.pads]} if stage.n_spatial else {}
    )

"""An ONNX file as it was read: its nodes, which values are constant, and what type each value has."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tensigma.errors import InputError, StoreError
from tensigma.graphs.packages import first_line, onnx_module, session_of
from tensigma.graphs.value_types import sizes_of

#: The oldest operators that ONNX Runtime supports in full.
_OLDEST_OPSET = 7
_RANDOM = {
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Multinomial",
    "Bernoulli",
    "Dropout",
}


class Source:
    """The graph of a file. It is never changed; copies of a model share it."""

    def __init__(self, path: Path, model: Any) -> None:
        self.path, self.model = path.absolute(), model
        self.graph = model.graph
        self.types: dict[str, str] = {}
        #: Name → (type, shape) of the inputs that must be given; None for a size that may vary.
        self.inputs: dict[str, tuple[str, tuple[int | None, ...]]] = {}

    def __deepcopy__(self, memo: Any) -> Source:
        return self

    @property
    def folder(self) -> Path:
        """The folder of the file, which also has its external weights."""
        return self.path.parent

    @property
    def opset(self) -> int:
        """The version of the ONNX operators."""
        return next((entry.version for entry in self.model.opset_import if entry.domain in ("", "ai.onnx")), 1)

    @property
    def has_external_weights(self) -> bool:
        """Whether weights are in files beside this one."""
        return any(True for _ in external_tensors(self.model))

    @property
    def n_bytes(self) -> int:
        """The size of the file, weights in files beside it included."""
        files = [self.path, *(self.folder / place for place in external_files(self.model))]
        return sum(file.stat().st_size for file in files)

    @cached_property
    def initializers(self) -> dict[str, Any]:
        """The stored tensors by name."""
        dense = {tensor.name: tensor for tensor in self.graph.initializer}
        return dense | {tensor.values.name: tensor for tensor in self.graph.sparse_initializer}

    @cached_property
    def producers(self) -> dict[str, Any]:
        """Value → the node that computes it."""
        return {output: node for node in self.graph.node for output in node.output if output}

    @cached_property
    def constants(self) -> set[str]:
        """The values that are the same for every input."""
        names = {*self.initializers}
        for node in self.graph.node:
            if self._is_constant(node, names):
                names.update(node.output)
        return names - {""}

    @staticmethod
    def _is_constant(node: Any, known: set[str]) -> bool:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            return True
        if node.op_type in _RANDOM or node.domain not in ("", "ai.onnx") or any(True for _ in subgraphs(node)):
            return False
        return any(node.input) and all(name in known for name in node.input if name)

    @cached_property
    def uses(self) -> Counter[str]:
        """How often each value is read, the graph's outputs included."""
        uses = Counter(name for node in self.graph.node for name in reads(node))
        uses.update(output.name for output in self.graph.output)
        return uses

    @cached_property
    def _roots(self) -> dict[str, frozenset[str]]:
        """Constant → the stored matrices and kernels that it is made from; sizes, scales and biases do not count."""
        roots = {
            name: frozenset([name] if not hasattr(tensor, "data_type") or len(tensor.dims) > 1 else [])
            for name, tensor in self.initializers.items()
        }
        for node in self.graph.node:
            for output in node.output:
                if output in self.constants and output not in roots:
                    own = [output] if node.op_type == "Constant" and _is_matrix(node) else []
                    roots[output] = frozenset(own).union(*(roots[name] for name in node.input if name))
        return roots

    @cached_property
    def _readers(self) -> dict[str, list[tuple[Any, str]]]:
        """Stored matrix → the nodes that compute with it, each with the constant, made from it, that it reads."""
        readers: dict[str, list[tuple[Any, str]]] = {}
        for node in self.graph.node:
            if not self.constants.issuperset(node.output):
                for name in reads(node):
                    for root in self._roots.get(name, ()):
                        readers.setdefault(root, []).append((node, name))
        return readers

    def other_reader(self, node: Any, weight: str) -> str | None:
        """What else computes with the stored tensor behind the weight of ``node``, in another form or for another end.

        Nodes of the same operator that read the same weight are not meant: they are layers that share it.
        """
        for root in sorted(self._roots.get(weight, ())):
            for other, name in self._readers[root]:
                if other is not node and (name != weight or other.op_type != node.op_type or other.input[1] != weight):
                    return f"{other.op_type} {other.name or other.output[0]}"
        return None

    def closure(self, names: Iterable[str]) -> tuple[list[Any], list[Any]]:
        """The nodes, in order, and the stored tensors that constants of these names are made from."""
        nodes: dict[int, Any] = {}
        tensors: dict[str, Any] = {}
        todo = list(names)
        while todo:
            name = todo.pop()
            if name in self.initializers:
                tensors[name] = self.initializers[name]
            elif id(self.producers[name]) not in nodes:
                node = self.producers[name]
                nodes[id(node)] = node
                todo.extend(read for read in node.input if read)
        return [node for node in self.graph.node if id(node) in nodes], list(tensors.values())

    def array(self, name: str) -> np.ndarray:
        """The values of a constant."""
        onnx = onnx_module("onnx")
        tensor = self.initializers.get(name)
        node = self.producers.get(name)
        if tensor is None and node is not None and node.op_type == "Constant":
            tensor = next((item.t for item in node.attribute if item.name == "value"), None)
        if tensor is not None and hasattr(tensor, "data_type"):
            return onnx.numpy_helper.to_array(tensor, base_dir=os.fspath(self.folder))
        model = self.part(*self.closure([name]), inputs={}, outputs=[name])
        return np.asarray(session_of(model, folder=self.folder, lean=True).run(None, {})[0])

    def origin(self, name: str) -> str:
        """The stored tensor that a constant comes from; its own name if there are several."""
        nodes, tensors = self.closure([name])
        roots = [tensor.name for tensor in tensors if hasattr(tensor, "data_type") and len(tensor.dims) > 1]
        roots += [node.output[0] for node in nodes if node.op_type == "Constant" and _is_matrix(node)]
        return roots[0] if len(roots) == 1 else name

    def part(
        self, nodes: Iterable[Any], tensors: Iterable[Any], *, inputs: dict[str, int], outputs: list[str]
    ) -> bytes:
        """A model made of some nodes of this one, as bytes; ``inputs`` are names with their element types."""
        onnx = onnx_module("onnx")
        graph = onnx.GraphProto(name="part")
        graph.node.extend(nodes)
        for tensor in tensors:
            stored = graph.initializer if hasattr(tensor, "data_type") else graph.sparse_initializer
            stored.append(tensor)
        for name, element in inputs.items():
            # Without a shape: names of sizes in the file need not be consistent.
            value = graph.input.add(name=name)
            value.type.tensor_type.elem_type = element
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        model = onnx.ModelProto(ir_version=max(self.model.ir_version, 4), graph=graph)
        model.opset_import.extend(self.model.opset_import)
        model.functions.extend(self.model.functions)
        return bytes(model.SerializeToString())

    def read_types(self) -> None:
        """Have ONNX Runtime open the model, and ask it for the type of every value."""
        onnx = onnx_module("onnx")
        everything = onnx.ModelProto()
        everything.CopyFrom(self.model)
        outputs = {output.name for output in self.graph.output}
        names = [output for node in self.graph.node for output in node.output if output and output not in outputs]
        everything.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in self.constants)
        try:
            session = session_of(everything.SerializeToString(), folder=self.folder, optimise=False, lean=True)
        except Exception as error:  # the runtime raises a dozen types without a common base class
            raise StoreError(f"ONNX Runtime cannot open {self.path}: {_why(error)}") from error
        self.inputs = {value.name: (value.type, sizes_of(value.shape)) for value in session.get_inputs()}
        values = (*session.get_inputs(), *session.get_outputs())
        self.types = {value.name: value.type for value in values}


def read_source(path: str | os.PathLike[str]) -> Source:
    """The graph in a file, opened by ONNX Runtime once to see that it can be run."""
    onnx = onnx_module("onnx")
    onnx_module("onnxruntime")
    file = Path(path)
    if not file.is_file():
        raise StoreError(f"{file}: no such file; give an ONNX file")
    try:
        # Weights in other files stay there until they are needed.
        model = onnx.load(file, load_external_data=False)
    except Exception as error:
        raise StoreError(
            f"{file} cannot be read as ONNX: it is truncated, damaged or of another kind ({first_line(error)})"
        ) from error
    if not model.graph.node:
        raise StoreError(f"{file} cannot be read as ONNX: it has no nodes; it is truncated, damaged or of another kind")
    source = Source(file, model)
    if source.opset < _OLDEST_OPSET:
        raise InputError(
            f"{file} uses operators of version {source.opset}; version {_OLDEST_OPSET} is the oldest that can be read. "
            "Convert it with onnx.version_converter.convert_version"
        )
    missing = [place for place in external_files(model) if not (source.folder / place).is_file()]
    if missing:
        raise StoreError(f"{file} keeps weights in {missing[0]}, which is not beside it; copy both to the same folder")
    _check_lengths(source)
    source.read_types()
    return source


def _check_lengths(source: Source) -> None:
    """Refuse files of weights that end too early."""
    for tensor in external_tensors(source.model):
        facts = {entry.key: entry.value for entry in tensor.external_data}
        end = int(facts.get("offset") or 0) + int(facts.get("length") or 0)
        there = (source.folder / facts["location"]).stat().st_size
        if there < end:
            raise StoreError(
                f"{source.path} keeps weights in {facts['location']}, which is truncated: it has {there:,} bytes, and "
                f"{tensor.name} ends at byte {end:,}"
            )


def subgraphs(node: Any) -> Iterator[Any]:
    """The graphs inside a node, such as the branches of If."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def reads(node: Any) -> list[str]:
    """The values that a node reads, those read by graphs inside it included."""
    names = [name for name in node.input if name]
    for graph in subgraphs(node):
        inside = {value.name for value in (*graph.input, *graph.initializer)}
        for child in graph.node:
            names += [name for name in reads(child) if name not in inside]
            inside.update(child.output)
        names += [output.name for output in graph.output if output.name not in inside]
    return names


def external_tensors(model: Any) -> Iterator[Any]:
    """The tensors of a model that are stored in other files."""
    onnx = onnx_module("onnx")
    for tensor in _tensors(model.graph):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            yield tensor


def external_files(model: Any) -> list[str]:
    """The names of the other files in which weights are stored."""
    places = (entry.value for tensor in external_tensors(model) for entry in tensor.external_data)
    keys = (entry.key for tensor in external_tensors(model) for entry in tensor.external_data)
    return list(dict.fromkeys(place for key, place in zip(keys, places, strict=True) if key == "location"))


def _tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for node in graph.node:
        yield from (attribute.t for attribute in node.attribute if attribute.HasField("t"))
        for inner in subgraphs(node):
            yield from _tensors(inner)


def _is_matrix(node: Any) -> bool:
    return any(attribute.HasField("t") and len(attribute.t.dims) > 1 for attribute in node.attribute)


def _why(error: Exception) -> str:
    text = first_line(error)
    if "is not a registered function/op" in text or "NOT_IMPLEMENTED" in text:
        version = onnx_module("onnxruntime").__version__
        return f"it needs an operator that the installed version {version} lacks ({text}); install a newer onnxruntime"
    return text

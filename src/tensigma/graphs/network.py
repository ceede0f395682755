"""A network that came as an ONNX file: its layers are plain PyTorch layers, all else runs in ONNX Runtime."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tensigma.errors import InputError
from tensigma.graphs.layer_names import layer_name, unique_name
from tensigma.graphs.layer_nodes import LayerNode, layer_node, to_module
from tensigma.graphs.packages import first_line, session_of
from tensigma.graphs.pieces import joined, repeated
from tensigma.graphs.schedule import LayerStep, Segment, Step, steps_of
from tensigma.graphs.source import Source, read_source, reads
from tensigma.graphs.value_types import TYPES


class OnnxNetwork(nn.Module):
    """The network in an ONNX file, as :func:`load_onnx` returns it.

    Layers with constant weights (Conv, ConvTranspose, Gemm, MatMul) are plain ``nn.Conv*`` and ``nn.Linear`` modules
    under their names in the file. All other nodes run in ONNX Runtime, as many at a time as lie between two layers.
    There are no gradients. Where the file fixes the batch size, larger batches are run in pieces of that size.
    """

    #: Nodes that run in ONNX Runtime cannot be differentiated.
    has_gradients = False

    def __init__(self, source: Source, *, input: str, fixed: Mapping[str, np.ndarray] | None = None) -> None:
        super().__init__()
        self._source, self._fixed = source, dict(fixed or {})
        self.input = input
        #: Node → why it is no layer although it has weights.
        self.left_alone: dict[str, str] = {}
        self._layers: dict[str, LayerNode] = {}
        self._read_layers()
        self._steps = _Steps(source, steps_of(source, self._layers))
        self.add_module("constants", _Constants(source, self._layers))
        #: One sample of the inputs that the network has seen, to check files with.
        self._seen: np.ndarray | None = None

    def _read_layers(self) -> None:
        weights: dict[str, nn.Module] = {}
        for index, node in enumerate(self._source.graph.node):
            layer = layer_node(self._source, node)
            if isinstance(layer, str):
                self.left_alone[node.name or f"{node.op_type} {index}"] = layer
            if not isinstance(layer, LayerNode):
                continue
            origin = self._source.origin(layer.weight)
            name = self._free(layer_name(node.name, origin, node.op_type))
            module = to_module(self._source, layer)
            twin = weights.setdefault(layer.weight, module)
            if twin.weight.shape == module.weight.shape:
                # One tensor of the file stays one parameter, so that both layers are seen to be tied.
                module.weight = twin.weight
            self._layers[name] = layer
            self._put(name, module)

    def _free(self, name: str) -> str:
        """``name``, changed where another layer or an attribute of modules has it."""
        levels = [
            level + "_" if hasattr(nn.Module, level) or level in vars(self) else level for level in name.split(".")
        ]
        levels = [level + "_" if level == "constants" else level for level in levels]
        return unique_name(".".join(levels), self._layers)

    def _put(self, name: str, module: nn.Module) -> None:
        parent: nn.Module = self
        *levels, last = name.split(".")
        for level in levels:
            if level not in parent._modules:
                parent.add_module(level, nn.Module())
            parent = parent._modules[level]  # type: ignore[assignment]
        parent.add_module(last, module)

    @property
    def source(self) -> Source:
        """The file that the network came from."""
        return self._source

    @property
    def layers(self) -> Mapping[str, LayerNode]:
        """Name → the node that is a layer."""
        return self._layers

    @property
    def input_shape(self) -> tuple[int | None, ...]:
        """The shape of the input; None for a size that may vary."""
        return self._source.inputs[self.input][1]

    @property
    def fixed_inputs(self) -> Mapping[str, np.ndarray]:
        """Inputs that are always the same, by name."""
        return self._fixed

    @property
    def batch_size(self) -> int | None:
        """The batch size that the file fixes; None if any is accepted."""
        return self.input_shape[0] if self.input_shape else None

    @property
    def fixed_shape(self) -> tuple[int, ...] | None:
        """The shape of one sample, if the file fixes it."""
        sizes = tuple(size for size in self.input_shape[1:] if size is not None)
        return sizes if len(sizes) == len(self.input_shape) - 1 else None

    @property
    def input_facts(self) -> dict[str, dict[str, Any]]:
        """Name → type and shape of every input, as plain data."""
        return {name: {"type": kind, "shape": list(shape)} for name, (kind, shape) in self._source.inputs.items()}

    @property
    def output_names(self) -> list[str]:
        """The names of the outputs."""
        return [output.name for output in self._source.graph.output]

    def forward(self, x: Tensor) -> Tensor | dict[str, Tensor]:
        check_input(x, self.input, self.input_shape, str(self._source.path))
        if self._seen is None or self._seen.shape[1:] != x.shape[1:]:
            self._seen = x[: self.batch_size or 1].detach().cpu().contiguous().numpy().copy()
        pieces = [x] if self.batch_size is None else list(x.split(self.batch_size))
        kind = self._source.inputs[self.input][0]
        dtype = TYPES[kind][0] if kind in TYPES else x.dtype
        values: dict[str, list[Any]] = {self.input: [piece.detach().to(dtype) for piece in pieces]}
        for name, array in self._fixed.items():
            values[name] = [repeated(array, self._source.inputs[name][1], len(piece)) for piece in pieces]
        for index, step in enumerate(self._steps.steps):
            if isinstance(step, LayerStep):
                values[step.output] = self._run_layer(step, values[step.inputs[0]])
            else:
                values |= self._run_pieces(index, step, values, x, len(pieces))
            for name in step.last_uses:
                del values[name]
        sizes = [len(piece) for piece in pieces]
        outputs = {
            name: joined(values[name], sizes)
            if name in values
            else torch.from_numpy(np.array(self._source.array(name)))
            for name in self.output_names
        }
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def _run_layer(self, step: LayerStep, pieces: list[Tensor]) -> list[Tensor]:
        module, padding = self.get_submodule(step.layer), self._layers[step.layer].padding
        joined = (
            pieces[0]
            if len(pieces) == 1
            else torch.cat([piece[None] if piece.dim() == 1 else piece for piece in pieces])
        )
        result = module(joined if padding is None else padding.apply(joined))
        if len(pieces) == 1:
            return [result]
        return list(result) if pieces[0].dim() == 1 else list(result.split([len(piece) for piece in pieces]))

    def _run_pieces(
        self, index: int, step: Segment, values: Mapping[str, list[Any]], x: Tensor, n_pieces: int
    ) -> dict[str, list[Any]]:
        """What a segment computes, piece by piece.

        Not in :meth:`forward`, where a variable would keep these values alive after their last use, in every pass that
        halts at a layer.
        """
        results = [
            self._run_segment(index, step, {name: values[name][piece] for name in step.inputs}, x)
            for piece in range(n_pieces)
        ]
        return dict(zip(step.outputs, map(list, zip(*results, strict=True)), strict=True))

    def _run_segment(self, index: int, step: Segment, inputs: Mapping[str, Any], x: Tensor) -> list[Any]:
        feed = {
            name: value.detach().cpu().contiguous().numpy() if isinstance(value, Tensor) else value
            for name, value in inputs.items()
        }
        try:
            results = self._steps.session(index).run(list(step.outputs), feed)
        except InputError:
            raise
        except Exception as error:
            shape = f"shape {tuple(x.shape)}"
            raise InputError(f"{self._source.path} rejects an input of {shape}: {first_line(error)}") from error
        # Text has no tensor; detach lets those who count living tensors see this one.
        return [
            torch.from_numpy(result).detach() if _is_numeric(result) else result for result in map(np.asarray, results)
        ]

    def example(self) -> Tensor | None:
        """A batch that the network accepts: one sample it has seen, or a random one; None if no size is known yet."""
        if self._seen is not None:
            return torch.from_numpy(self._seen.copy())
        if None in self.input_shape[1:]:
            return None
        sizes = [size or 1 for size in self.input_shape]
        dtype = TYPES[self._source.inputs[self.input][0]][0]
        generator = torch.Generator().manual_seed(0)
        if not dtype.is_floating_point:
            return torch.randint(0, 2 if dtype == torch.bool else 128, sizes, generator=generator).to(dtype)
        return torch.randn(sizes, generator=generator).to(dtype)

    def extra_repr(self) -> str:
        n_others = sum(len(step.nodes) for step in self._steps.steps if isinstance(step, Segment))
        return f"{self._source.path.name}, {len(self._layers)} layers, {n_others} other nodes in ONNX Runtime"


def load_onnx(
    path: str | os.PathLike[str], *, input: str | None = None, fixed: Mapping[str, Any] | None = None
) -> OnnxNetwork:
    """The network in an ONNX file, as a module that Tensigma can compress and :func:`tensigma.export` can write back.

    Its Conv, ConvTranspose, Gemm and MatMul nodes with constant weights are plain ``nn.Conv*`` and ``nn.Linear``
    modules; all other nodes run in ONNX Runtime. It has no gradients, so it cannot be refined or fine-tuned. Weights
    that the file keeps in other files must stay there as long as the module is used.

    Args:
        path: The file.
        input: The input that batches go to, if the network has several.
        fixed: The values of all other inputs, by name; one row serves every sample of a batch.

    >>> import tempfile
    >>> import tensigma as ts
    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(32, 10))
    >>> batches = [torch.randn(8, 3, 5, 5, generator=torch.Generator().manual_seed(0))]
    >>> with tempfile.TemporaryDirectory() as place:
    ...     _ = ts.export(model, f"{place}/model.onnx", batches[0])
    ...     network = ts.load_onnx(f"{place}/model.onnx")
    ...     small, report = ts.compress(network, batches, budget=ts.Macs(0.5))
    ...     exported = ts.export(small, f"{place}/small.onnx")
    >>> list(network.layers), report.after.macs <= 0.5 * report.before.macs
    (['0', '2', '4'], True)
    """
    source = read_source(path)
    inputs = list(source.inputs)
    given = dict(fixed or {})
    unknown = [name for name in (*given, *([] if input is None else [input])) if name not in inputs]
    if unknown:
        raise InputError(f"{source.path} has no input {unknown[0]!r}; it has {', '.join(inputs) or 'none'}")
    open_inputs = [name for name in inputs if name not in given]
    others = [name for name in open_inputs if name != input]
    if len(open_inputs) != 1 and (input is None or others):
        shown = "; ".join(f"{name} {list(source.inputs[name][1])}" for name in inputs)
        raise InputError(
            f"{source.path} takes {len(inputs)} inputs ({shown}), and batches go to one of them; name it and give "
            f"values for the others, in Python as input={inputs[0]!r}, fixed={{{inputs[-1]!r}: [[1.0, 1.0]]}}, on the "
            f"command line as '{source.path.name}?input={inputs[0]}&{inputs[-1]}=[[1,1]]'"
        )
    values = {name: _fixed_value(source, name, value) for name, value in given.items()}
    network = OnnxNetwork(source, input=open_inputs[0], fixed=values)
    if not network.layers:
        reasons = "".join(f"; {name}: {reason}" for name, reason in list(network.left_alone.items())[:3])
        raise InputError(
            f"{source.path} has no Conv, ConvTranspose, Gemm or MatMul with constant weights, so there is nothing to "
            f"compress{reasons}"
        )
    return network.eval()


def check_input(x: Tensor, name: str, shape: Sequence[int | None], path: str) -> None:
    """Refuse inputs that the file does not accept, in words that say what it does."""
    wanted = (None, *shape[1:])
    fits = x.dim() == len(wanted) and all(size in (None, given) for size, given in zip(wanted, x.shape, strict=True))
    if not shape or (fits and (shape[0] is None or len(x) % shape[0] == 0)):
        return
    shown = " × ".join("any" if size is None else str(size) for size in shape)
    text = f"{path} takes {name!r} of shape {shown}, and got {' × '.join(map(str, x.shape))}"
    if fits:
        raise InputError(f"{text}: give batches that are a multiple of {shape[0]}")
    if x.dim() == len(wanted) == 4 and wanted[-1] == x.shape[1]:
        raise InputError(
            f"{text}: it takes channels last, as TensorFlow does; for data by name add layout=nhwc, such as "
            "imagefolder:photos?layout=nhwc, and otherwise pass x.permute(0, 2, 3, 1)"
        )
    if x.dim() == len(wanted) == 4 and wanted[1] == x.shape[-1]:
        raise InputError(f"{text}: it takes channels first; pass x.permute(0, 3, 1, 2)")
    sizes = "x".join(str(size or "any") for size in wanted[-2:])
    advice = f"; for data by name add size={sizes}" if x.dim() == len(wanted) == 4 and None not in wanted[-2:] else ""
    raise InputError(text + advice)


def _fixed_value(source: Source, name: str, value: Any) -> np.ndarray:
    kind = source.inputs[name][0]
    array = np.asarray(value)
    return array.astype(torch.empty((), dtype=TYPES[kind][0]).numpy().dtype) if kind in TYPES else array


def _is_numeric(array: np.ndarray) -> bool:
    return array.dtype.kind in "fiub" and array.dtype not in (np.uint16, np.uint32, np.uint64)


class _Steps:
    """The steps of a network and their sessions, each opened when it is first needed; copies share them."""

    def __init__(self, source: Source, steps: list[Step]) -> None:
        self.source, self.steps = source, steps
        self._sessions: dict[int, Any] = {}

    def __deepcopy__(self, memo: Any) -> _Steps:
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Sessions cannot be sent to another process; they are opened again there.
        return {**vars(self), "_sessions": {}}

    def session(self, index: int) -> Any:
        """The session of a segment."""
        if index not in self._sessions:
            step = self.steps[index]
            assert isinstance(step, Segment)
            own = {name for node in step.nodes for name in node.output}
            read = (name for node in step.nodes for name in reads(node) if name not in own)
            nodes, tensors = self.source.closure([name for name in read if name in self.source.constants])
            inputs = {name: self._element(name) for name in step.inputs}
            model = self.source.part([*nodes, *step.nodes], tensors, inputs=inputs, outputs=list(step.outputs))
            self._sessions[index] = session_of(model, folder=self.source.folder, lean=True)
        return self._sessions[index]

    def _element(self, name: str) -> int:
        kind = self.source.types.get(name, "unknown")
        if kind == "tensor(string)":
            return 8
        if kind not in TYPES:
            raise InputError(
                f"{self.source.path}: {name!r} is of type {kind}, which cannot be handed from one part of the network "
                "to another"
            )
        return TYPES[kind][1]


class _Constants(nn.Module):
    """Numbers that nodes outside the layers read: they count as parameters, but only ONNX Runtime computes with them.

    Copies of a network share them.
    """

    def __init__(self, source: Source, layers: Mapping[str, LayerNode]) -> None:
        super().__init__()
        in_layers = {id(layer.node) for layer in layers.values()}
        read = {
            name: None
            for node in source.graph.node
            if id(node) not in in_layers
            for name in reads(node)
            if name in source.constants
            and (name in source.initializers or source.producers[name].op_type == "Constant")
        }
        for name in read:
            array = source.array(name)
            if array.ndim and array.size and array.dtype in (np.float16, np.float32, np.float64):
                key = unique_name("".join(c if c.isalnum() else "_" for c in name), self._parameters)
                self.register_parameter(key, nn.Parameter(torch.from_numpy(np.array(array)), requires_grad=False))

    def __deepcopy__(self, memo: Any) -> _Constants:
        return self

    def extra_repr(self) -> str:
        return f"{sum(math.prod(parameter.shape) for parameter in self.parameters()):,} numbers"

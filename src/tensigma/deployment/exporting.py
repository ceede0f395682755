"""Export a model to one file that runs without Tensigma, kept only if it computes what the model computes."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tensigma.deployment.arguments import batch_axes, call_of, names_of
from tensigma.deployment.graph_export import write_back
from tensigma.deployment.graph_packing import pack_, weights_of_few_bits
from tensigma.deployment.parity import parity, sizes_to_check
from tensigma.errors import ExportError, InputError, TensigmaError
from tensigma.evaluation import count_bytes
from tensigma.files import whole_file
from tensigma.graphs import (
    INT4_OPSET,
    FewBits,
    OnnxModel,
    OnnxNetwork,
    few_bits_in,
    onnx_module,
    rename_outputs,
    runs_int4,
    takes_int4,
    usual_names,
)
from tensigma.running import Key, Several, borrowed, call, device_of, input_of, leaves

ExportFormat = Literal["onnx", "torch-export"]
FORMATS: tuple[ExportFormat, ...] = ("onnx", "torch-export")
#: The usual suffix of a file name.
SUFFIXES: Mapping[str, str] = {"onnx": ".onnx", "torch-export": ".pt2"}
#: Convolutions summed in another order differ by about 1e-6 of the largest output in single precision.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_OPSET = 20
_MAX_BYTES = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Exported:
    """An exported file, and how far its outputs are from those of the model.

    >>> exported = Exported(
    ...     path=Path("small.onnx"),
    ...     format="onnx",
    ...     bytes=5000,
    ...     opset=20,
    ...     dynamic_batch=True,
    ...     batches=(1, 3),
    ...     max_difference=2e-6,
    ...     largest_output=4.0,
    ...     tolerance=1e-4,
    ... )
    >>> exported.max_difference <= exported.tolerance * exported.largest_output, exported.to_json()["path"]
    (True, 'small.onnx')
    """

    path: Path
    format: ExportFormat
    bytes: int
    opset: int | None
    #: Whether the file takes batches of any size; otherwise they must be as large as the example.
    dynamic_batch: bool
    #: Batch sizes on which file and model were compared; empty without a check.
    batches: tuple[int, ...]
    #: The largest |output of the file − output of the model|, and the largest |output of the model|; of several
    #: outputs, those of the one with the largest ratio.
    max_difference: float | None
    largest_output: float | None
    #: The share of ``largest_output`` that ``max_difference`` may reach.
    tolerance: float
    #: How many weights are stored in which type of few bits: ``INT4``, ``INT8`` or ``FP16``.
    packed: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "path": str(self.path), "batches": list(self.batches)}


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    example: Any = None,
    *,
    format: ExportFormat = "onnx",
    input: Key = None,
    dynamic_batch: bool = True,
    tolerance: float | None = None,
    opset: int | None = None,
    check: bool = True,
    pack: bool = True,
) -> Exported:
    """Write ``model`` to the file ``path`` and check that the file computes what the model computes.

    The file does not need Tensigma. An existing file is replaced in one step, and only if the new one passes.

    Args:
        model: Any model whose inputs are tensors, compressed or not. It stays as it is. One from
            :func:`tensigma.load_onnx` is written into the graph it came from, of which only replaced layers change:
            ``dynamic_batch`` and ``opset`` are then those of its file.
        path: The file; ``.onnx`` and ``.pt2`` are usual.
        example: A batch of inputs; of a tuple, the first item. A model that came as an ONNX file and has been run needs
            none.
        input: The entry or position of the model's input in the example; several in a tuple are passed together, and
            the inputs of the file are called like the arguments of ``forward``.
        format: ``"onnx"``, for ONNX Runtime and similar, or ``"torch-export"``, for :func:`torch.export.load`.
        dynamic_batch: Let the file take batches of any size; the check then uses sizes other than that of ``example``.
        tolerance: The largest difference allowed, as a share of the largest value of each output; by default it
            depends on the precision of the model, 1e-4 for float32, and is up to ten times larger if the model itself
            rounds that badly.
        opset: The version of ONNX operators; by default 20, or 21 if a weight of the model has four bits or fewer.
        check: Compare file and model. False writes the file unchecked.
        pack: Store weights of few bits in ONNX files as integers of eight bits, or of four with operators of version
            21, and those in half precision as such. Runtimes make them single when they open the file. False
            stores all weights in the precision of the model, as ``"torch-export"`` does anyway.

    >>> import tempfile
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     exported = export(model, f"{place}/small.onnx", torch.randn(2, 3, 8, 8))
    >>> exported.batches, exported.max_difference < 1e-4 * exported.largest_output
    ((1, 3, 5), True)
    """
    target = Path(path)
    if format not in FORMATS:
        raise InputError(f"got format={format!r}; choose one of {', '.join(FORMATS)}")
    if opset is not None and format != "onnx":
        raise InputError("{opset} goes with {format} only", parameters=(f"opset={opset}", "format='onnx'"))
    if tolerance is not None and not 0 < tolerance < 1:
        raise InputError(
            "got {tolerance}; give a share of the largest output, such as 1e-4", parameters=(f"tolerance={tolerance}",)
        )
    if isinstance(model, OnnxNetwork):
        return _export_graph(
            model, target, example, format=format, tolerance=tolerance, opset=opset, check=check, pack=pack
        )
    if example is None:
        raise InputError("pass {example}, a batch of inputs that the model accepts", parameters=("example",))
    inputs = call_of(model, input_of(example, input, 0))
    if not len(inputs):
        shape = tuple(inputs.values[0].shape)
        raise InputError(f"the example has shape {shape} and no sample in it; give at least one")
    grids: dict[str, FewBits] = {}
    version = opset or _OPSET
    if format == "onnx":
        _check_onnx(model, runtime=check)
        grids = weights_of_few_bits(model) if pack else {}
        version = opset or (INT4_OPSET if any(few.bits <= 4 for few in grids.values()) and runs_int4() else _OPSET)
    write = _write_onnx if format == "onnx" else _write_program
    home = device_of(model)
    device = None if home is None or home.type == "cpu" else "cpu"
    share = tolerance or TOLERANCES.get(_precision(model), 1e-4)
    with borrowed(model, device), torch.no_grad():
        x: Several = inputs.map(lambda value: value.detach().cpu())
        # A size of 1 would be taken for a constant.
        sample = x[[0, 0]] if dynamic_batch and len(x) == 1 else x
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(target) as partial:
            try:
                with _quiet():
                    packed = write(model, sample, partial, dynamic_batch, version, grids)
            except (TensigmaError, OSError):  # OSError: the disk, not the model
                raise
            except Exception as error:
                raise ExportError(
                    f"the model cannot be written as {format}: {_reason(error, dynamic_batch)}"
                ) from error
            tried = sizes_to_check(len(x), dynamic_batch) if check else ()
            difference = largest = None
            if check:
                written = read_exported(partial, format)
                most = share if tolerance else 10 * share
                difference, largest = parity(model, written, x, tried, share, most)
            n_bytes = partial.stat().st_size
    return Exported(
        path=target,
        format=format,
        bytes=n_bytes,
        opset=version if format == "onnx" else None,
        dynamic_batch=dynamic_batch,
        batches=tried,
        max_difference=difference,
        largest_output=largest,
        tolerance=share,
        packed=packed,
    )


def _export_graph(
    network: OnnxNetwork,
    target: Path,
    example: Any,
    *,
    format: ExportFormat,
    tolerance: float | None,
    opset: int | None,
    check: bool,
    pack: bool,
) -> Exported:
    if format != "onnx":
        raise InputError(
            "a model that came as an ONNX file can only be written as {format}", parameters=("format='onnx'",)
        )
    if opset not in (None, network.source.opset):
        raise InputError(
            f"{{opset}} cannot be chosen: the graph keeps its version {network.source.opset}",
            parameters=(f"opset={opset}",),
        )
    share = tolerance or TOLERANCES.get(_precision(network), 1e-4)
    inputs = None if example is None else input_of(example, None, 0)
    if inputs is not None and not isinstance(inputs, Tensor):
        raise InputError("the example is a list of images; the model takes one tensor")
    written = write_back(
        network,
        target,
        inputs,
        share=share,
        most=share if tolerance else 10 * share,
        check=check,
        pack=pack,
    )
    return Exported(
        path=target,
        format="onnx",
        bytes=target.stat().st_size,
        opset=network.source.opset,
        dynamic_batch=network.batch_size is None,
        batches=written.batches,
        max_difference=written.max_difference,
        largest_output=written.largest_output,
        tolerance=share,
        packed=few_bits_in(onnx_module("onnx").load(target, load_external_data=False)),
    )


def _check_onnx(model: nn.Module, *, runtime: bool) -> None:
    """Raise if ``model`` cannot become an ONNX file, or if a package for it is missing."""
    if count_bytes(model) > _MAX_BYTES:
        raise ExportError(
            f"the weights take {count_bytes(model):,} bytes and one ONNX file holds 2 GB; use {{format}}",
            parameters=("format='torch-export'",),
        )
    if _precision(model) not in (torch.float32, torch.float16):
        name = str(_precision(model)).removeprefix("torch.")
        raise InputError(f"the model is in {name}, which ONNX Runtime does not run on CPUs; convert it with .float()")
    check_exporter(runtime=runtime)


def check_exporter(*, runtime: bool = True) -> None:
    """Raise :class:`~tensigma.errors.MissingExtra` if a package is missing that writes ONNX files, or runs them."""
    for name in ("onnx", "onnxscript", *(["onnxruntime"] if runtime else [])):
        onnx_module(name)


def _write_onnx(
    model: nn.Module, inputs: Several, file: Path, dynamic_batch: bool, opset: int, grids: Mapping[str, FewBits]
) -> dict[str, int]:
    onnx = onnx_module("onnx")
    onnx_module("onnxscript")
    answer = call(model, inputs)
    names = list(leaves(answer))
    program = torch.onnx.export(
        model,
        inputs.args,
        kwargs=dict(inputs.kwargs),
        dynamo=True,
        verbose=False,
        opset_version=opset,
        input_names=names_of(model, inputs),
        output_names=usual_names(len(names)),
        dynamic_shapes=batch_axes(model, inputs) if dynamic_batch else None,
    )
    assert program is not None
    proto = program.model_proto
    clean(proto)
    if isinstance(answer, Mapping):
        rename_outputs(proto.graph, names)
    pack_(proto, grids, int4=takes_int4(proto, opset))
    onnx.save_model(proto, file)
    return few_bits_in(proto)


def clean(proto: Any) -> None:
    """Remove what tools leave in a file: Python file names and lines of code, versions of unused operator sets."""
    graph = proto.graph
    for item in (proto, graph, *graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer):
        item.doc_string = ""
        del item.metadata_props[:]
    used = {"", *(node.domain for node in graph.node), *(function.domain for function in proto.functions)}
    versions = [opset for opset in proto.opset_import if opset.domain in used]
    del proto.opset_import[:]
    proto.opset_import.extend(versions)


def _write_program(
    model: nn.Module, inputs: Several, file: Path, dynamic_batch: bool, opset: int, grids: Mapping[str, FewBits]
) -> dict[str, int]:
    shapes = batch_axes(model, inputs) if dynamic_batch else None
    program = torch.export.export(model, inputs.args, dict(inputs.kwargs), dynamic_shapes=shapes)
    # In memory first: torch ends the whole process if it meets a full disk.
    content = io.BytesIO()
    torch.export.save(program, content)
    with file.open("wb") as stream:
        stream.write(content.getbuffer())
    return {}


def read_exported(file: Path, format: ExportFormat) -> nn.Module:
    """What :func:`export` wrote, as a module that can be called."""
    if format == "onnx":
        return OnnxModel(file)
    with _quiet(), file.open("rb") as stream:
        program = torch.export.load(stream).module()
    # An exported program raises when its mode is switched; wrapped as a function it has none.
    return _Program(program)


class _Program(nn.Module):
    def __init__(self, program: Callable[..., Any]) -> None:
        super().__init__()
        self._program = [program]

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        return self._program[0](*args, **kwargs)


def _precision(model: nn.Module) -> torch.dtype:
    for tensor in model.parameters():
        if tensor.is_floating_point():
            return tensor.dtype
    return torch.float32


def _reason(error: Exception, dynamic_batch: bool) -> str:
    """The innermost cause in one line: exporters wrap it in pages of advice."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    text = f"{type(cause).__name__}: {lines[0] if lines else 'no reason given'}"
    if "data-dependent" in text:
        return (
            f"{text}. A size in the model depends on values, as the number of boxes of a detector does; export the "
            "part before that, such as model.backbone, or write an archive with ts.save"
        )
    if dynamic_batch:
        text += "; dynamic_batch=False may help if the model depends on the batch size"
    return text


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what the exporters print and log, and two warnings that they cause inside PyTorch itself."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`", category=FutureWarning)
        # Several inputs have one batch.
        warnings.filterwarnings("ignore", message=r"# The axis name: batch will not be used", category=UserWarning)
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)

"""Graphs on disk: one file, or a file and its weights beside it, kept only if it is valid and computes the same."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensigma.errors import ExportError
from tensigma.graphs.network import OnnxNetwork
from tensigma.graphs.packages import first_line, onnx_module
from tensigma.graphs.source import external_tensors
from tensigma.graphs.writing import to_proto

#: One message may be this large, a little less than 2 GB.
_LARGEST = 2**31 - 2**20


def write_graph(
    network: OnnxNetwork, target: Path, check: Callable[[Path], Any] | None = None, *, pack: bool = True
) -> Any:
    """Write ``network`` to the file ``target``; returns what ``check`` returns for the new file.

    Weights go to a file beside it if the original's did, or if one file cannot hold them. If the checker or ``check``
    raises, what was there before stays. With ``pack``, weights of few bits take few bits.
    """
    onnx = onnx_module("onnx")
    proto = to_proto(network, pack=pack)
    source = network.source
    weights = f"{target.name}.data"
    outside = source.has_external_weights or _n_bytes(proto) > _LARGEST
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tensigma-", dir=target.parent) as scratch:
        partial = Path(scratch) / target.name
        if outside:
            for tensor in list(external_tensors(proto)):
                onnx.external_data_helper.load_external_data_for_tensor(tensor, os.fspath(source.folder))
                tensor.data_location = onnx.TensorProto.DEFAULT
                del tensor.external_data[:]
            onnx.save_model(proto, partial, save_as_external_data=True, location=weights, size_threshold=1024)
            if (Path(scratch) / weights).is_file():
                # onnx lets nobody but the owner read it.
                (Path(scratch) / weights).chmod(partial.stat().st_mode & 0o777)
        else:
            onnx.save_model(proto, partial)
        _check_valid(network, partial)
        result = None if check is None else check(partial)
        if outside and (Path(scratch) / weights).is_file():
            (Path(scratch) / weights).replace(target.with_name(weights))
        partial.replace(target)
    return result


def _n_bytes(proto: Any) -> int:
    """The size of a graph as one message, roughly. Messages that are too large cannot be asked for theirs."""
    graph = proto.graph
    stored = sum(len(tensor.raw_data) or tensor.ByteSize() for tensor in graph.initializer)
    rest = (*graph.node, *graph.sparse_initializer, *graph.value_info)
    return int(stored + sum(message.ByteSize() for message in rest))


def _check_valid(network: OnnxNetwork, file: Path) -> None:
    onnx = onnx_module("onnx")
    try:
        onnx.checker.check_model(os.fspath(file))
    except Exception as error:
        try:
            onnx.checker.check_model(os.fspath(network.source.path))
        except Exception:
            # The original does not pass either, and its runtime does not mind.
            return
        raise ExportError(f"the new graph is not valid ONNX: {first_line(error)}; the file was not kept") from error

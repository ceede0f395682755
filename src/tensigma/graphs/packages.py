"""Packages of the extra ``onnx``, and sessions of ONNX Runtime as this library wants them."""

from __future__ import annotations

import importlib
import os
from typing import Any

from tensigma.errors import MissingExtra

_ERRORS_ONLY = 3
#: A session option by its name in ONNX Runtime: where the weights of a model that is given as bytes are.
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"


def onnx_module(name: str) -> Any:
    """A module of the extra ``onnx``, imported when it is first needed.

    >>> onnx_module("onnx").__name__
    'onnx'
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise MissingExtra(
            f"ONNX files need {package}, which is not installed ({error}); run: pip install 'tensigma[onnx]'"
        ) from None


def session_of(
    model: str | os.PathLike[str] | bytes,
    *,
    folder: str | os.PathLike[str] | None = None,
    threads: int = 1,
    optimise: bool = True,
    lean: bool = False,
    profile: str | None = None,
) -> Any:
    """A session of ONNX Runtime on the CPU for a file, or for a model as bytes whose large weights are in ``folder``.

    ``lean`` is for many small sessions: they keep no memory between runs. ``profile`` names a file for the times of
    all nodes.
    """
    runtime = onnx_module("onnxruntime")
    levels = runtime.GraphOptimizationLevel
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimise else levels.ORT_DISABLE_ALL
    options.log_severity_level = _ERRORS_ONLY
    if lean:
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, profile
    if folder is not None:
        options.add_session_config_entry(_WEIGHTS_FOLDER, os.fspath(folder))
    source = model if isinstance(model, bytes) else os.fspath(model)
    return runtime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def first_line(error: BaseException) -> str:
    """What an error says, without the pages that a runtime adds.

    >>> first_line(ValueError("wrong shape\\n  at node 3"))
    'wrong shape'
    """
    return str(error).strip().partition("\n")[0]

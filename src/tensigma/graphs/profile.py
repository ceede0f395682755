"""Where the time of an ONNX file goes."""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from tensigma.graphs.onnx_model import OnnxModel
from tensigma.graphs.packages import session_of

#: Runs before and during the measurement.
_WARM_UP, _RUNS = 2, 8


def times_by_operator(
    path: str | os.PathLike[str], x: Tensor, *, fixed: Mapping[str, np.ndarray] | None = None
) -> dict[str, float]:
    """Operator → seconds that ONNX Runtime spends on all nodes of it in one run over ``x``, the longest first.

    Operators are those that run after optimisation: a convolution with its activation may be one.
    """
    feed = next(OnnxModel(path, fixed=fixed).feeds(x))
    with tempfile.TemporaryDirectory(prefix="tensigma-") as folder:
        session = session_of(path, profile=str(Path(folder) / "profile"))
        for _ in range(_WARM_UP + _RUNS):
            session.run(None, feed)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    runs: dict[str, list[float]] = defaultdict(list)
    operators = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            runs[event["name"]].append(event["dur"] / 1e6)
            operators[event["name"]] = event["args"]["op_name"]
    totals: dict[str, float] = defaultdict(float)
    for name, seconds in runs.items():
        # The fastest run of each node: other work on the machine only adds.
        totals[operators[name]] += min(seconds)
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def is_layer(operator: str) -> bool:
    """Whether an operator that runs is a convolution or a product with weights.

    >>> is_layer("FusedConv"), is_layer("MatMul"), is_layer("HardSigmoid")
    (True, True, False)
    """
    return "Conv" in operator or "Gemm" in operator or "MatMul" in operator

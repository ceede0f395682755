"""A network that came as an ONNX file, all of it in ONNX Runtime, as it will be used."""

from __future__ import annotations

import tempfile
from pathlib import Path

from torch import nn

from tensigma.graphs.network import OnnxNetwork
from tensigma.graphs.onnx_model import OnnxModel
from tensigma.graphs.saving import write_graph


def deployed(model: nn.Module) -> nn.Module:
    """What to measure the time of: a network that came as an ONNX file in one session, any other model as it is.

    >>> model = nn.Linear(2, 2)
    >>> deployed(model) is model
    True
    """
    if not isinstance(model, OnnxNetwork):
        return model
    with tempfile.TemporaryDirectory(prefix="tensigma-") as folder:
        file = Path(folder) / "model.onnx"
        write_graph(model, file)
        return OnnxModel(file, fixed=model.fixed_inputs)

"""NNCF's post-training INT8 of the original, as an ONNX graph."""

from __future__ import annotations

from pathlib import Path

import nncf
import onnx

from peers.search import n_params
from peers.worker import Assignment, main

# NNCF's own default.
_IMAGES = 300


def compress(assignment: Assignment) -> Path:
    model = onnx.load(Path(assignment.job.material) / "original.onnx")
    name = model.graph.input[0].name
    images = nncf.Dataset(assignment.images[:_IMAGES], lambda image: {name: image[None].numpy()})
    file = Path(assignment.job.out) / "int8.onnx"
    onnx.save(nncf.quantize(model, images, subset_size=_IMAGES), file)
    assignment.notes["params"] = n_params(assignment.model)
    return file


if __name__ == "__main__":
    main(compress)

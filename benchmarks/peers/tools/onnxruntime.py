"""ONNX Runtime's static INT8 of the original: QDQ, weights by channel, ranges from the calibration images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from peers.search import n_params
from peers.worker import Assignment, main

# As many as Tensigma's own INT8 takes.
_IMAGES = 256


class Reader(CalibrationDataReader):
    """One image at a time."""

    def __init__(self, assignment: Assignment, name: str) -> None:
        self._images: Iterator[dict[str, Any]] = iter(
            {name: image[None].numpy()} for image in assignment.images[:_IMAGES]
        )

    def get_next(self) -> dict[str, Any] | None:
        return next(self._images, None)


def compress(assignment: Assignment) -> Path:
    import onnx

    out = Path(assignment.job.out)
    original = Path(assignment.job.material) / "original.onnx"
    name = onnx.load(original).graph.input[0].name
    quant_pre_process(str(original), str(out / "prepared.onnx"), skip_symbolic_shape=True)
    quantize_static(
        str(out / "prepared.onnx"),
        str(out / "int8.onnx"),
        Reader(assignment, name),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        # Seven bits for weights: without VNNI, sums of eight by eight bits saturate.
        reduce_range=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    assignment.notes["params"] = n_params(assignment.model)
    return out / "int8.onnx"


if __name__ == "__main__":
    main(compress)

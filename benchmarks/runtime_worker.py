"""One runtime over several files: answers and times. Run by the Python of that runtime's own environment.

    python runtime_worker.py RUNTIME IMAGES.npy OUT.json NAME=FILE…

FILE is an ONNX file, or without its suffix the place of a ``.pt2`` beside it, which ExecuTorch takes.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Run = Callable[[np.ndarray], np.ndarray]
_WARM_UP, _ROUNDS, _MOST_ROUNDS, _SECONDS = 3, 10, 200, 5.0


def onnxruntime(file: Path) -> Run:
    import onnxruntime as package

    options = package.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = package.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: np.asarray(session.run(None, {name: x})[0])


def openvino(file: Path) -> Run:
    import openvino as package

    options = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": "1", "INFERENCE_PRECISION_HINT": "f32"}
    request = package.Core().compile_model(str(file), "CPU", options).create_infer_request()
    return lambda x: np.array(next(iter(request.infer([x]).values())))


def tract(file: Path) -> Run:
    import tract as package

    model = package.onnx().load(str(file)).into_model().into_runnable()
    return lambda x: np.array(model.run([x])[0].to_numpy())


def executorch(file: Path) -> Run:
    import torch
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    program = file.with_suffix(".pt2")
    if not program.exists():
        raise ValueError("it reads programs of torch.export, and the INT8 model is an ONNX file")
    lowered = to_edge_transform_and_lower(torch.export.load(program), partitioner=[XnnpackPartitioner()])
    # The buffer and the program must outlive the method.
    buffer = lowered.to_executorch().buffer
    loaded = Runtime.get().load_program(buffer)
    method = loaded.load_method("forward")

    def run(x: np.ndarray, keep: Any = (buffer, loaded)) -> np.ndarray:
        return method.execute((torch.from_numpy(x),))[0].numpy().copy()

    return run


RUNTIMES: dict[str, Callable[[Path], Run]] = {
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "executorch": executorch,
    "tract": tract,
}


def measure(runs: dict[str, Run], x: np.ndarray) -> dict[str, float]:
    """The least processor time of one call of each, in turns; all threads count, whoever computes."""
    best = dict.fromkeys(runs, math.inf)
    begin = time.process_time()
    for turn in range(_WARM_UP + _MOST_ROUNDS):
        for name, run in runs.items():
            start = time.process_time()
            run(x)
            if turn >= _WARM_UP:
                best[name] = min(best[name], time.process_time() - start)
        if turn >= _WARM_UP + _ROUNDS and time.process_time() - begin > _SECONDS:
            break
    return best


def work(build: Callable[[Path], Run], files: dict[str, Path], images: np.ndarray) -> dict[str, Any]:
    """By name: the answers to all images and the seconds of one, or the reason why there are none."""
    found: dict[str, Any] = {}
    runs: dict[str, Run] = {}
    for name, file in files.items():
        try:
            run = build(file)
            answers = [run(image[None]).ravel().tolist() for image in images]
        except Exception as error:  # a runtime raises what it likes
            found[name] = {"failure": f"{type(error).__name__}: {error}"[:300]}
        else:
            runs[name], found[name] = run, {"answers": answers}
    for name, seconds in measure(runs, images[:1]).items():
        found[name]["seconds"] = seconds
    return found


def main() -> None:
    runtime, images, out, *named = sys.argv[1:]
    files = {name: Path(file) for name, _, file in (item.partition("=") for item in named)}
    result = work(RUNTIMES[runtime], files, np.load(images))
    Path(out).write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Whether fewer multiply-adds of an ONNX file became less time, and why not."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensigma.evaluation.latency import measure_latency
from tensigma.graphs import OnnxNetwork, is_layer, times_by_operator, write_graph

#: The share of the saving in multiply-adds that should become a gain in time.
_ENOUGH = 0.85


def runtime_note(
    original: OnnxNetwork, small: OnnxNetwork, macs: tuple[int, int], *, rounds: int = 20
) -> dict[str, Any]:
    """Times of both networks in ONNX Runtime on one thread, as plain data, for the notes of a plan or a report.

    Both must have been run, or have an input of fixed size.
    """
    x = small.example()
    assert x is not None
    before, after = measure_latency([original, small], x, rounds=rounds)
    with tempfile.TemporaryDirectory(prefix="tensigma-") as folder:
        file = Path(folder) / "model.onnx"
        write_graph(original, file)
        times = times_by_operator(file, x, fixed=original.fixed_inputs)
    total = sum(times.values())
    others = {operator: seconds / total for operator, seconds in times.items() if not is_layer(operator)}
    speedup, saving = before.minimum / after.minimum, macs[0] / max(macs[1], 1)
    note = {
        "seconds": [before.minimum, after.minimum],
        "speedup": speedup,
        "saving": saving,
        "share_of_saving": speedup / saving,
        "outside_layers": sum(others.values()),
        "operators": dict(list(others.items())[:3]),
    }
    return {**note, "words": runtime_in_words(note)}


def runtime_in_words(note: Mapping[str, Any]) -> str:
    """What such a note says.

    >>> note = {"seconds": [0.01, 0.005], "speedup": 2.0, "saving": 2.0, "share_of_saving": 1.0}
    >>> runtime_in_words(note)
    'ONNX Runtime takes 5 in place of 10 ms: 2.00 times faster, with 2.00 times fewer MACs'
    """
    before, after = (1000 * seconds for seconds in note["seconds"])
    faster = (
        f"{note['speedup']:.2f} times faster" if note["speedup"] >= 1 else f"{1 / note['speedup']:.2f} times slower"
    )
    fewer = f"with {note['saving']:.2f} times fewer MACs"
    text = f"ONNX Runtime takes {after:.3g} in place of {before:.3g} ms: {faster}, {fewer}"
    if note["share_of_saving"] >= _ENOUGH:
        return text
    operators = ", ".join(note["operators"])
    return (
        f"{text}. {100 * note['outside_layers']:.0f} % of the original's time is spent outside its layers "
        f"({operators}), and small layers take as long with fewer channels; a budget of time, such as "
        "latency=0.8, counts what this machine needs"
    )

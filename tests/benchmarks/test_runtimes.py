"""Figures of runtimes from what their workers found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import runtime_worker
import runtimes


def test_a_worker_tells_answers_times_and_reasons() -> None:
    def build(file: Path) -> Callable[[np.ndarray], np.ndarray]:
        if file.name == "int8":
            raise ValueError("this operator is unknown")
        return lambda x: 2 * x

    images = np.arange(6.0).reshape(2, 3)
    found = runtime_worker.work(build, {"dense": Path("dense"), "int8": Path("int8")}, images)
    assert found["dense"]["answers"] == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]
    assert found["dense"]["seconds"] >= 0
    assert found["int8"] == {"failure": "ValueError: this operator is unknown"}


def test_ratios_are_to_the_dense_model_in_the_same_runtime() -> None:
    macs = {"dense": 100, "compressed": 50, "int8": 100}
    reference = {kind: {"answers": [[1.0, -4.0]], "seconds": 9.0} for kind in macs}
    found = {
        "dense": {"answers": [[1.0, -4.0]], "seconds": 2.0},
        "compressed": {"answers": [[1.08, -4.0]], "seconds": 1.25},
        "int8": {"failure": "no such operator | here"},
    }
    dense, compressed, int8 = runtimes.records_of("squeezenet", "tract", found, reference, macs)
    assert (dense["time_ratio"], dense["share_of_saving"], dense["difference"]) == (1.0, 1.0, 0.0)
    assert (compressed["time_ratio"], compressed["share_of_saving"]) == (0.625, 0.8)
    assert compressed["difference"] == pytest.approx(0.02)
    text = runtimes.table([dense, compressed, int8])
    assert "| tract 0.23.9 | compressed to half its MACs | 0 M | 0.62 | 0.80 | 2e-02 |" in text
    assert "no such operator \\| here" in text
    assert runtimes.table([]) == ""

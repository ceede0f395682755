"""What checking the digest of every tensor adds to loading an archive, beside reading its file.

    python benchmarks/digests.py [--megabytes 500] [--rounds 5]

Three things take turns in one process, with the file in the page cache: its bytes are read into memory; the archive is
loaded with its digests checked; and the same archive without digests, as version 0.1 wrote them, is loaded. The figures
are ratios of the shortest times, of processor time over all threads and of wall time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch
from torch import nn

import tensigma as ts

_WIDTH = 2048


def network(megabytes: int) -> nn.Module:
    """Linear layers whose weights take that much."""
    count = max(1, round(megabytes * 1e6 / (4 * _WIDTH**2)))
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(count)))


def without_digests(source: Path, target: Path) -> None:
    """A copy of an archive whose manifest knows no digests."""
    shutil.copytree(source, target)
    file = target / "manifest.json"
    manifest = json.loads(file.read_text(encoding="utf-8"))
    plain = {key: value for key, value in manifest.items() if key not in ("digest", "digests")}
    file.write_text(json.dumps(plain), encoding="utf-8")


def measure(works: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """The shortest processor and wall time of each, taken in turn after one round that warms up."""
    best = {name: {"processor": float("inf"), "wall": float("inf")} for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            start = time.process_time(), time.perf_counter()
            work()
            taken = time.process_time() - start[0], time.perf_counter() - start[1]
            if turn:
                for key, seconds in zip(("processor", "wall"), taken, strict=True):
                    best[name][key] = min(best[name][key], seconds)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = network(options.megabytes)
    with tempfile.TemporaryDirectory(prefix="tensigma-digests-") as scratch:
        checked, plain = Path(scratch) / "checked", Path(scratch) / "plain"
        ts.save(model, checked)
        without_digests(checked, plain)
        size = (checked / "model.safetensors").stat().st_size
        times = measure(
            {
                "read": (checked / "model.safetensors").read_bytes,
                "load": lambda: ts.load(checked, model),
                "load without digests": lambda: ts.load(plain, model),
            },
            options.rounds,
        )
    ratios = {
        key: {
            "load / read": times["load"][key] / times["read"][key],
            "load / load without digests": times["load"][key] / times["load without digests"][key],
        }
        for key in ("processor", "wall")
    }
    gigabytes = {key: size / 1e9 / times["load"][key] for key in ("processor", "wall")}
    for key in ratios:
        print(
            f"{key} time: loading takes {ratios[key]['load / read']:.2f} times reading and "
            f"{ratios[key]['load / load without digests']:.2f} times loading without digests, {gigabytes[key]:.2f} GB/s"
        )
    result = {"bytes": size, "rounds": options.rounds, "seconds": times, "ratios": ratios, "gb_per_s": gigabytes}
    print(f"written to {machine.write('benchmark_digests', result)}")


if __name__ == "__main__":
    main()

"""Memory while calibrating on many images from shards: it must not grow with their number.

    python benchmarks/streaming.py [--images 100000]

Ten shards of tiny generated images are written to a temporary folder and read through ``webdataset:`` into
``tensigma.calibrate``. Resident memory is noted after every hundredth of the images.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
import numpy as np
import psutil
import torch
from PIL import Image
from torch import nn

import tensigma as ts
from tensigma.zoo import load_data

SHARDS, SIDE, BATCH = 10, 16, 100


def write_shards(folder: Path, n_images: int) -> int:
    """Images of noise with their classes; returns their bytes."""
    generator = np.random.default_rng(0)
    total = 0
    for shard in range(SHARDS):
        with tarfile.open(folder / f"images-{shard:03}.tar", "w") as tar:
            for number in range(shard, n_images, SHARDS):
                pixels = generator.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
                stream = io.BytesIO()
                Image.fromarray(pixels).save(stream, "PNG")
                for ending, content in (("png", stream.getvalue()), ("cls", str(number % 10).encode())):
                    member = tarfile.TarInfo(f"{number:07}.{ending}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
                total += stream.tell()
    return total


def measure(n_images: int) -> dict[str, Any]:
    """Resident megabytes while calibrating."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2)).eval()
    process = psutil.Process()
    resident: list[float] = []
    with tempfile.TemporaryDirectory() as place:
        n_bytes = write_shards(Path(place), n_images)
        start = time.process_time()
        data = load_data(
            f"webdataset:{place}/images-{{000..{SHARDS - 1:03}}}.tar?size={SIDE}&resize={SIDE}", batch_size=BATCH
        )
        indexing = time.process_time() - start
        every = max(1, n_images // BATCH // 100)

        def note(state: Any) -> None:
            if state.done % every == 0:
                resident.append(process.memory_info().rss / 1e6)

        start = time.process_time()
        stats = ts.calibrate(model, data, progress=note)
        seconds = time.process_time() - start
    assert stats["0"].samples == n_images
    tenth = max(1, len(resident) // 10)
    return {
        "images": n_images,
        "megabytes_of_images": round(n_bytes / 1e6, 1),
        "megabytes_decoded": round(n_images * SIDE * SIDE * 3 * 4 / 1e6, 1),
        "resident_after_a_tenth": round(max(resident[:tenth]), 1),
        "resident_at_most": round(max(resident), 1),
        "growth_after_a_tenth": round(max(resident) - max(resident[:tenth]), 1),
        "cpu_seconds_indexing": round(indexing, 1),
        "cpu_seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=100_000)
    result = measure(parser.parse_args().images)
    machine.write("benchmark_streaming", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

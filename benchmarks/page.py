"""``docs/benchmarks.md`` from the results of the benchmarks.

python benchmarks/page.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from machine import RESULTS

PAGE = RESULTS.parent / "docs" / "benchmarks.md"

INTRODUCTION = """\
# Speed and memory

Every ratio compares two things in one run on one machine; seconds stand beside them to give an idea. `python
benchmarks/page.py` writes this page from the JSON files in `results/`, and each part names the command that measures
it.
"""

WHOLE = """\
## A whole compression

`python benchmarks/whole.py`: calibration, planning, fitting in sequence and saving, `budget=ts.Params(0.5)` and
defaults, against one forward pass of the original over the same images. ResNet-50 has real weights, ResNet-18
torchvision's shapes and random weights. CPU seconds count all threads and depend less on what else the machine does.
"""

GROWTH = """\
## How it grows

`python benchmarks/growth.py`: the slope of log(time) or log(memory) over log(size). 1 means that twice the size takes
twice as long. Times are CPU seconds of one thread.
"""

LIMIT = """\
The limit of a solver under Σ is one product of Σ (d × d, d = 9 channels) with its factors, which grows with the cube
of the width at half the parameters. Below, the time of each solution in such products, at the speed of a large matrix
product on the same machine ({speed:.0f} G multiply-adds a second). CP is searched under a separable model of Σ first,
and takes fewer of them the wider a layer is. Layers of at most 1,024 inputs have finer error curves and are searched
for longer, which is why the narrowest takes longer than the next.
"""

SOLVERS = """\
## Solvers

`python benchmarks/solvers.py`: grams of a ResNet-18 on real images, kernels with a power-law spectrum. TensorLy's
decompositions are unweighted: they approximate the weights, ours what the layer computes.

CP of the widest layers takes longer than TensorLy's sweeps. A product with their Σ alone, 21 G multiply-adds, takes
about as long as a third of such a sweep, and the search goes on gaining for more than a hundred of them. The error
falls slowly whatever the steps: on a 512×512×3×3 layer of a ResNet-50 under a separable Σ, Gauss–Newton steps by
conjugate gradients come less far in the same time, a longer memory as far, and a smaller ridge 2 % further. A hundred
steps under the full Σ take twice as long as the defaults and end 4 to 5 % lower. At the same size Tucker-2 and spatial
SVD have 1.7 to 2.3 times the error on that layer, so CP is worth its time.
"""

STREAMING = """\
## Many images from shards

`python benchmarks/streaming.py`: `ts.calibrate` of two convolutions over generated images of 16×16, read through
`webdataset:` from ten tar files. Memory is what the process holds, noted after every hundredth of the images.
"""


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def whole(result: Mapping[str, Any]) -> str:
    networks = result["networks"]
    stages = list(dict.fromkeys(stage for network in networks.values() for stage in network["stages_cpu"]))
    rows: list[tuple[str, Callable[[Mapping[str, Any]], object]]] = [
        ("images", lambda row: row["images"]),
        ("whole ÷ one forward pass, by the clock", lambda row: row["whole_to_forward"]),
        ("the same in CPU seconds", lambda row: row["whole_to_forward_cpu"]),
        ("seconds", lambda row: f"{row['seconds']:.0f}"),
        ("fitting in sequence without solving ÷ a pass of both", _in_sequence),
        ("samples that layers were fitted on", lambda row: row["sequential_samples"]),
        ("measuring effects ÷ one forward pass", lambda row: row["effects_to_forward"]),
        ("peak memory above the model", lambda row: f"{row['peak_gb']} GB"),
        *((f"CPU seconds: {stage}", _stage(stage)) for stage in stages),
    ]
    body = [[name, *(read(network) for network in networks.values())] for name, read in rows]
    remark = f"{result['remark']}\n\n" if "remark" in result else ""
    return WHOLE + "\n" + table(["", *networks], body) + "\n" + remark + _about(result)


def _in_sequence(row: Mapping[str, Any]) -> object:
    return row["sequential_without_solving_to_both_forwards"]


def _stage(stage: str) -> Callable[[Mapping[str, Any]], object]:
    return lambda row: f"{row['stages_cpu'].get(stage, 0.0):.0f}"


def growth(result: Mapping[str, Any]) -> str:
    text = GROWTH + "\n"
    rows = []
    for size in ("images", "layers", "width"):
        sizes = [row[size] for row in result[size]["rows"]]
        for name, exponent in result[size]["exponents"].items():
            if not name.endswith("_products"):
                rows.append([f"{size}, {sizes[0]:,} to {sizes[-1]:,}", _worded(name), exponent])
    text += table(["size", "what", "exponent"], rows)
    text += "\n" + LIMIT.format(speed=result["gemm_multiply_adds_per_second"] / 1e9) + "\n"
    widths = [
        [
            row["width"],
            f"{row['curves']:.1f} s",
            f"{row['cp_joint']:.1f} s",
            f"{row['cp_joint_products']:.0f}",
            f"{row['tucker2']:.1f} s",
            f"{row['tucker2_products']:.0f}",
            f"{row['bytes'] / 1e9:.2f} GB",
        ]
        for row in result["width"]["rows"]
    ]
    columns = ["channels", "error curves", "CP, joint taps", "in products", "Tucker-2", "in products", "memory"]
    return text + table(columns, widths) + "\n" + _about(result)


def _worded(name: str) -> str:
    names = {
        "calibration": "calibration",
        "sequence_without_solving": "fitting in sequence, without solving",
        "calibration_bytes": "memory of calibration",
        "sequence_bytes": "memory of fitting in sequence",
        "whole": "a whole compression",
        "whole_bytes": "memory of a whole compression",
        "curves": "error curves of one layer",
        "cp_joint": "CP with joint taps at half the parameters",
        "tucker2": "Tucker-2 at half the parameters",
        "bytes": "memory of all three",
    }
    return names[name]


def solvers(result: Mapping[str, Any]) -> str:
    rows = [[row["what"], f"{row['ratio']:.3g}"] for row in result["rows"]]
    return SOLVERS + "\n" + table(["what", "ratio"], rows) + "\n" + _about(result)


def streaming(result: Mapping[str, Any]) -> str:
    rows = [
        ["images", f"{result['images']:,}"],
        ["their files", f"{result['megabytes_of_images']:.0f} MB"],
        ["decoded, as the network takes them", f"{result['megabytes_decoded']:.0f} MB"],
        ["memory after a tenth of them", f"{result['resident_after_a_tenth']:.0f} MB"],
        ["growth from there to the end", f"{result['growth_after_a_tenth']:.1f} MB"],
        ["CPU seconds: reading the headers", f"{result['cpu_seconds_indexing']:.0f}"],
        ["CPU seconds: calibrating", f"{result['cpu_seconds']:.0f}"],
    ]
    return STREAMING + "\n" + table(["", ""], rows) + "\n" + _about(result)


def _about(result: Mapping[str, Any]) -> str:
    about = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return f"<small>{about['cpu']}, {about['threads']} threads, Python {about['python']}, {versions}.</small>\n"


#: Result file → what the page says about it.
PARTS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "benchmark_whole": whole,
    "benchmark_growth": growth,
    "benchmark_solvers": solvers,
    "benchmark_streaming": streaming,
}


def render() -> str:
    parts = [INTRODUCTION]
    for name, part in PARTS.items():
        file = RESULTS / f"{name}.json"
        if file.is_file():
            parts.append(part(json.loads(file.read_text(encoding="utf-8"))))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")

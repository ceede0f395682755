"""Whether fewer multiply-adds become less time: one model dense, compressed, and both in INT8, in four runtimes.

    python benchmarks/runtimes.py [--models squeezenet resnet50] [--only openvino] [--again]

Each runtime runs in an environment of its own (``peers/environments.py``) and times all files in turns, one image on
one thread. Writes results/benchmark_runtimes.json after every runtime; docs/peers.md shows it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import machine
import numpy as np
import torch
from peers.counting import macs_of
from peers.environments import NoEnvironment, python_of, reason, variables
from peers.judge import to_onnx
from peers.subjects import SUBJECTS, Subject

import tensigma as ts
from tensigma.files import read_json, whole_file

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "benchmark_runtimes.json"
CACHE = ROOT / ".cache" / "peers"
VERSIONS = {
    "onnxruntime": "ONNX Runtime 1.31.1",
    "openvino": "OpenVINO 2026.4.1",
    "executorch": "ExecuTorch 1.5.1, XNNPACK",
    "tract": "tract 0.23.9",
}
KINDS = {
    "dense": "original",
    "compressed": "compressed to half its MACs",
    "int8": "original in INT8",
    "compressed-int8": "compressed, then INT8",
}
MODELS = ("squeezenet", "resnet50")
_BUDGET, _IMAGES, _SAMPLES = 0.5, 8, 500


def prepare(subject: Subject, data: Path, folder: Path) -> dict[str, Path]:
    """The four files of a network, made once."""
    place = folder / subject.name
    place.mkdir(parents=True, exist_ok=True)
    files = {kind: place / f"{kind}.onnx" for kind in KINDS}
    images, _ = subject.images("calibration", data)
    np.save(place / "images.npy", images[:_IMAGES].numpy())
    batches = list(images[:_SAMPLES].split(32))
    model = subject.load(data)
    if not files["dense"].exists():
        export(model, files["dense"], images[:1])
    if not files["compressed"].exists() or not files["compressed-int8"].exists():
        small = ts.compress(model, batches, budget=ts.Macs(_BUDGET))[0]
        export(small, files["compressed"], images[:1])
        ts.quantize(small, files["compressed-int8"], batches, latency=False)
    if not files["int8"].exists():
        ts.quantize(model, files["int8"], batches, latency=False)
    return files


def export(model: torch.nn.Module, file: Path, example: torch.Tensor) -> None:
    program = file.with_suffix(".pt2")
    with torch.no_grad():
        torch.export.save(torch.export.export(model.eval(), (example,)), program)
    to_onnx(program).replace(file)


def run(runtime: str, files: dict[str, Path], environments: Path) -> dict[str, Any]:
    """What the worker found, or the reason why there is nothing, for every file."""
    try:
        python = python_of(runtime, environments)
    except NoEnvironment as error:
        return {kind: {"failure": f"not installed: {error}"} for kind in files}
    with tempfile.TemporaryDirectory(prefix="runtimes-") as folder:
        out = Path(folder) / "out.json"
        worker = Path(__file__).with_name("runtime_worker.py")
        command = [str(python), str(worker), runtime, str(files["dense"].with_name("images.npy")), str(out)]
        command += [f"{kind}={file}" for kind, file in files.items()]
        done = subprocess.run(command, capture_output=True, text=True, env=variables(), cwd=folder)
        if done.returncode or not out.exists():
            return {kind: {"failure": reason(done.stderr)} for kind in files}
        return read_json(out)


def records_of(
    model: str, runtime: str, found: dict[str, Any], reference: dict[str, Any], macs: dict[str, int]
) -> list[dict[str, Any]]:
    """Figures instead of answers: differences from ONNX Runtime's, times as ratios to the dense model."""
    records = []
    for kind, facts in found.items():
        record: dict[str, Any] = {"model": model, "runtime": runtime, "kind": kind, "macs": macs[kind]}
        if "failure" in facts:
            records.append({**record, "failure": facts["failure"]})
            continue
        record["milliseconds"] = round(1000 * facts["seconds"], 3)
        if "answers" in reference.get(kind, {}):
            expected, answers = np.array(reference[kind]["answers"]), np.array(facts["answers"])
            record["difference"] = float(f"{np.abs(answers - expected).max() / np.abs(expected).max():.2g}")
        if "seconds" in found["dense"]:
            speedup = found["dense"]["seconds"] / facts["seconds"]
            record["time_ratio"] = round(1 / speedup, 4)
            record["share_of_saving"] = round(speedup / (macs["dense"] / macs[kind]), 4)
        records.append(record)
    return records


def table(records: list[dict[str, Any]]) -> str:
    """Markdown; empty where nothing has run."""
    if not records:
        return ""
    lines = [
        "One image on one thread, processor time as a share of the original's in the same runtime and run; *share*:",
        "the gain in time divided by the saving in MACs, 1 where all of it became time. *difference*: from ONNX",
        "Runtime, relative to the largest answer. `python benchmarks/runtimes.py` runs it.",
        "",
        "| network | runtime | model | MACs | time | share | difference | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in records:
        cells = [SUBJECTS[record["model"]].title, VERSIONS[record["runtime"]], KINDS[record["kind"]]]
        cells.append(f"{record['macs'] / 1e6:,.0f} M")
        share = record.get("share_of_saving")
        cells.append(f"{record['time_ratio']:.2f}" if "time_ratio" in record else "–")
        cells.append(f"{share:.2f}" if share is not None and record["kind"] == "compressed" else "–")
        cells.append(f"{record['difference']:.0e}" if "difference" in record else "–")
        cells.append(record.get("failure", "").replace("|", "\\|").replace("\n", " ")[:160])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def read() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text(encoding="utf-8"))["records"] if RESULTS.exists() else []


def write(records: list[dict[str, Any]]) -> None:
    ordered = sorted(
        records,
        key=lambda r: (MODELS.index(r["model"]), list(VERSIONS).index(r["runtime"]), list(KINDS).index(r["kind"])),
    )
    RESULTS.parent.mkdir(exist_ok=True)
    with whole_file(RESULTS) as partial:
        text = json.dumps({"records": ordered, "machine": machine.describe()}, indent=1, ensure_ascii=False)
        partial.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="One model in several runtimes.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--only", nargs="+", choices=VERSIONS, default=list(VERSIONS))
    parser.add_argument("--again", action="store_true", help="also what has a result")
    parser.add_argument("--envs", type=Path, default=CACHE / "environments", help="folder of the environments")
    parser.add_argument("--cache", type=Path, default=CACHE / "runtimes", help="folder for the files")
    parser.add_argument("--data", type=Path, default=os.environ.get("TENSIGMA_DATA"), help="models and images")
    options = parser.parse_args()
    if options.data is None:
        parser.error("name the folder of models and images: --data DIR or TENSIGMA_DATA")
    torch.set_num_threads(1)
    for model in options.models:
        known = {record["runtime"] for record in read() if record["model"] == model}
        missing = [runtime for runtime in options.only if options.again or runtime not in known]
        if not missing:
            continue
        files = prepare(SUBJECTS[model], Path(options.data).resolve(), options.cache.resolve())
        macs = {kind: macs_of(file) for kind, file in files.items()}
        reference = run("onnxruntime", files, options.envs.resolve())
        for runtime in missing:
            found = reference if runtime == "onnxruntime" else run(runtime, files, options.envs.resolve())
            kept = [record for record in read() if (record["model"], record["runtime"]) != (model, runtime)]
            write([*kept, *records_of(model, runtime, found, reference, macs)])


if __name__ == "__main__":
    main()

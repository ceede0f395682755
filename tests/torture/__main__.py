"""``python -m torture --scale 1.0 --out results/torture.json``: thousands of cases, and their counts."""

from __future__ import annotations

import argparse
import json
import logging
import platform
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torture import damage, kills, memory, networks, places
from torture.tally import Tally

#: Cases of a full run.
KILLS, FILES, NETWORKS = 200, 10_000, 500
_SECONDS_BETWEEN = 20.0


def main() -> int:
    """Run all, write the counts, and say whether everything held."""
    parser = argparse.ArgumentParser(prog="python -m torture", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="share of a full run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="run only the parts whose name holds this text")
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the counts")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    results: dict[str, Any] = {}
    if options.out is not None and options.only and options.out.is_file():
        results = json.loads(options.out.read_text(encoding="utf-8"))["results"]
    with tempfile.TemporaryDirectory(prefix="tensigma-torture-") as scratch:
        place = Path(scratch)
        n_files = max(1, round(FILES * options.scale / len(damage.PARSERS)))
        parts: dict[str, Callable[[Tally], None]] = {
            f"damaged files: {parser.name}": partial(damage.torture, parser, n_files, options.seed, place / "damage")
            for parser in damage.PARSERS
        }
        n_networks, n_kills = max(1, round(NETWORKS * options.scale)), max(1, round(KILLS * options.scale))
        parts["random networks"] = lambda tally: networks.torture(n_networks, options.seed, place / "networks", tally)
        parts["kills"] = lambda tally: kills.torture(n_kills, options.seed, place / "kills", tally)
        parts["memory"] = memory.torture
        parts["places"] = lambda tally: places.torture(place / "places", tally)
        parts["the command of the README"] = lambda tally: places.readme(place / "readme", tally)
        for name, run in parts.items():
            if options.only in name:
                _run_part(name, run, options, results)
    return int(any(result["faults"] for result in results.values()))


def _run_part(name: str, run: Callable[[Tally], None], options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Run one part; its counts are written now and then, and marked as unfinished until it ends."""
    start = written = time.perf_counter()

    def keep(tally: Tally) -> None:
        nonlocal written
        if options.out is not None and time.perf_counter() - written > _SECONDS_BETWEEN:
            written = time.perf_counter()
            _write(options, {**results, name: {**tally.to_json(), "unfinished": True}})

    tally = Tally(listener=keep)
    run(tally)
    results[name] = {**tally.to_json(), "seconds": round(time.perf_counter() - start, 1)}
    print(f"{name}: {json.dumps(results[name], ensure_ascii=False)}", flush=True)
    if options.out is not None:
        _write(options, results)


def _write(options: argparse.Namespace, results: dict[str, Any]) -> None:
    content = {
        "format": "tensigma-torture",
        "version": 1,
        "seed": options.seed,
        "versions": {name: version(name) for name in ("tensigma", "torch", "safetensors")},
        "machine": platform.machine(),
        "python": platform.python_version(),
        "results": results,
    }
    options.out.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())

"""The command: ``PYTHONPATH=benchmarks python -m peers``.

python -m peers                                    # every cell that has no record yet, then the page
python -m peers --models resnet20 --tracks closed  # some of them
python -m peers --only 'torch-pruning*' --rates 2 3
python -m peers --again                            # also those that failed
python -m peers --page                             # only write docs/peers.md and its pictures
"""

from __future__ import annotations

import argparse
import os
from fnmatch import fnmatch
from pathlib import Path

import finetuned
import machine
import runtimes

from peers import page
from peers.catalogue import PEERS, RATES
from peers.job import TRACKS
from peers.records import Records
from peers.run import Bench
from peers.subjects import SUBJECTS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / "benchmark_peers.json"
CACHE = ROOT / ".cache" / "peers"


def runtimes_table() -> str:
    """What ``benchmarks/runtimes.py`` has found, as a part of the page."""
    return runtimes.table(runtimes.read())


def main() -> None:
    parser = argparse.ArgumentParser(prog="peers", description="Tensigma beside other tools, on the same weights.")
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="in parameters")
    parser.add_argument("--tracks", nargs="+", choices=TRACKS, default=list(TRACKS))
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="tools, by name")
    parser.add_argument("--envs", type=Path, default=CACHE / "environments", help="folder of the tools' environments")
    parser.add_argument("--cache", type=Path, default=CACHE / "material", help="folder for images as arrays")
    parser.add_argument("--data", type=Path, default=os.environ.get("TENSIGMA_DATA"), help="models and images")
    parser.add_argument("--seconds", type=float, default=7200, help="limit for one process of a tool")
    parser.add_argument("--again", action="store_true", help="also run cells that failed")
    parser.add_argument("--page", action="store_true", help="write the page and run nothing")
    options = parser.parse_args()
    records = Records(RESULTS)

    def write_page() -> None:
        page.write(records, ROOT / "docs", runtimes_table(), finetuned.cells())

    if not options.page:
        if options.data is None:
            parser.error("name the folder of models and images: --data DIR or TENSIGMA_DATA")
        if options.again:
            records.forget_failures()
        records.describe(machine.describe())
        bench = Bench(
            data=Path(options.data).resolve(),
            cache=options.cache.resolve(),
            environments=options.envs.resolve(),
            records=records,
            seconds=options.seconds,
            say=lambda line: print(line, flush=True),
            after=write_page,
        )
        peers = [peer for peer in PEERS.values() if any(fnmatch(peer.name, pattern) for pattern in options.only)]
        for name in options.models:
            bench.run(SUBJECTS[name], peers, options.rates, options.tracks)
    write_page()


if __name__ == "__main__":
    main()

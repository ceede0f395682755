"""``python -m torture.fuzz "plan" -max_total_time=60``: files that coverage guides, by atheris, for one parser.

What follows the name of the parser goes to libFuzzer. Digests are put right after a change, so that what lies behind
them is reached. Every error that is not ours is shown once, with the place it came from.
"""

from __future__ import annotations

import importlib
import json
import logging
import random
import shutil
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any


def main() -> int:
    """Fuzz one parser; libFuzzer ends the process."""
    try:
        atheris = importlib.import_module("atheris")
    except ImportError:
        print("fuzzing needs atheris: pip install atheris", file=sys.stderr)
        return 2
    with atheris.instrument_imports(include=["tensigma"]):
        damage = importlib.import_module("torture.damage")
    parsers = {parser.name: parser for parser in damage.PARSERS}
    if len(sys.argv) < 2 or sys.argv[1] not in parsers:
        print(f"name a parser: {', '.join(parsers)}", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="tensigma-fuzz-") as scratch:
        target = Target(damage, parsers[sys.argv[1]], Path(scratch), atheris)
        atheris.Setup([sys.argv[0], *sys.argv[2:], str(target.corpus)], target, custom_mutator=target.mutate)
        atheris.Fuzz()
    return 0


class Target:
    """One file of a parser, replaced by what libFuzzer invents: a byte that says which, then its content."""

    def __init__(self, damage: Any, parser: Any, folder: Path, atheris: Any) -> None:
        self._damage, self._parser, self._atheris = damage, parser, atheris
        self._good, self._place, self.corpus = (folder / name for name in ("good", "place", "corpus"))
        self._seen: set[str] = set()
        for place in (self._good, self.corpus):
            place.mkdir()
        parser.write(self._good)
        self._files = sorted(file.relative_to(self._good) for file in self._good.rglob("*") if file.is_file())
        for number, file in enumerate(self._files):
            (self.corpus / str(number)).write_bytes(bytes([number]) + (self._good / file).read_bytes())

    def __call__(self, data: bytes) -> None:
        if not data:
            return
        shutil.rmtree(self._place, ignore_errors=True)
        shutil.copytree(self._good, self._place)
        file = self._files[data[0] % len(self._files)]
        (self._place / file).write_bytes(_sealed(data[1:]) if file.suffix == ".json" else data[1:])
        try:
            self._parser.read(self._place)
        except Exception as error:
            # Named, not imported: the class is the one of the instrumented package.
            if not any(base.__name__ == "TensigmaError" for base in type(error).__mro__):
                self._show(error, data)

    def _show(self, error: Exception, data: bytes) -> None:
        where = traceback.extract_tb(error.__traceback__)[-1]
        known = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}"
        if known not in self._seen:
            self._seen.add(known)
            print(f"FAULT {known}: {error!s:.200} for {data[:300]!r}", flush=True)

    def mutate(self, data: bytes, most: int, seed: int) -> bytes:
        """Half of the time another value somewhere in the JSON, else what libFuzzer does with bytes."""
        dice = random.Random(seed)
        if data and dice.random() < 0.5:
            try:
                text = self._damage._change_json(data[1:].decode(), dice)
            except (ValueError, KeyError, IndexError, TypeError, RecursionError):
                pass
            else:
                return bytes((data[:1] + text.encode())[:most])
        return bytes(self._atheris.Mutate(data, most))


def _sealed(content: bytes) -> bytes:
    """The same JSON with its digest put right, if it has one."""
    files = sys.modules["tensigma.files"]
    try:
        data = json.loads(content)
        if isinstance(data, dict) and files.SEAL in data:
            return json.dumps(files.seal(data)).encode()
    except (ValueError, RecursionError):
        pass
    return content


if __name__ == "__main__":
    raise SystemExit(main())

"""The cells that are missing, one process of a tool at a time."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peers.catalogue import PEERS, Peer
from peers.environments import NoEnvironment, python_of, reason, variables
from peers.job import Job
from peers.judge import Judge, to_onnx
from peers.records import Records, tracks_of
from peers.search import n_params
from peers.subjects import Subject
from tensigma.files import read_json

#: The record of the model as it is.
ORIGINAL = "original"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where things are, and what a tool may take."""

    data: Path
    cache: Path
    environments: Path
    records: Records
    seconds: float = 7200
    say: Callable[[str], None] = print
    #: Called after every cell.
    after: Callable[[], None] = lambda: None

    def run(self, subject: Subject, peers: Iterable[Peer], rates: Iterable[float], tracks: Iterable[str]) -> None:
        """All missing cells of one network."""
        material = subject.prepare(self.data, self.cache)
        self._original(subject, material)
        wanted_rates, wanted_tracks = tuple(rates), tuple(tracks)
        for peer in peers:
            for rate in peer.rates:
                # What has rates of its own is not asked for another's.
                if rate in wanted_rates or rate == 1:
                    self._cell(subject, peer, rate, wanted_tracks, material)

    def _original(self, subject: Subject, material: Path) -> None:
        model = subject.load(self.data)
        file = material / "original.onnx"
        if not file.exists():
            example = torch.zeros(1, *np.load(material / "test.npy", mmap_mode="r").shape[1:])
            program = material / "original.pt2"
            with torch.no_grad():
                torch.export.save(torch.export.export(model, (example,)), program)
            to_onnx(program).replace(file)
        if self.records.find(ORIGINAL, subject.name, 1.0, "closed") is None:
            figures = Judge.of(material).figures(file)
            facts = {"peer": ORIGINAL, "model": subject.name, "rate": 1.0, "track": "closed"}
            self.records.add({**facts, "params": n_params(model), **figures})

    def _cell(self, subject: Subject, peer: Peer, rate: float, tracks: tuple[str, ...], material: Path) -> None:
        cell = {"peer": peer.name, "model": subject.name, "rate": rate}
        missing = tuple(
            track
            for track in tracks_of(peer)
            if track in tracks and self.records.find(**cell, track=track) is None  # type: ignore[arg-type]
        )
        if not missing:
            return
        self.say(f"{time.strftime('%H:%M:%S')} {subject.name} {rate:g} {peer.name}: {', '.join(missing)}")
        with tempfile.TemporaryDirectory(prefix="peers-", dir=self.cache) as out:
            job = Job(
                method=peer.method,
                network=subject.network,
                weights=str(self.data / subject.weights),
                rate=rate,
                tracks=missing,
                material=str(material),
                out=out,
                batch=subject.batch,
            )
            failure = self._do(peer, job)
            for track in missing:
                self.records.add({**cell, "track": track, **self._figures(job, track, material, failure)})
        self.after()

    def _do(self, peer: Peer, job: Job) -> str | None:
        """Have the job done by the tool's own Python; the reason if that fails."""
        file = Path(job.out) / "job.json"
        job.write(file)
        try:
            python = python_of(peer.environment, self.environments)
        except NoEnvironment as error:
            return f"not installed: {error}"
        command = [str(python), "-m", f"peers.tools.{peer.tool}", str(file)]
        try:
            # In the folder of the job, because some tools write files where they run.
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=self.seconds, env=variables(), cwd=job.out
            )
        except subprocess.TimeoutExpired:
            return f"not finished after {self.seconds:g} s"
        return reason(done.stderr) if done.returncode else None

    def _figures(self, job: Job, track: str, material: Path, failure: str | None) -> dict[str, Any]:
        artefact = job.artefact(track)
        # A tool may fail in a later track; those before it count.
        if artefact is None or not job.facts_file(track).exists():
            return {"failure": failure or "the tool left no model"}
        facts = read_json(job.facts_file(track))
        try:
            figures = Judge.of(material).figures(artefact)
        except Exception as error:  # whatever the exporter or the runtime cannot read is the tool's failure
            return {"failure": f"not judged: {type(error).__name__}: {error}"[:300]}
        return {**facts, **figures}


def missing_cells(records: Records, subjects: Iterable[Subject]) -> tuple[int, int]:
    """How many cells have no record yet, and how many there are."""
    cells = [
        (peer.name, subject.name, rate, track)
        for subject in subjects
        for peer in PEERS.values()
        for rate in peer.rates
        for track in tracks_of(peer)
    ]
    return sum(records.find(*cell) is None for cell in cells), len(cells)

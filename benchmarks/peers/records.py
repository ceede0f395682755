"""Results cell by cell: a cell is one tool's method on one network at one rate in one track."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from peers.catalogue import PEERS, Peer
from peers.job import TRACKS
from tensigma.files import whole_file

Record = dict[str, Any]


class Records:
    """The records of a file, which is complete after every addition: a killed run goes on where it stopped.

    Several runs may add to one file side by side.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.machine: dict[str, Any] = {}
        self._records: dict[str, Record] = {}
        self._read()

    def __iter__(self) -> Iterator[Record]:
        return iter(sorted(self._records.values(), key=order))

    def find(self, peer: str, model: str, rate: float, track: str) -> Record | None:
        return self._records.get(key(peer, model, rate, track))

    def add(self, record: Record) -> None:
        self._change(lambda: self._records.update({key_of(record): record}))

    def forget_failures(self) -> None:
        """So that they are tried again."""

        def forget() -> None:
            for name in [name for name, record in self._records.items() if failed(record)]:
                del self._records[name]

        self._change(forget)

    def describe(self, machine: dict[str, Any]) -> None:
        """Note where the figures are from."""
        self._change(lambda: setattr(self, "machine", machine))

    def _read(self) -> None:
        if self.file.exists():
            data = json.loads(self.file.read_text(encoding="utf-8"))
            self.machine = data["machine"]
            self._records = {key_of(record): record for record in data["records"]}

    def _change(self, change: Callable[[], None]) -> None:
        """Read what others have added, change it, and write it, while nobody else does."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        # The folder is locked rather than the file, which is replaced.
        folder = os.open(self.file.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            self._read()
            change()
            text = json.dumps({"records": list(self), "machine": self.machine}, indent=1, ensure_ascii=False)
            with whole_file(self.file) as partial:
                partial.write_text(text + "\n", encoding="utf-8")
        finally:
            os.close(folder)


def key(peer: str, model: str, rate: float, track: str) -> str:
    return f"{peer} | {model} | {rate:g} | {track}"


def key_of(record: Record) -> str:
    return key(record["peer"], record["model"], record["rate"], record["track"])


def order(record: Record) -> tuple[Any, ...]:
    peers = list(PEERS)
    # The original is in no catalogue and comes first.
    place = peers.index(record["peer"]) if record["peer"] in peers else -1
    return record["model"], TRACKS.index(record["track"]), record["rate"], place


def failed(record: Record) -> bool:
    return "failure" in record


def tracks_of(peer: Peer) -> tuple[str, ...]:
    return TRACKS if peer.trains else TRACKS[:1]

"""Times measured on this machine, kept on disk so that no shape is timed twice."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import distributed as dist

from tensigma.errors import StoreError
from tensigma.files import check_seal, read_json, seal, whole_file
from tensigma.running.chains import Chain
from tensigma.running.processes import process_group, rank_and_size
from tensigma.running.timing import Runtime, measure

FORMAT = "tensigma-timings"
VERSION = 1
#: Environment variable that names the cache folder.
VARIABLE = "TENSIGMA_CACHE"
logger = logging.getLogger(__name__)


def cache_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Where times are kept: ``folder``, the one in ``$TENSIGMA_CACHE``, or the user's own cache folder.

    >>> cache_folder("here").name
    'here'
    """
    if folder is not None:
        return Path(folder)
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "tensigma"


class TimeTable:
    """Seconds of chains in one runtime on this machine. Each machine, runtime and version has its own file."""

    def __init__(self, runtime: Runtime, folder: str | os.PathLike[str] | None = None) -> None:
        self.runtime = runtime
        self.about = runtime.about()
        digest = hashlib.blake2b(json.dumps(self.about, sort_keys=True).encode(), digest_size=8).hexdigest()
        self.file = cache_folder(folder) / f"timings-{runtime.name}-{digest}.json"
        self._times: dict[str, float] = self._read()

    def seconds(self, chains: Sequence[Chain]) -> list[float]:
        """The times of chains; missing ones are measured together and kept.

        Under ``torchrun`` the first process measures for all, so that all plan alike.
        """
        _, size = rank_and_size()
        if size == 1:
            self._learn(chains)
        else:
            with process_group(None):
                self._share(chains)
        return [self._times[chain.key] for chain in chains]

    def _learn(self, chains: Sequence[Chain]) -> None:
        new = list({chain.key: chain for chain in chains if chain.key not in self._times}.values())
        if new:
            measured = dict(zip((chain.key for chain in new), measure(new, self.runtime), strict=True))
            # Another process may have written times in the meantime.
            self._times = {**self._read(), **self._times, **measured}
            self._write()

    def _share(self, chains: Sequence[Chain]) -> None:
        notes: list[Any] = [None, None]
        if dist.get_rank() == 0:
            try:
                self._learn(chains)
                notes = [{chain.key: self._times[chain.key] for chain in chains}, None]
            except Exception as error:  # on any error, the other processes must not wait forever
                notes = [None, error]
        dist.broadcast_object_list(notes, src=0)
        if notes[1] is not None:
            raise notes[1]
        self._times.update(notes[0])

    def _read(self) -> dict[str, float]:
        """The times in the file; none if it is missing, damaged or for another machine or runtime."""
        try:
            if not self.file.exists():
                return {}
            data = read_json(self.file)
            if isinstance(data, Mapping):
                check_seal(data, str(self.file))
        except (OSError, StoreError) as error:
            logger.info("%s cannot be read and will be measured again: %s", self.file, error)
            return {}
        ours = isinstance(data, Mapping) and data.get("format") == FORMAT and data.get("version") == VERSION
        seconds = data.get("seconds") if ours and data.get("about") == self.about else None
        if not isinstance(seconds, Mapping):
            return {}
        positive = {key: value for key, value in seconds.items() if type(value) in (int, float) and 0 < value < 1e9}
        return {key: float(value) for key, value in positive.items()}

    def _write(self) -> None:
        data = seal({"format": FORMAT, "version": VERSION, "about": self.about, "seconds": self._times})
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self.file) as partial:
                partial.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except (OSError, StoreError) as error:
            # Without the file shapes are timed again; results do not depend on it.
            logger.warning("times are not kept: %s", error)

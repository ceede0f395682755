"""Unfinished fine-tunings on disk, so that a killed run can resume: safetensors and JSON in a folder.

Each learning rate has a file of its own, replaced as a whole after each of its epochs: weights, best weights, state of
the optimizer, and the history in the header. What to do next follows from the histories alone, so there is no other
state that could disagree with them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tensigma.errors import StoreError
from tensigma.files import (
    SEAL,
    anything,
    check_seal,
    integer,
    mapping,
    parse_json,
    read_json,
    record,
    seal,
    sequence,
    sweep,
    text,
    whole_file,
)
from tensigma.finetuning.history import EPOCH, Epoch
from tensigma.running import content_digests

FORMAT = "tensigma-finetuning-checkpoint"
_VERSION = 2
_RUN = "run.json"
_NOTED = record({"history": sequence(EPOCH), "tensors": mapping(text()), SEAL: text()})
_STATE = record(
    {
        "format": text(FORMAT),
        "version": integer(_VERSION, _VERSION),
        "facts": mapping(anything),
        "start": EPOCH,
        SEAL: text(),
    }
)


class Unfinished:
    """A folder with the state of one fine-tuning. ``facts`` must be the same when the run resumes."""

    def __init__(self, folder: str | os.PathLike[str], facts: Mapping[str, Any], start: Epoch) -> None:
        self.folder = Path(folder)
        sweep(self.folder)
        if (self.folder / _RUN).exists():
            self._check(facts, start)
            return
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise StoreError(f"{self.folder} exists and holds something else; choose another checkpoint folder")
        with whole_file(self.folder / _RUN) as partial:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Through JSON, which has no tuples.
            plain = json.loads(json.dumps({"facts": dict(facts), "start": asdict(start)}))
            data = seal({"format": FORMAT, "version": _VERSION, **plain})
            partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    def save(self, index: int, tensors: Mapping[str, Tensor], history: list[Epoch]) -> None:
        """The state of learning rate ``index`` after an epoch."""
        with whole_file(self._file(index)) as partial:
            # Copies, because the file format does not support tensors that share memory.
            plain = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
            noted = seal({"history": [asdict(epoch) for epoch in history], "tensors": content_digests(plain)})
            save_file(plain, partial, metadata={"state": json.dumps(noted)})

    def load(self, index: int) -> tuple[dict[str, Tensor], list[Epoch]] | None:
        """The saved state of learning rate ``index``, or None if it has not finished an epoch."""
        file = self._file(index)
        if not file.exists():
            return None
        try:
            with safe_open(file, framework="pt") as stored:
                noted = _NOTED(parse_json((stored.metadata() or {}).get("state", "null")), "its header")
                tensors = {key: stored.get_tensor(key) for key in stored.keys()}
            check_seal(noted, "its header")
            if content_digests(tensors) != noted["tensors"]:
                raise StoreError("its tensors do not match their digests")
            return tensors, [Epoch(**epoch) for epoch in noted["history"]]
        except (OSError, SafetensorError, StoreError) as error:
            raise StoreError(f"{file} cannot be read: {error}; remove {self.folder} to start over") from error

    def _file(self, index: int) -> Path:
        return self.folder / f"rate-{index}.safetensors"

    def _check(self, facts: Mapping[str, Any], start: Epoch) -> None:
        try:
            stored = read_json(self.folder / _RUN)
            if not isinstance(stored, dict) or stored.get("format") != FORMAT:
                raise StoreError(f"{self.folder} holds something else; choose another checkpoint folder")
            _STATE(stored, _RUN)
            check_seal(stored, _RUN)
            before, first = stored["facts"], Epoch(**stored["start"])
        except StoreError as error:
            raise StoreError(f"{self.folder / _RUN} cannot be read: {error}") from error
        for key, value in facts.items():
            # Through JSON, like the stored value.
            if before.get(key) != json.loads(json.dumps(value)):
                raise StoreError(
                    f"{self.folder} belongs to a fine-tuning with {key}={before.get(key)!r}, this one has"
                    f" {key}={value!r}; resume with the same settings, or choose another checkpoint folder"
                )
        pairs = zip((first.score, first.validation_loss), (start.score, start.validation_loss), strict=True)
        if not all(math.isclose(old or 0.0, new or 0.0, rel_tol=1e-3, abs_tol=1e-6) for old, new in pairs):
            raise StoreError(
                f"{self.folder} belongs to a fine-tuning on other validation samples (before training the model scored"
                f" {first.score:.4f} on them, and {start.score:.4f} on these); choose another checkpoint folder"
            )


def remove_unfinished(folder: str | os.PathLike[str]) -> None:
    """Remove the state of a fine-tuning, and the folder if nothing else is in it."""
    place = Path(folder)
    for file in (*place.glob("rate-*.safetensors"), place / _RUN):
        file.unlink(missing_ok=True)
    with suppress(OSError):
        place.rmdir()

"""Statistics in a cache, so that a command that is interrupted does not gather them again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tensigma.calibration.checkpoint import remove_checkpoint
from tensigma.calibration.stats import Calibration
from tensigma.errors import StoreError
from tensigma.files import claimed
from tensigma.running import Batch, Digest, class_labels, tensors_in

logger = logging.getLogger(__name__)

# Increased when statistics of the same batches change.
_VERSION = 1


class InputsDigest:
    """A digest of all that calibration takes from batches, added batch by batch.

    >>> import torch
    >>> first, second = (InputsDigest().add(Batch(0, torch.full((2, 3), value), None)) for value in (1.0, 2.0))
    >>> first.text == second.text
    False
    """

    def __init__(self, *, labels: bool = False) -> None:
        self._digest = Digest(20)
        self._labels = labels

    def add(self, batch: Batch) -> InputsDigest:
        """Add one batch."""
        for tensor in tensors_in(batch.inputs):
            self._digest.add(tensor)
        if self._labels:
            self._digest.add(class_labels(batch.item))
        return self

    @property
    def text(self) -> str:
        """The digest of all batches so far."""
        return self._digest.text


class KeptStatistics:
    """A place in a cache for the statistics of one model under one set of options.

    Its name does not say which batches they are of, which is known only once all have been read; the statistics do.
    """

    def __init__(self, cache: str | Path, facts: Any) -> None:
        key = Digest(20).add({"kept": _VERSION, "library": version("tensigma")}).add(facts)
        self.folder = Path(cache) / f"calibration-{key.text}"
        #: For checkpoints, while they are gathered.
        self.unfinished = self.folder.with_name(f"{self.folder.name}.checkpoint")

    @contextmanager
    def checkpoint(self) -> Iterator[Path | None]:
        """The folder for checkpoints, held while the block runs; None if another run holds it."""
        with ExitStack() as stack:
            place: Path | None = self.unfinished
            try:
                stack.enter_context(claimed(self.unfinished))
            except StoreError:
                place = None
            yield place

    def load(self) -> Calibration | None:
        """What is there; None if there is nothing, or nothing that can be used."""
        if not self.folder.exists():
            return None
        try:
            stats = Calibration.load(self.folder)
            # Read now: later it would be too late to gather them again.
            for layer in stats.values():
                layer._tensors()
        except StoreError as error:
            logger.warning("%s cannot be read and is gathered again: %s", self.folder.name, error)
            return None
        return stats if stats.inputs is not None else None

    def save(self, stats: Calibration) -> None:
        """Keep ``stats`` in place of what was there, unless another run is writing them or the place is not ours."""
        try:
            stats.save(self.folder, force=True)
            remove_checkpoint(self.unfinished)
        except StoreError as error:
            logger.warning("the statistics are not kept: %s", error)

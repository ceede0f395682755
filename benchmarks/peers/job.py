"""What a tool is asked to do, and what it leaves behind. Needs no packages: every environment imports it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: In the order in which a tool goes through them: nothing but unlabelled images; the same and training towards the
#: original's answers; the same and training with labels.
TRACKS = ("closed", "label-free", "labels")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model to be compressed to one rate by one tool."""

    #: Which of the tool's methods.
    method: str
    #: A name that ``tensigma.zoo.load_model`` takes, and its weights.
    network: str
    weights: str
    #: Parameters before ÷ parameters after.
    rate: float
    tracks: tuple[str, ...]
    #: Folder with calibration.npy, training.npy, training-labels.npy and original.onnx.
    material: str
    #: Folder for what comes out.
    out: str
    batch: int
    seed: int = 0

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Job:
        fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return cls(**{**fields, "tracks": tuple(fields["tracks"])})

    def facts_file(self, track: str) -> Path:
        """What the tool says about a track that it has finished; it is written last."""
        return Path(self.out) / f"{track}.json"

    def artefact(self, track: str) -> Path | None:
        """The compressed model of a track: a ``torch.export`` or an ONNX file, for one image at a time."""
        files = [Path(self.out) / f"{track}.{suffix}" for suffix in ("pt2", "onnx")]
        return next((file for file in files if file.exists()), None)

"""``config.json``: which architecture a compressed model has, and how its inputs were prepared.

The architecture is a name that :func:`tensigma.zoo.load_model` builds. Only names that execute no file are written and
read: a folder may come from somebody else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from tensigma.compression import Report
from tensigma.errors import InputError, StoreError
from tensigma.files import anything, mapping, optional, read_json, record, text
from tensigma.zoo import Spec

CONFIG = "config.json"
LIBRARY = "tensigma"
#: The kinds of architecture that can be built from a name alone.
SCHEMES = ("timm", "torchvision", "zoo")
#: Options of an architecture, all of them whole numbers. Others could name files to load or make timm download.
OPTIONS = ("num_classes", "in_chans", "width", "img_size")
#: What timm notes about the preparation of inputs.
_PREPARATION = ("input_size", "interpolation", "crop_pct", "mean", "std")
_CONFIG = record(
    {"library_name": text(LIBRARY), "model": optional(text())},
    {"tensigma_version": text(), "architecture": optional(text()), "preparation": mapping(anything)},
    others=anything,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is known about the architecture of a model."""

    #: A name as :func:`tensigma.zoo.load_model` takes it; None if the reader has to build the model.
    model: str | None = None
    #: Size, mean and deviation of the inputs, as timm notes them; empty if unknown.
    preparation: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, report: Report | None, architecture: str | None) -> Config:
        """The name that was given, that of a timm model, or that of the report."""
        timm_name, preparation = _timm(model)
        if architecture is not None:
            return cls(model=str(_checked(architecture)), preparation=preparation)
        noted = None if report is None else report.notes.get("model")
        if timm_name is None and isinstance(noted, str) and _is_storable(noted):
            return cls(model=noted)
        return cls(model=timm_name, preparation=preparation)

    @classmethod
    def read(cls, folder: Path) -> Config:
        """The config of a folder; one without the file, as :func:`tensigma.save` writes it, has none."""
        file = folder / CONFIG
        if not file.is_file():
            return cls()
        data = read_json(file)
        if not isinstance(data, dict) or data.get("library_name") != LIBRARY:
            raise StoreError(f"{file} is that of another library; from_pretrained reads what save_pretrained wrote")
        _CONFIG(data, str(file))
        if data["model"] is not None:
            try:
                _checked(data["model"])
            except InputError as error:
                raise StoreError(f"{file}: {error}") from error
        return cls(model=data["model"], preparation=data.get("preparation", {}))

    def write(self, folder: Path) -> None:
        """Write ``config.json``."""
        spec = None if self.model is None else Spec.parse(self.model)
        data = {
            "library_name": LIBRARY,
            "tensigma_version": version("tensigma"),
            # Where readers of the Hub's own files look for it.
            "architecture": None if spec is None else spec.target,
            "model": self.model,
            "preparation": dict(self.preparation),
        }
        (folder / CONFIG).write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _checked(name: str) -> Spec:
    spec = Spec.parse(name, "model", SCHEMES)
    if spec.scheme not in SCHEMES:
        forms = ", ".join(f"{scheme}:NAME" for scheme in SCHEMES)
        raise InputError(
            f"the architecture {name!r} cannot be built without executing a file; give one of {forms}, or leave it "
            "out and pass {model} when loading",
            parameters=("model",),
        )
    for key, value in spec.options.items():
        if key not in OPTIONS or not value.isdecimal():
            raise InputError(
                f"the architecture {name!r} has the option {key}={value}; only {', '.join(OPTIONS)}, each with a whole "
                "number, can be stored; leave the architecture out and pass {model} when loading",
                parameters=("model",),
            )
    return spec


def _is_storable(name: str) -> bool:
    try:
        _checked(name)
    except InputError:
        return False
    return True


def _timm(model: nn.Module) -> tuple[str | None, dict[str, Any]]:
    """Name and input of a model that timm built; None and nothing for others."""
    noted = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    name = noted.get("architecture") if isinstance(noted, Mapping) else None
    if not isinstance(noted, Mapping) or not isinstance(name, str) or not name:
        return None, {}
    options = [(key, getattr(model, key, None)) for key in ("num_classes", "in_chans")]
    tail = "&".join(f"{key}={value}" for key, value in options if isinstance(value, int))
    preparation = {key: noted[key] for key in _PREPARATION if noted.get(key) is not None}
    return f"timm:{name}" + (f"?{tail}" if tail else ""), preparation

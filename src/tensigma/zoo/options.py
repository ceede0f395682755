"""The options that may follow ``?`` in the name of a data set, checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from tensigma.errors import InputError
from tensigma.zoo.spec import Spec, unknown

#: Schemes whose samples have several members, of which options name those to take.
_TABLES = ("webdataset", "hf")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """How to select and prepare the images of one set; see :func:`tensigma.zoo.load_data` for what each does."""

    size: int | None = None
    resize: int | None = None
    via: int | None = None
    interpolation: str = "bilinear"
    shape: tuple[int, int] | None = None
    fit: str = "stretch"
    order: str = "rgb"
    layout: str = "nchw"
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    classes: tuple[str, ...] | None = None
    samples: int | None = None
    per_class: int | None = None
    split: str | None = None
    holdout: float | None = None
    seed: int = 0
    shuffle: bool = True
    weight: float | None = None
    unreadable: str = "error"
    #: Where a sample of a shard or a row of a table has its image and its class.
    column: str | None = None
    label: str | None = None
    #: Whether the rows of a table are read in turn, without being stored.
    streaming: bool = False
    #: Name of the split that is stored, for sets that have their own.
    stored: str | None = None

    def __post_init__(self) -> None:
        for name in ("size", "resize", "via", "samples", "per_class"):
            value = getattr(self, name)
            _check(name, value, value is None or value >= 1, "give a whole number of at least 1")
        _check(
            "interpolation",
            self.interpolation,
            self.interpolation in ("bilinear", "bicubic"),
            "give bilinear or bicubic",
        )
        sides = self.shape or (1, 1)
        _check("size", self.shape, len(sides) == 2 and min(sides) >= 1, "give one number, or HEIGHTxWIDTH")
        _check("fit", self.fit, self.fit in ("stretch", "pad"), "give stretch or pad")
        _check("order", self.order, self.order in ("rgb", "bgr"), "give rgb or bgr")
        _check("layout", self.layout, self.layout in ("nchw", "nhwc"), "give nchw or nhwc")
        _check("unreadable", self.unreadable, self.unreadable in ("error", "skip"), "give error or skip")
        _check("split", self.split, self.split in (None, "train", "val", "test"), "give train, val or test")
        _check("holdout", self.holdout, self.holdout is None or 0 < self.holdout < 1, "give a share between 0 and 1")
        _check("weight", self.weight, self.weight is None or self.weight > 0, "give a positive number")
        _check("seed", self.seed, self.seed >= 0, "give a whole number of at least 0")
        _check("std", self.std, self.std is None or all(value > 0 for value in self.std), "give positive numbers")

    @classmethod
    def of(cls, spec: Spec, defaults: Mapping[str, Any]) -> DataOptions:
        """The options in ``spec``, which override ``defaults`` given as keywords."""
        foreign = [] if spec.scheme in _TABLES else ["column", "label"]
        foreign += [] if spec.scheme == "hf" else ["streaming"]
        names = [field.name for field in fields(cls) if field.name not in ("shape", "stored", *foreign)]
        values: dict[str, Any] = {}
        for key, value in (dict(defaults) | spec.options).items():
            if key not in names:
                raise unknown(f"{spec}: the option", key, names)
            # Keywords take the written form too, so that mean=0.5 and classes=[3, "cat"] work.
            text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            if key == "size" and not text.isdecimal() and value is not None:
                values["shape"] = tuple(_whole(key, side) for side in text.replace(",", "x").split("x"))
            elif value is not None:
                values[key] = _CONVERTERS[key](key, text)
        if spec.scheme == "hf" and "holdout" not in values:
            values["stored"] = _stored(values.pop("split", None))
        return cls(**values)


def _stored(split: str | None) -> str | None:
    """The name of a stored split; parts of one are chosen by our own options, which know what overlaps."""
    if split is not None and not re.fullmatch(r"[\w.-]+", split):
        raise InputError(f"split={split} is no name of a split; take a part of one by samples= or holdout=")
    return split


def _check(name: str, value: object, valid: bool, accepted: str) -> None:
    if not valid:
        raise InputError(f"{name}={value} is invalid; {accepted}")


def _whole(key: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{key}={text} is invalid; give a whole number") from None


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{key}={text} is invalid; give a number") from None


def _numbers(key: str, text: str) -> tuple[float, ...]:
    return tuple(_number(key, item) for item in text.split(","))


def _names(key: str, text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def _flag(key: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise InputError(f"{key}={text} is invalid; give true or false")
    return text.lower() == "true"


def _word(key: str, text: str) -> str:
    return text


_CONVERTERS: dict[str, Callable[[str, str], Any]] = {
    "size": _whole,
    "resize": _whole,
    "via": _whole,
    "interpolation": _word,
    "fit": _word,
    "order": _word,
    "layout": _word,
    "mean": _numbers,
    "std": _numbers,
    "classes": _names,
    "samples": _whole,
    "per_class": _whole,
    "split": _word,
    "holdout": _number,
    "seed": _whole,
    "shuffle": _flag,
    "weight": _number,
    "unreadable": _word,
    "column": _word,
    "label": _word,
    "streaming": _flag,
}

"""Several compressions of one model, side by side: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tensigma.files import anything, integer, number, optional, record, text

_RUN = record(
    {
        "series": text(),
        "setting": text(),
        "rate": number(0),
        "params": integer(),
        "macs": optional(integer()),
        "top1": optional(number(0, 1)),
        "agreement": optional(number(0, 1)),
        "seconds": number(0),
    },
    others=anything,
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One compression among several.

    >>> run = Run(series="Σ", setting="vbmf=0.5", rate=2.0, params=50, macs=None, top1=0.9, agreement=None, seconds=1.0)
    >>> Run.from_json(run.to_json()) == run
    True
    """

    #: The method of compression; runs of one series are joined by a line.
    series: str
    #: The requested budget or ranks.
    setting: str
    #: Parameters of the whole model before ÷ after.
    rate: float
    params: int
    macs: int | None
    top1: float | None
    agreement: float | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Run:
        """The inverse of :meth:`to_json`."""
        _RUN(data, "a run of the comparison is damaged")
        return cls(**{field.name: data[field.name] for field in fields(cls)})

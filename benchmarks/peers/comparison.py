"""Ours beside another on the same images."""

from __future__ import annotations

from dataclasses import dataclass

from peers.catalogue import OURS, PEERS
from peers.records import Record, Records, failed
from tensigma.experiments import advantage

# A model with fewer parameters than this share of ours was not made for the same rate.
_MUCH_SMALLER = 0.9


@dataclass(frozen=True)
class Difference:
    """Points of top-1 by which ours is ahead, with a paired bootstrap interval of 95 %."""

    points: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        return "ahead" if self.low > 0 else "behind" if self.high < 0 else "level"

    def __str__(self) -> str:
        return f"{self.points:+.1f} ({self.low:+.1f} to {self.high:+.1f})"


def ours_beside(record: Record, records: Records) -> Difference | None:
    """None where one of the two has not run, has failed, is much smaller than ours, or is ours itself."""
    quantized = record["peer"] in PEERS and PEERS[record["peer"]].quantizes
    name = "tensigma-int8" if quantized else OURS
    ours = records.find(name, record["model"], record["rate"], record["track"])
    if ours is None or record["peer"] == name or failed(ours) or failed(record):
        return None
    if record["params"] < _MUCH_SMALLER * ours["params"]:
        return None
    return Difference(*advantage(ours["hits"], record["hits"]))

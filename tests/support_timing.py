"""A clock that can be foretold."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tensigma.running import Chain, timetable
from tensigma.running.timing import Runtime


class FakeClock:
    """Seconds by formula in place of a measurement, and a record of what was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, per_stage: float = 0.0) -> None:
        self.per_stage = per_stage
        self.asked: list[str] = []
        monkeypatch.setattr(timetable, "measure", self.measure)

    def seconds(self, chain: Chain) -> float:
        return chain.batch * chain.macs * 1e-9 + self.per_stage * len(chain.stages)

    def measure(self, chains: Sequence[Chain], runtime: Runtime) -> list[float]:
        self.asked += [chain.key for chain in chains]
        return [self.seconds(chain) for chain in chains]

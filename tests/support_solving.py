"""Watching what is solved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import nn

from tensigma.solving import Solution, Treatment, solution_store, solve


@dataclass
class Solved:
    """Layers that have been solved, in order, as often as they were."""

    calls: list[tuple[nn.Module, Treatment]] = field(default_factory=list)

    @classmethod
    def watch(cls, monkeypatch: pytest.MonkeyPatch) -> Solved:
        """From now on."""
        solved = cls()

        def counted(treatment: Treatment, module: nn.Module, *rest: Any) -> Solution:
            solved.calls.append((module, treatment))
            return solve(treatment, module, *rest)

        monkeypatch.setattr(solution_store, "solve", counted)
        return solved

    def __len__(self) -> int:
        return len(self.calls)

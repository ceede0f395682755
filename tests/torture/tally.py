"""Counts of what happened, with the cases of everything that should not have."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

#: Outcomes that are as they should be. Everything else is a fault.
GOOD = ("refused", "unchanged", "edited", "held", "resumed", "solved again")
_SHOWN = 10
_KEPT = 100


@dataclass
class Tally:
    """How many cases ended in which way."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    #: Other numbers worth keeping, by name.
    facts: dict[str, int | float] = field(default_factory=dict)
    #: Called after every case, so that counts can be kept while a part runs for hours.
    listener: Callable[[Tally], None] | None = None

    def add(self, outcome: str, case: str = "") -> None:
        """One more case with this outcome."""
        self.counts[outcome] += 1
        if outcome not in GOOD:
            self.faults.append(f"{outcome}: {case}")
            # At once, so that a run of hours that is stopped has told what it found.
            print(self.faults[-1], file=sys.stderr, flush=True)
        if self.listener is not None:
            self.listener(self)

    @property
    def total(self) -> int:
        """All cases."""
        return sum(self.counts.values())

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"cases": self.total, **dict(sorted(self.counts.items())), **self.facts, "faults": self.faults[:_KEPT]}

    def check(self) -> None:
        """Fail with the first faults, if there are any."""
        assert not self.faults, f"{len(self.faults)} of {self.total} cases failed:\n" + "\n".join(self.faults[:_SHOWN])

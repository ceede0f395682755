"""Which learning rate trains next and which are dropped, decided by their epochs so far and nothing else.

A killed run therefore makes the same decisions again, from the epochs on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tensigma.finetuning.history import Epoch

#: Why a learning rate ended.
ALL, PATIENCE, ELIMINATED, DIVERGED = "all epochs", "patience", "eliminated", "diverged"


@dataclass(frozen=True)
class Decision:
    """The learning rate to train next (None: finished), and the rates that have ended, with the reason."""

    next: int | None
    ended: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The rules: all rates advance together, epoch by epoch.

    >>> Sweep(n_rates=3, epochs=3, patience=None, eliminate=True).n_steps
    6
    """

    n_rates: int
    epochs: int
    #: Epochs without a new best after which a rate ends; None for no limit.
    patience: int | None
    #: Whether the worst rate is dropped after every epoch, until one is left.
    eliminate: bool

    @property
    def n_steps(self) -> int:
        """The largest possible number of epochs of all rates together."""
        return sum(self._places(done) for done in range(self.epochs))

    def decide(self, histories: Sequence[Sequence[Epoch]]) -> Decision:
        """What comes next, given the epochs of every rate so far."""
        active = list(range(self.n_rates))
        ended: dict[int, str] = {}
        for epoch in range(1, self.epochs + 1):
            for index in active:
                if len(histories[index]) < epoch:
                    return Decision(index, ended)
            for index in list(active):
                reason = self._ends(histories[index][:epoch])
                if reason is not None:
                    ended[index] = reason
                    active.remove(index)
            if self.eliminate:
                best_first = sorted(active, key=lambda index: histories[index][epoch - 1].key, reverse=True)
                for index in best_first[self._places(epoch) :]:
                    ended[index] = ELIMINATED
                    active.remove(index)
        return Decision(None, {**ended, **dict.fromkeys(active, ALL)})

    def _places(self, done: int) -> int:
        """How many rates may train after ``done`` epochs."""
        return max(1, self.n_rates - done) if self.eliminate else self.n_rates

    def _ends(self, history: Sequence[Epoch]) -> str | None:
        if history[-1].diverged:
            return DIVERGED
        if len(history) == self.epochs:
            return ALL
        best = max(range(len(history)), key=lambda index: history[index].key)
        if self.patience is not None and len(history) - 1 - best >= self.patience:
            return PATIENCE
        return None

"""Freed memory is given back when the process has grown, and only then."""

from __future__ import annotations

import pytest

from tensigma.running import freeing
from tensigma.running.freeing import FreedMemory


class Machine:
    """A process of which ``free`` bytes are freed but kept by the C library."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used, self.free, self.trims = 100, 0, 0
        monkeypatch.setattr(freeing, "resident_bytes", lambda: self.used + self.free)
        monkeypatch.setattr(freeing, "_malloc_trim", lambda: self.trim)

    def trim(self, pad: int) -> None:
        assert pad == 0
        self.free, self.trims = 0, self.trims + 1


def test_it_waits_for_the_slack(monkeypatch):
    machine = Machine(monkeypatch)
    freed = FreedMemory(slack=50)
    machine.free = 50
    freed.give_back_if_grown()
    assert machine.trims == 0
    machine.free = 51
    freed.give_back_if_grown()
    assert (machine.trims, machine.free) == (1, 0)


def test_growth_that_is_in_use_is_not_trimmed_again_and_again(monkeypatch):
    machine = Machine(monkeypatch)
    freed = FreedMemory(slack=50)
    machine.used = 200
    for _ in range(3):
        freed.give_back_if_grown()
    assert machine.trims == 1


def test_a_process_that_shrank_may_grow_by_the_slack_again(monkeypatch):
    machine = Machine(monkeypatch)
    freed = FreedMemory(slack=50)
    machine.used = 20
    freed.give_back_if_grown()
    machine.free = 51
    freed.give_back_if_grown()
    assert machine.trims == 1


@pytest.mark.parametrize("missing", ["resident_bytes", "_malloc_trim"])
def test_other_systems_are_left_alone(monkeypatch, missing):
    machine = Machine(monkeypatch)
    monkeypatch.setattr(freeing, missing, lambda: None)
    FreedMemory(slack=0).give_back_if_grown()
    assert machine.trims == 0


def test_the_functions_of_this_system_are_found_or_missing_as_one():
    """On Linux with glibc both are there; elsewhere the class does nothing."""
    freed = FreedMemory(slack=0)
    freed.give_back_if_grown()
    size = freeing.resident_bytes()
    assert size is None or size > 1_000_000

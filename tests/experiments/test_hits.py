"""Hits image by image."""

from __future__ import annotations

import pytest

from tensigma.experiments.hits import advantage, pack_hits, unpack_hits


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100])
def test_packing_loses_nothing(count: int):
    right = [index % 3 == 0 for index in range(count)]
    assert unpack_hits(pack_hits(right)).tolist() == right


def test_an_advantage_has_an_interval_around_it():
    better = pack_hits([True] * 80 + [False] * 20)
    worse = pack_hits([True] * 60 + [False] * 40)
    points, low, high = advantage(better, worse)
    assert points == pytest.approx(20)
    assert 10 < low < 20 < high < 30
    assert advantage(worse, better)[0] == pytest.approx(-20)

"""A test with an argument ``seed`` runs with seed 0, or with as many seeds as ``--seeds`` says."""

from __future__ import annotations

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--seeds")), ids="seed{}".format)

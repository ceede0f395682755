"""Options of the whole test suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=1, help="how many seeds laws over seeds run with (default: 1)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument ``seed`` runs with seed 0, or with as many seeds as ``--seeds`` says."""
    # The folder linalg has the same rule in a file of its own.
    if "seed" not in metafunc.fixturenames or "linalg" in metafunc.definition.path.parts:
        return
    listed = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    names = [name for each in listed for name in (each.split(",") if isinstance(each, str) else each)]
    if "seed" not in names:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--seeds")), ids="seed{}".format)

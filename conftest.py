"""Options of the whole test suite."""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=1, help="how many seeds laws over seeds run with (default: 1)")
    parser.addoption(
        "--quick", action="store_true", help="run one case of every parametrised test, and none that is slow or real"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument ``seed`` runs with seed 0, or with as many seeds as ``--seeds`` says."""
    if "seed" not in metafunc.fixturenames:
        return
    listed = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    names = [name.strip() for entry in listed for name in (entry.split(",") if isinstance(entry, str) else entry)]
    if "seed" not in names:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--seeds")), ids="seed{}".format)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--quick``, keep every test function but only one case of each."""
    if not config.getoption("--quick"):
        return
    kept: dict[str, pytest.Item] = {}
    for item in items:
        if not any(item.get_closest_marker(marker) for marker in ("slow", "real")):
            kept.setdefault(item.nodeid.partition("[")[0], item)
    chosen = set(map(id, kept.values()))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = list(kept.values())


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Weights that a test or an example draws without a seed of its own do not depend on the tests before it."""
    torch.manual_seed(0)

"""A folder to work in, small models and data in it, and a way to run commands there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from support_cli import DATA, MODEL
from tensigma.cli.app import app
from tensigma.zoo import load_model

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is also where commands run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.fixture
def run() -> Run:
    """Run a command in this process; ``code`` is the exit code it must end with."""

    def invoke(*arguments: Any, code: int = 0) -> Result:
        before = torch.get_rng_state()
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        torch.set_rng_state(before)
        assert result.exit_code == code, f"exit code {result.exit_code}\n{result.output}\n{result.exception!r}"
        assert "Traceback" not in result.output or "--verbose" in arguments
        return result

    return invoke


@pytest.fixture
def run_json(run: Run) -> Callable[..., dict[str, Any]]:
    """Run a command with ``--json`` and read what it printed: nothing but one object."""

    def invoke(*arguments: Any) -> dict[str, Any]:
        return json.loads(run(*arguments, "--json").stdout, parse_constant=pytest.fail)

    return invoke


@pytest.fixture
def weights(place: Path) -> Path:
    """Weights for MODEL in a file."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = load_model(MODEL)
    save_file(model.state_dict(), place / "weights.safetensors")
    return place / "weights.safetensors"


@pytest.fixture
def stats(run: Run, weights: Path) -> Path:
    """Statistics of MODEL."""
    run("calibrate", MODEL, "--weights", weights, "--data", DATA, "--out", "stats", "--quiet")
    return Path("stats")


@pytest.fixture
def npz(place: Path) -> str:
    """A few grey images with labels, by name."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 255, (24, 8, 8, 1), dtype=np.uint8)
    np.savez(place / "images.npz", images=images, labels=np.arange(24) % 10)
    return "npz:images.npz"

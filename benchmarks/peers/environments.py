"""An environment for each tool, made once: a venv with the pinned requirements, or the reason why there is none.

torch and everything else that the running environment has at the pinned version is shared with it: all tools compute
with the same build. What a tool needs beyond that, or at another version, is its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
_SECONDS = 3600


class NoEnvironment(Exception):
    """The environment could not be made; the message is the reason."""


def requirements(name: str) -> Path:
    return HERE / f"requirements-{name}.txt"


def python_of(name: str | None, folder: Path) -> Path:
    """The Python of an environment, which is made if it is not there; None is the one that runs now.

    A failure is kept beside it and told again without another attempt; delete the folder NAME to try again.
    """
    if name is None:
        return Path(sys.executable)
    place, wanted = folder / name, requirements(name).read_text(encoding="utf-8")
    stamp = folder / f"{name}.json"
    known = json.loads(stamp.read_text(encoding="utf-8")) if stamp.exists() and place.exists() else {}
    if known.get("requirements") != wanted:
        known = {"requirements": wanted, "failure": make(place, requirements(name))}
        stamp.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    if known["failure"] is not None:
        raise NoEnvironment(known["failure"])
    return place / "bin" / "python"


def make(place: Path, wanted: Path) -> str | None:
    """Install; the reason if that fails."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        failure = run([sys.executable, "-m", "venv", "--without-pip", str(place)])
        if failure is not None:
            return failure
        packages = next(place.glob("lib/python*/site-packages"))
        # Directories in such a file come after those of the environment itself, so what a tool pins wins.
        (packages / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
        python = str(place / "bin" / "python")
        return run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "-r", str(wanted)])
    except subprocess.TimeoutExpired:
        return f"the installation took more than {_SECONDS} s"


def run(command: list[str]) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    return reason(done.stderr) if done.returncode else None


def reason(output: str) -> str:
    """The line of an output that says what went wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    return (errors[0] if errors else "it ended without a message")[:300]


def variables() -> dict[str, str]:
    """The environment variables of a tool's process: our sources to import, one thread."""
    root = HERE.parents[1]
    path = os.pathsep.join([str(root / "benchmarks"), str(root / "src")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

"""The package as a whole: names that are imported when they are first used."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import tensigma as ts


def checked_imports() -> dict[str, str]:
    """Name → room, as type checkers are told."""
    source = Path(ts.__file__).read_text(encoding="utf-8")
    return {
        alias.asname or alias.name: node.module or ""
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tensigma")
        for alias in node.names
    }


def test_type_checkers_see_what_is_there():
    rooms = {name for name, module in checked_imports().items() if module == "tensigma"}
    names = {name: module for name, module in checked_imports().items() if module != "tensigma"}
    assert set(ts.__all__) == {*names, "linalg", "__version__"}
    for name, module in names.items():
        assert getattr(ts, name) is getattr(import_module(module), name)
    folders = {file.parent.name for file in Path(ts.__file__).parent.glob("*/__init__.py")}
    assert rooms == folders - {"cli"} | {"errors"}
    for room in rooms:
        assert getattr(ts, room) is import_module(f"tensigma.{room}")


def test_every_name_is_offered_for_completion():
    assert {*ts.__all__, "planning", "zoo", "__doc__"} <= set(dir(ts))


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match=r"module 'tensigma' has no attribute 'shrink'"):
        _ = ts.shrink  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_package_alone_imports_no_torch():
    code = "import sys, tensigma; dir(tensigma), tensigma.__version__; assert 'torch' not in sys.modules"
    code += "; from tensigma import *; assert 'torch' in sys.modules; compress, linalg.Tucker2"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_lowest_versions_are_those_that_the_metadata_admits() -> None:
    root = Path(__file__).parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    # Documents, style and tests are the developer's own. `hf` needs a newer numpy; constraints.txt has its lowest.
    others = ("docs", "lint", "dev", "hf")
    groups = [project["dependencies"], *(extras[name] for name in extras if name not in others)]
    admitted = {lowest for group in groups for text in group if (lowest := bound(text)) is not None}
    lines = (root / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    assert admitted == {pinned(line) for line in lines if not line.startswith("#")}


def bound(requirement: str) -> tuple[str, str] | None:
    """Name and lowest version; None for an extra of this package."""
    found = re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement)
    assert found or requirement.startswith("tensigma["), requirement
    return (found[1].lower(), whole(found[2])) if found else None


def pinned(line: str) -> tuple[str, str]:
    name, version = line.split("==")
    return name.lower(), whole(version)


def whole(version: str) -> str:
    """With three numbers: 3.8 is 3.8.0."""
    return ".".join([*version.split("."), "0", "0"][: max(3, version.count(".") + 1)])

"""Help and completion answer without torch; what is written out for that agrees with the library."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tensigma as ts
from tensigma.cli.parsing import METHODS, NORMS
from tensigma.solving import METHODS as LIBRARY_METHODS
from tensigma.solving import NORMS as LIBRARY_NORMS

CHECK = """
heavy = {"torch", "numpy", "scipy", "onnx", "onnxruntime", "matplotlib", "jinja2", "torchvision", "timm"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
MANUALS = f"""
import sys
import typer
from tensigma.cli.app import app

def paths(command, path=()):
    yield path
    for name, child in getattr(command, "commands", {{}}).items():
        yield from paths(child, (*path, name))

every = list(paths(typer.main.get_command(app)))
assert len(every) > 12, every
for path in every:
    try:
        app([*path, "--help"])
    except SystemExit as end:
        assert end.code == 0
# typer imports it to turn words into types, which no manual needs.
assert "pydantic" not in sys.modules
{CHECK}"""
COMPLETION = f"""
import sys
from tensigma.cli import main

sys.argv = ["tensigma"]
try:
    main()
except SystemExit as end:
    assert end.code in (0, None)
{CHECK}"""


def child(code: str, **environment: str) -> str:
    """What Python prints when it executes ``code`` in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_every_manual_is_shown_without_torch():
    shown = child(MANUALS)
    for words in ("tensigma compress", "tensigma stats merge", "spatial-svd", "tensor-train"):
        assert words in shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param("tensigma comp", ["compress"], id="command"),
        pytest.param("tensigma compress zoo:m --bud", ["--budget"], id="option"),
        pytest.param(
            "tensigma compress zoo:m --budget params=0.5 --device cpu --ranks vbmf=1 --o", ["--out"], id="values"
        ),
        pytest.param("tensigma calibrate zoo:m --memory 4GB --chec", ["--checkpoint-every"], id="memory"),
        pytest.param("tensigma plan zoo:m --method tensor", ["tensor-train"], id="method"),
        pytest.param("tensigma plan zoo:m --norm ", list(NORMS), id="norm"),
    ],
)
def test_the_shell_completes_without_torch(words: str, expected: list[str]):
    place = str(len(words.split()) - (not words.endswith(" ")))
    environment = {"_TENSIGMA_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}
    assert child(COMPLETION, **environment).split() == expected


def test_methods_and_norms_are_those_of_the_library():
    assert METHODS == ("auto", *LIBRARY_METHODS)
    assert NORMS == tuple(LIBRARY_NORMS)


def test_commands_use_public_names_only():
    """import-linter sees no import of the rooms whose names commands reach through ``ts``."""
    used = set()
    for file in Path(ts.__file__).parent.glob("cli/*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and re.fullmatch(r"ts\.\w+(\.\w+)?", ast.unparse(node)):
                used.add(ast.unparse(node).removeprefix("ts."))
    assert len(used) > 50
    rooms = {name for name in dir(ts) if hasattr(getattr(ts, name), "__path__")}
    public = {*ts.__all__, *rooms, *(f"{room}.{name}" for room in rooms for name in getattr(ts, room).__all__)}
    methods = {name for name in used if name.partition(".")[0] in ts.__all__}
    assert used - methods <= public

"""The Python in the documents runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support_nets import batches, small_net

ROOT = Path(__file__).parent.parent
BLOCKS = [
    pytest.param(block, id=f"{file.name}-{index}")
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for index, block in enumerate(re.findall(r"^```python\n(.*?)^```", file.read_text(encoding="utf-8"), re.S | re.M))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small network for ``model`` and a few batches for ``loader``."""
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "block", "exec"), {"model": small_net(), "loader": batches(), "build_the_original": small_net})


def test_there_are_blocks_to_run() -> None:
    assert len(BLOCKS) >= 2

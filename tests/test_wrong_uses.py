"""Every line of docs/wrong-uses.md: the use is run, and the message is the one that stands beside it."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support_wrong_uses import names
from tensigma import errors

PAGE = Path(__file__).parents[1] / "docs" / "wrong-uses.md"
ROW = re.compile(r"^\| `(?P<use>.+)` \| (?P<error>\w+) \| (?P<message>.+) \|$")
ROWS = [match.groups() for line in PAGE.read_text(encoding="utf-8").splitlines() if (match := ROW.match(line))]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield names(tmp_path_factory.mktemp("wrong uses"))


def test_the_table_is_long() -> None:
    assert len({use for use, _, _ in ROWS}) == len(ROWS) >= 60


@pytest.mark.parametrize(("use", "error", "message"), ROWS, ids=[use for use, _, _ in ROWS])
def test_a_wrong_use_says_what_the_page_says(use: str, error: str, message: str, objects: dict[str, Any]) -> None:
    pattern = ".*".join(re.escape(part) for part in re.split(" ?… ?", message))
    own = {**objects, "model": copy.deepcopy(objects["model"])}
    with pytest.raises(getattr(errors, error), match=f"(?s)^{pattern}$") as raised:
        eval(use, own)
    assert type(raised.value).__name__ == error

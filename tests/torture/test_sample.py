"""A sample of every torture; ``make torture`` runs thousands of cases."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tensigma as ts
from tensigma.errors import StoreError, TensigmaError
from tensigma.files import parse_json
from tensigma.finetuning import FineTuning
from tensigma.layers import format_from_json
from tensigma.report import Run
from tensigma.zoo.spec import Spec
from torture import damage, networks, places
from torture.tally import Tally

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="forks and limits of POSIX")]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("parser", damage.PARSERS, ids=lambda parser: parser.name)
def test_damaged_files_are_refused_or_read_as_they_were(parser: damage.Parser, tmp_path: Path, seed: int) -> None:
    tally = Tally()
    damage.torture(parser, 12, seed, tmp_path / "files", tally)
    tally.check()


@pytest.mark.parametrize("name", ["plan", "report without a digest"])
def test_any_value_in_the_notes_is_read_or_refused(name: str, tmp_path: Path) -> None:
    """Notes come from many rooms; whoever shows them must be able to rely on their kinds."""
    (parser,) = (parser for parser in damage.PARSERS if parser.name == name)
    parser.write(tmp_path)
    (file,) = tmp_path.glob("*.json")
    good = file.read_text()
    tally = Tally()
    for path in damage.places(json.loads(good)["notes"], ("notes",)):
        for value in ({"x": 1}, [-1, 2], "x", -0.5, None, True):
            file.write_text(damage.changed_at(good, path, value))
            damage.read_into(tally, parser, tmp_path, f"{path} = {value}")
    assert tally.total > 60
    tally.check()


@pytest.mark.parametrize("name", ["archive without digests", "statistics without digests"])
def test_any_value_in_a_manifest_without_digests_is_refused_or_does_no_harm(name: str, tmp_path: Path) -> None:
    """Files of version 0.1, in which nothing else tells a wrong value."""
    (parser,) = (parser for parser in damage.PARSERS if parser.name == name)
    parser.write(tmp_path)
    (file,) = tmp_path.rglob("manifest.json")
    good = file.read_text()
    tally = Tally()
    for path in damage.places(json.loads(good))[1:]:
        for value in (-1, 10**9, [1], [3, 0, 2], "x"):
            file.write_text(damage.changed_at(good, path, value))
            damage.read_into(tally, parser, tmp_path, f"{path} = {value}")
    assert tally.total > 90
    tally.check()


def test_laws_of_random_networks(tmp_path: Path, seed: int) -> None:
    tally = Tally()
    networks.torture(3, seed, tmp_path / "networks", tally, export=False)
    tally.check()


def test_kills_lose_nothing(tmp_path: Path, seed: int) -> None:
    """In a process of its own, because it forks."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torture.kills", "2", str(seed), str(tmp_path / "kills")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "place", [place for place in places.ALL if place is not places.read_only], ids=lambda place: place.__name__
)
def test_places(place: Callable[[Path, Tally], None], tmp_path: Path) -> None:
    tally = Tally()
    place(tmp_path / "place", tally)
    tally.check()


@pytest.mark.parametrize(
    "work",
    [
        pytest.param('memory.torture(t, ("many channels", "a wide Linear with many rows"))', id="bounds of memory"),
        pytest.param('places.read_only(Path("place"), t)', id="a read-only folder"),
    ],
)
def test_in_a_process_of_its_own_because_it_forks(work: str, tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from torture import memory, places, tally
t = tally.Tally()
{work}
t.check()
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=20,
)
READERS: dict[str, Callable[[Any], object]] = {
    "plan": ts.Plan.from_json,
    "report": ts.Report.from_json,
    "evaluation": ts.Evaluation.from_json,
    "fine-tuning": FineTuning.from_json,
    "run": Run.from_json,
    "format": format_from_json,
}
#: What makes a reader look further than the first key.
HEADS: dict[str, dict[str, Any]] = {
    "plan": {"format": "tensigma-plan", "version": 1},
    "report": {"format": "tensigma-report", "version": 1},
    "fine-tuning": {"format": "tensigma-finetuning", "version": 1},
    "format": {"format": "tucker2"},
}


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=JSON, keys=st.lists(st.sampled_from(["layers", "n_params", "ranks", "before", "notes", "rates"]), max_size=3)
)
def test_any_json_is_refused_by_our_own_error(name: str, data: Any, keys: list[str]) -> None:
    with pytest.raises(TensigmaError):
        READERS[name](HEADS.get(name, {}) | dict.fromkeys(keys, data) | {"surely not a key": data})


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60) | st.integers(1, 3000).map(lambda depth: "[" * depth + "]" * depth))
def test_any_text_is_json_or_refused(text: str) -> None:
    try:
        parsed = parse_json(text)
    except StoreError:
        return
    assert json.dumps(parsed) == json.dumps(json.loads(text))


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
def test_any_name_is_a_spec_or_refused(text: str) -> None:
    try:
        Spec.parse(text)
    except TensigmaError:
        return

"""Solutions kept in memory and on disk: found again by all that went into them, and by nothing less."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensigma as ts
from support_nets import SmallNet, batches, small_net
from support_solving import Solved
from tensigma.calibration import LayerStats
from tensigma.errors import StoreError
from tensigma.layers import Geometry
from tensigma.solving import (
    Solution,
    Solutions,
    Treatment,
    compressed_copy,
    jobs_for,
    method_of,
    norm_of,
    solution_store,
)


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> Solved:
    return Solved.watch(monkeypatch)


def treatment(layer: nn.Module, method: str = "svd", norm: str = "frobenius", **options: Any) -> Treatment:
    chosen = method_of(method)
    ranks = (3,) * len(chosen.rank_names)
    return Treatment(
        geometry=Geometry.of(layer), method=chosen, norm=norm_of(norm), format=chosen.format(ranks), options=options
    )


def layer(seed: int = 0) -> nn.Conv2d:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Conv2d(8, 6, 3, padding=1)


def assert_same(first: Solution, second: Solution) -> None:
    assert first.facts() == second.facts()
    one, two = first.tensors(), second.tensors()
    assert list(one) == list(two)
    assert all(torch.equal(value, two[key]) for key, value in one.items())


def test_memory_and_disk_are_one(solved: Solved, tmp_path: Path) -> None:
    conv = layer()
    solutions = Solutions(tmp_path / "deep" / "folder")
    first, known = solutions.get_or_solve(treatment(conv), conv, None)
    assert not known
    (file,) = solutions.folder.iterdir()  # type: ignore[union-attr]
    again, known = solutions.get_or_solve(treatment(conv), conv, None)
    assert known
    assert_same(again, first)
    # What is in memory needs no file, and what is on disk no memory.
    file.unlink()
    assert solutions.get_or_solve(treatment(conv), conv, None)[1]
    fresh = Solutions(tmp_path / "deep" / "folder")
    assert not fresh.get_or_solve(treatment(conv), conv, None)[1]
    other, known = Solutions(tmp_path / "deep" / "folder").get_or_solve(treatment(conv), conv, None)
    assert known
    torch.testing.assert_close(other.tensors(), first.tensors(), rtol=0, atol=0)
    assert len(solved) == 2


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("on_disk", [True, False])
def test_what_is_kept_is_found_again(solved: Solved, tmp_path: Path, keep: bool, on_disk: bool) -> None:
    conv = layer()
    solutions = Solutions(tmp_path if on_disk else None)
    for _ in range(3):
        solutions.get_or_solve(treatment(conv), conv, None, keep=keep)
    assert len(solved) == (1 if keep or on_disk else 3)
    assert len(list(tmp_path.iterdir())) == on_disk


def test_a_folder_takes_part_from_now_on(solved: Solved, tmp_path: Path) -> None:
    known, new = layer(0), layer(1)
    solutions = Solutions()
    first, _ = solutions.get_or_solve(treatment(known), known, None)
    on_disk = solutions.on_disk(tmp_path)
    again, cached = on_disk.get_or_solve(treatment(known), known, None)
    assert cached
    assert_same(again, first)
    on_disk.get_or_solve(treatment(new), new, None)
    # Both share their memory; a folder has what was solved with it.
    assert solutions.get_or_solve(treatment(new), new, None)[1]
    assert Solutions(tmp_path).get_or_solve(treatment(new), new, None)[1]
    assert len(solved) == 2


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda file: file.write_bytes(file.read_bytes()[:-40]), id="cut"),
        pytest.param(lambda file: file.write_bytes(b""), id="empty"),
        pytest.param(lambda file: file.write_bytes(b"\x00" * 500), id="zeros"),
    ],
)
def test_a_damaged_file_is_solved_again_and_replaced(
    solved: Solved, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], Any]
) -> None:
    conv = layer()
    first, _ = Solutions(tmp_path).get_or_solve(treatment(conv), conv, None)
    (file,) = tmp_path.iterdir()
    damage(file)
    with caplog.at_level(logging.WARNING, "tensigma"):
        again, known = Solutions(tmp_path).get_or_solve(treatment(conv), conv, None)
    assert not known
    assert "cannot be read and is solved again" in caplog.text
    torch.testing.assert_close(again.tensors(), first.tensors(), rtol=0, atol=0)
    assert Solutions(tmp_path).get_or_solve(treatment(conv), conv, None)[1]
    assert [file] == list(tmp_path.iterdir())
    assert len(solved) == 2


def test_a_file_of_another_solution_is_solved_again(solved: Solved, tmp_path: Path) -> None:
    """Whatever put it there: a file under the wrong name does not fit the layer."""
    conv = layer()
    small, large = treatment(conv), treatment(conv, "tucker2")
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder, each in zip(folders, (small, large), strict=True):
        Solutions(folder).get_or_solve(each, conv, None)
    (file,), (other,) = (list(folder.iterdir()) for folder in folders)
    file.write_bytes(other.read_bytes())
    solution, known = Solutions(folders[0]).get_or_solve(small, conv, None)
    assert not known
    assert [name for name, _ in solution.modules.named_children()] == list(small.format.stages(small.geometry))


def test_everything_that_decides_a_solution_gives_another_key(solved: Solved) -> None:
    conv, x = layer(), torch.randn(20, 8, 5, 5)
    stats = ts.calibrate(nn.Sequential(conv), [x])["0"]
    changed = copy.deepcopy(conv)
    with torch.no_grad():
        changed.weight[0, 0, 0, 0] += 1e-6
    shifted = copy.deepcopy(conv)
    with torch.no_grad():
        assert shifted.bias is not None
        shifted.bias[0] += 1e-6
    cases: list[tuple[Treatment, nn.Module, LayerStats | None]] = [
        (treatment(conv, "tucker2", "sigma"), conv, stats),
        (treatment(conv, "tucker2", "sigma"), changed, stats),
        (treatment(conv, "tucker2", "sigma"), shifted, stats),
        (treatment(conv, "tucker2", "sigma"), conv, ts.calibrate(nn.Sequential(conv), [x + 1e-3])["0"]),
        (treatment(conv, "tucker2", "centred"), conv, stats),
        (treatment(conv, "tucker2", "sigma", max_sweeps=2), conv, stats),
        (treatment(conv, "svd", "sigma"), conv, stats),
        (treatment(conv, "tucker2", "frobenius"), conv, None),
    ]
    solutions = Solutions()
    for _ in range(2):
        for case in cases:
            solutions.get_or_solve(*case)
    assert len(solved) == len(cases)
    # What decides nothing gives the same key: where the numbers are, and in which order they lie.
    same = copy.deepcopy(conv).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert solutions.get_or_solve(treatment(same, "tucker2", "sigma"), same, stats)[1]


def test_modules_that_are_handed_out_belong_to_the_caller(tmp_path: Path) -> None:
    conv = layer()
    for solutions in (Solutions(), Solutions(tmp_path)):
        first, _ = solutions.get_or_solve(treatment(conv), conv, None)
        expected = copy.deepcopy(first.tensors())
        for _ in range(2):
            again, _ = solutions.get_or_solve(treatment(conv), conv, None)
            torch.testing.assert_close(again.tensors(), expected, rtol=0, atol=0)
            again.modules.double().requires_grad_(False)
            nn.init.zeros_(next(again.modules.parameters()))
            nn.init.zeros_(next(first.modules.parameters()))


def test_a_folder_that_cannot_be_made_or_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match=r"cache .*file cannot be created"):
        Solutions(tmp_path / "file")

    def fail(*args: Any, **keywords: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(solution_store, "save_file", fail)
    conv = layer()
    with pytest.raises(StoreError, match="No space left on device"):
        Solutions(tmp_path / "full").get_or_solve(treatment(conv), conv, None)
    assert not list((tmp_path / "full").iterdir())


def test_a_copy_is_made_of_what_is_known_already(solved: Solved) -> None:
    net: SmallNet = small_net()
    stats = ts.calibrate(net, batches())
    plan = ts.plan(net, stats, ranks=ts.Ranks({"*": 2}))
    before = copy.deepcopy(net.state_dict())
    solutions = Solutions()
    first = compressed_copy(net, plan.treatments, stats, solutions)
    assert len(solved) == len(plan.compressed)
    second = compressed_copy(net, plan.treatments, stats, solutions)
    assert len(solved) == len(plan.compressed)
    assert all(torch.equal(value, second.state_dict()[key]) for key, value in first.state_dict().items())
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    # One layer changes, one layer is solved.
    compressed_copy(net, plan.with_("head", ranks=3).treatments, stats, solutions)
    assert len(solved) == len(plan.compressed) + 1
    assert [job.name for job in jobs_for(net, plan.treatments, stats)] == list(plan.treatments)


def test_no_flipped_byte_of_a_cached_solution_is_used(tmp_path: Path) -> None:
    layer = nn.Linear(16, 12)
    good, _ = Solutions(tmp_path).get_or_solve(treatment(layer), layer, None)
    (file,) = tmp_path.iterdir()
    content, solved_again = file.read_bytes(), 0
    for position in torch.randint(len(content), (100,), generator=torch.Generator().manual_seed(0)).tolist():
        damaged = bytearray(content)
        damaged[position] ^= 1 << (position % 8)
        file.write_bytes(damaged)
        solution, cached = Solutions(tmp_path).get_or_solve(treatment(layer), layer, None)
        solved_again += not cached
        for key, tensor in good.tensors().items():
            assert torch.equal(tensor, solution.tensors()[key])
        assert solution.frobenius_error == good.frobenius_error
    # Space in the header means nothing.
    assert solved_again > 90


def test_a_cached_solution_of_another_layer_is_found_out_by_its_error(tmp_path: Path) -> None:
    layer, other = nn.Linear(16, 12), nn.Linear(16, 12)
    solutions = Solutions(tmp_path)
    solutions.get_or_solve(treatment(layer), layer, None)
    (file,) = tmp_path.iterdir()
    solutions.get_or_solve(treatment(other), other, None)
    (foreign,) = set(tmp_path.iterdir()) - {file}
    foreign.replace(file)
    _, cached = Solutions(tmp_path).get_or_solve(treatment(layer), layer, None)
    assert not cached


def test_what_a_kill_left_in_the_cache_is_swept(tmp_path: Path) -> None:
    (tmp_path / ".abc.safetensors.partial-999999999").write_text("cut short")
    Solutions(tmp_path)
    assert not list(tmp_path.iterdir())

"""Files and folders that are complete or absent: kills, second writers, and what both leave behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tensigma.errors import StoreError
from tensigma.files import claimed, recover, sweep, whole_file, whole_folder
from tensigma.files import whole as writing

MARK = "ours.txt"
DEAD = "partial-999999999"


def is_ours(folder: Path) -> bool:
    return (folder / MARK).is_file()


def write(target: Path, text: str, *, force: bool = False) -> None:
    with whole_folder(target, force=force, is_ours=is_ours) as place:
        (place / MARK).write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Replaces "small" and dies by SIGKILL at the given call of rename (one step or two), so nothing can clean up.
KILLED = """
import os, signal, sys
from pathlib import Path
from tensigma.files import whole, whole_folder

target, at, one_step = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True"
calls = []

def die_at(function):
    def wrapped(*args, **kwargs):
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        calls.append(function)
        return function(*args, **kwargs)
    return wrapped

real = whole.exchange
whole.exchange = die_at(real) if one_step else lambda first, second: False
whole.remove = die_at(whole.remove)
Path.rename = die_at(Path.rename)
with whole_folder(target, force=True, is_ours=lambda folder: True) as place:
    (place / "ours.txt").write_text("new")
"""


@pytest.mark.parametrize("one_step", [True, False], ids=["exchanged", "in two steps"])
@pytest.mark.parametrize("at", range(6))
def test_a_kill_at_any_rename_loses_neither_the_old_nor_the_new(tmp_path: Path, at: int, one_step: bool) -> None:
    write(tmp_path / "small", "old")
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "small"), str(at), str(one_step)], check=False)
    assert done.returncode in (0, -signal.SIGKILL)
    recover(tmp_path / "small")
    text = (tmp_path / "small" / MARK).read_text()
    assert text == ("new" if done.returncode == 0 else text)
    assert text in ("old", "new")
    write(tmp_path / "small", "newest", force=True)
    assert (tmp_path / "small" / MARK).read_text() == "newest"
    assert names(tmp_path) == ["small"]


def test_what_a_kill_left_between_two_renames_is_not_swept_away_by_the_next_save(tmp_path: Path) -> None:
    for kind in ("partial", "old"):
        place = tmp_path / f".small.{kind}-999999999"
        place.mkdir()
        (place / MARK).write_text(kind)
    with pytest.raises(StoreError, match="exists; pass force"):
        write(tmp_path / "small", "next")
    assert (tmp_path / "small" / MARK).read_text() == "partial"


def test_the_old_folder_comes_back_if_there_is_no_new_one(tmp_path: Path) -> None:
    (tmp_path / ".small.old-999999999").mkdir()
    (tmp_path / ".small.old-999999999" / MARK).write_text("old")
    recover(tmp_path / "small")
    assert (tmp_path / "small" / MARK).read_text() == "old"


class TestSomebodyElse:
    @pytest.mark.parametrize("force", [False, True])
    def test_a_folder_created_meanwhile_is_left_alone_and_the_output_kept(self, tmp_path: Path, force: bool) -> None:
        def write_while_somebody_creates_it() -> None:
            with whole_folder(tmp_path / "small", force=force, is_ours=is_ours) as place:
                (place / MARK).write_text("output")
                (tmp_path / "small").mkdir()
                (tmp_path / "small" / "precious.txt").write_text("theirs")

        with pytest.raises(StoreError, match="small-2"):
            write_while_somebody_creates_it()
        assert (tmp_path / "small" / "precious.txt").read_text() == "theirs"
        assert (tmp_path / "small-2" / MARK).read_text() == "output"
        assert names(tmp_path) == ["small", "small-2"]

    def test_a_file_created_meanwhile_is_left_alone(self, tmp_path: Path) -> None:
        target = tmp_path / "plan.json"

        def write_while_somebody_creates_it() -> None:
            with claimed(target, replace=False), whole_file(target) as partial:
                partial.write_text("output")
                target.write_text("theirs")

        with pytest.raises(StoreError, match="left alone"):
            write_while_somebody_creates_it()
        assert target.read_text() == "theirs"
        assert names(tmp_path) == ["plan.json"]

    def test_a_second_writer_is_refused_at_once(self, tmp_path: Path) -> None:
        script = (
            "import sys; from pathlib import Path; from tensigma.files import claimed\n"
            "with claimed(Path(sys.argv[1])):\n    print('claimed', flush=True); sys.stdin.read()"
        )
        command = [sys.executable, "-c", script, str(tmp_path / "small")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
            assert first.stdout is not None
            assert first.stdout.readline() == "claimed\n"
            with pytest.raises(StoreError, match=f"process {first.pid}"):
                write(tmp_path / "small", "second")
            first.kill()
        write(tmp_path / "small", "second")
        assert names(tmp_path) == ["small"]

    def test_another_thread_is_refused_and_the_same_thread_may_claim_again(self, tmp_path: Path) -> None:
        errors: list[Exception] = []

        def second() -> None:
            try:
                write(tmp_path / "small", "second")
            except StoreError as error:
                errors.append(error)

        with claimed(tmp_path / "small"), claimed(tmp_path / "small"):
            thread = threading.Thread(target=second)
            thread.start()
            thread.join()
            write(tmp_path / "small", "first")
        assert len(errors) == 1
        assert (tmp_path / "small" / MARK).read_text() == "first"


@pytest.mark.skipif(sys.platform == "win32", reason="limits of POSIX")
def test_a_disk_without_room_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    write(tmp_path / "small", "old")
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, usual[1]))
    try:
        with pytest.raises(StoreError, match=r"could not write .*small"):
            write(tmp_path / "small", "new", force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert (tmp_path / "small" / MARK).read_text() == "old"
    assert names(tmp_path) == ["small"]


class TestLeftovers:
    @pytest.mark.parametrize("name", ["plan.json", "a[1].json", ".hidden"])
    def test_of_files_are_swept_by_the_next_write(self, tmp_path: Path, name: str) -> None:
        (tmp_path / f".{name}.{DEAD}").write_text("cut short")
        with whole_file(tmp_path / name) as partial:
            partial.write_text("whole")
        assert names(tmp_path) == [name]

    def test_of_nested_writers_are_swept_too(self, tmp_path: Path) -> None:
        (tmp_path / f"..small.{DEAD}.{DEAD}").mkdir()
        (tmp_path / f"..small.{DEAD}.claim").write_text("")
        write(tmp_path / "small", "whole")
        assert names(tmp_path) == ["small"]

    def test_of_the_living_and_of_other_machines_are_left_alone(self, tmp_path: Path) -> None:
        alive, elsewhere = f".small.partial-{os.getppid()}", ".small.partial-00000000-999999999-1"
        for name in (alive, elsewhere):
            (tmp_path / name).mkdir()
        write(tmp_path / "small", "whole")
        assert names(tmp_path) == sorted(["small", alive, elsewhere])
        os.utime(tmp_path / elsewhere, (0, 0))
        sweep(tmp_path)
        assert names(tmp_path) == sorted(["small", alive])

    def test_other_names_are_left_alone(self, tmp_path: Path) -> None:
        for name in ("small.partial-notes", ".other.partial-12x", "my.partial-2024.txt"):
            (tmp_path / name).write_text("mine")
        sweep(tmp_path)
        assert len(names(tmp_path)) == 3


def test_without_an_atomic_exchange_a_failing_rename_restores_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "small", "old")
    monkeypatch.setattr(writing, "exchange", lambda first, second: False)
    real = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if ".partial-" in path.name:
            raise OSError(28, "No space left on device")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(StoreError, match="No space left"):
        write(tmp_path / "small", "new", force=True)
    assert (tmp_path / "small" / MARK).read_text() == "old"
    assert names(tmp_path) == ["small"]

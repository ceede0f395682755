"""Places that cannot be written, two writers in one place, and a machine without a network."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import tensigma as ts
from support_cli import readme_command, readme_material
from tensigma.errors import StoreError
from tensigma.zoo import load_model
from torture.damage import _plan, images, network
from torture.tally import Tally

_LIMIT = 300


def _writers() -> dict[str, Callable[[Path], Any]]:
    """Everything that writes, each into a folder."""
    small, _ = ts.compress(network(), _plan())
    stats = ts.calibrate(network(), [images()])
    return {
        "archive": lambda place: ts.save(small, place / "small", force=True),
        "statistics": lambda place: stats.save(place / "stats", force=True),
        "plan": lambda place: _plan().save(place / "plan.json"),
        "export": lambda place: ts.export(small, place / "small.pt2", images(2), format="torch-export"),
        "cache": lambda place: ts.compress(network(), _plan(), cache=place / "cache"),
    }


def full_tmpfs(folder: Path, tally: Tally) -> None:
    """A real file system without room, which takes root to mount."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        tally.facts["without a tmpfs"] = 1
        return
    try:
        for name, write in _writers().items():
            place = folder / name
            place.mkdir()
            if name != "cache":
                write(place)
            before = _content(place)
            with (folder / "filler").open("wb", buffering=0) as filler, suppress(OSError):
                while filler.write(bytes(4096)):
                    pass
            try:
                write(place)
            except StoreError:
                outcome = "refused"
            except Exception as error:
                outcome = f"crashed with {type(error).__name__}: {error}"
            else:
                outcome = "written in spite of the limit"
            tally.add(outcome if _content(place) == before else "changed what was there", f"full tmpfs, {name}")
            (folder / "filler").unlink()
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def full_disk(folder: Path, tally: Tally) -> None:
    """Files that may not grow: every writer says so, and what was there stays. A stand-in for a disk that is full."""
    for name, write in _writers().items():
        place = folder / name
        place.mkdir(parents=True)
        if name != "cache":
            write(place)
        before = _content(place)
        usual = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (_LIMIT, usual[1]))
        try:
            write(place)
        except StoreError:
            outcome = "refused"
        except Exception as error:
            outcome = f"crashed with {type(error).__name__}: {error}"
        else:
            outcome = "written in spite of the limit"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        tally.add(outcome if _content(place) == before else "changed what was there", f"full disk, {name}")


def _content(place: Path) -> dict[str, bytes]:
    return {str(file.relative_to(place)): file.read_bytes() for file in sorted(place.rglob("*")) if file.is_file()}


def read_only(folder: Path, tally: Tally) -> None:
    """A folder that belongs to somebody else, as a user who is nobody."""
    folder.mkdir(parents=True)
    ts.save(network(), folder / "small")
    for path in (folder, folder / "small"):
        path.chmod(0o555)
    child = os.fork()
    if not child:
        code = 3
        try:
            # First, because the folders above may be closed to others.
            os.chdir(folder)
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            ts.load("small", network())
            try:
                ts.save(network(), Path("other"))
            except StoreError:
                code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    held = os.waitstatus_to_exitcode(status) == 0
    tally.add("refused" if held else "not refused", "a read-only folder")


def one_cache(folder: Path, tally: Tally) -> None:
    """Two processes that solve the same layers into one cache."""
    code = (
        "import sys; from pathlib import Path\nimport tensigma as ts\nfrom torture.damage import _plan, network\n"
        "place = Path(sys.argv[1])\n"
        "ts.save(ts.compress(network(), _plan(), cache=place / 'cache')[0], place / sys.argv[2])"
    )
    folder.mkdir(parents=True)
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(folder), name], env=_of_here()) for name in ("a", "b")
    ]
    held = [child.wait() for child in children] == [0, 0]
    states = [ts.load(folder / name, network()).state_dict() for name in ("a", "b")] if held else [{}, {}]
    held = held and all(states[0][key].equal(states[1][key]) for key in states[0])
    left = [path for path in folder.rglob("*") if ".partial-" in path.name]
    tally.add("held" if held and not left else "collided", f"two processes on one cache: {left}")


def one_output(folder: Path, tally: Tally) -> None:
    """Two commands with one ``--out``: one is refused at once, the other's output is whole."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "tensigma", "compress", "zoo:digits-cnn?width=6", "--norm", "frobenius"]
    command += ["--ranks", "vbmf=0.5", "--out", "small"]
    children = [
        subprocess.Popen(
            command, cwd=folder, env=_of_here(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    ends = [(child.communicate()[0], child.returncode) for child in children]
    refused = [text for text, code in ends if code == 1 and ("another run" in text or "exists" in text)]
    whole = {"manifest.json", "model.safetensors", "plan.json", "report.json"} <= {
        file.name for file in (folder / "small").iterdir()
    }
    held = sorted(code for _, code in ends) == [0, 1] and len(refused) == 1 and whole
    tally.add("held" if held else "collided", f"two commands with one --out: {ends}")


def _of_here() -> dict[str, str]:
    """The environment for a process that finds what this one finds."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def one_place(folder: Path, tally: Tally) -> None:
    """Eight threads that save to one folder: one wins or they take turns; the folder is complete at all times."""
    small, _ = ts.compress(network(), _plan())
    folder.mkdir(parents=True)
    outcomes: list[str] = []

    def save() -> None:
        try:
            ts.save(small, folder / "small", force=True)
            outcomes.append("held")
        except StoreError:
            outcomes.append("refused")
        except Exception as error:
            outcomes.append(f"crashed with {error!r}")

    threads = [threading.Thread(target=save) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ts.load(folder / "small", network())
    for outcome in outcomes:
        tally.add(outcome, "eight writers of one folder")


def without_network(folder: Path, tally: Tally) -> None:
    """Nothing opens a socket."""
    real = socket.socket

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a socket was opened")

    socket.socket = refuse  # type: ignore[assignment, misc]
    try:
        small, _ = ts.compress(network(), [images()], budget=ts.Params(0.7))
        ts.save(small, folder / "small")
        ts.load(folder / "small", network())
        ts.evaluate(small, [images()], original=network())
        tally.add("held", "without a network")
    except AssertionError as error:
        tally.add("used the network", str(error))
    finally:
        socket.socket = real  # type: ignore[misc]


def readme(folder: Path, tally: Tally) -> None:
    """The first command of the README as it is written, from the installed environment; it takes minutes."""
    folder.mkdir(parents=True)
    readme_material(folder)
    done = subprocess.run(readme_command(), cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        tally.add("failed", f"the command of the README: {done.stderr[-500:]}")
        return
    small = ts.load(folder / "small", load_model("torchvision:resnet18"))
    params = ts.evaluation.count_params(small)
    tally.add("held" if params <= 0.5 * 11_689_512 else "too large", f"the command of the README: {params} parameters")


ALL = (full_disk, full_tmpfs, read_only, one_cache, one_output, one_place, without_network)


def torture(folder: Path, tally: Tally) -> None:
    """Each of them once."""
    for place in ALL:
        place(folder / place.__name__, tally)

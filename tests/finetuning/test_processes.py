"""Two processes under torchrun train to the weights of one, resume after a kill, and only the first writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

import tensigma as ts
from support_nets import batches
from tensigma.errors import InputError
from tensigma.running import rank_and_size

pytestmark = pytest.mark.slow


class Net(nn.Module):
    """Two BatchNorm layers, of maps and of rows, one without a momentum, and a layer that has no gradient.

    There is no bias before BatchNorm: its gradient would be rounding, of which Adam makes whole steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.rows = nn.BatchNorm1d(6, affine=False, momentum=None)
        self.head, self.idle = nn.Linear(6, 4), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows(functional.relu(self.norm(self.conv(x))).mean((2, 3))))


def net(seed: int = 0) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Net().eval()
    model.head.bias.data = torch.tensor([8.0, 0.0, 0.0, 0.0])
    return model


def labelled() -> list[tuple[Tensor, Tensor]]:
    """Batches of 7 samples, which two processes cannot halve, and at the end one of a single sample."""
    images = torch.cat(batches(5, 8, pixels=6))[:36]
    labels = torch.stack([images[:, :, 0, 0].sum(1), images[:, :, -1, -1].sum(1)], 1).argmax(1)
    return list(zip(images.split(7), labels.split(7), strict=True))


def tune(epochs: int, **options: object) -> tuple[nn.Module, ts.FineTuning]:
    settings = {"learning_rates": (0.05, 0.01), "validation": labelled()[:2], "optimizer": "sgd", "mix": 2} | options
    return ts.finetune(net(), labelled(), epochs=epochs, **settings)  # type: ignore[arg-type]


def train_and_die(folder: Path) -> None:
    """The second process is killed in the middle of the fourth epoch of six; torchrun then stops the first."""
    rank, _ = rank_and_size()

    def kill(progress: ts.finetuning.FineTuningProgress) -> None:
        if rank == 1 and progress.done > 3.3:
            os.kill(os.getpid(), signal.SIGKILL)

    tune(3, checkpoint=folder / "killed", progress=kill)


def resume_and_save(folder: Path) -> None:
    rank, _ = rank_and_size()
    states: list[ts.finetuning.FineTuningProgress] = []
    tuned, history = tune(3, checkpoint=folder / "killed", progress=states.append)
    # Whole epochs before the one of the kill are not trained again.
    assert {state.first for state in states} == {3}
    assert [len(rate.epochs) for rate in history.rates] == [3, 3]
    save_file(tuned.state_dict(), folder / f"resumed-{rank}.safetensors")


def train_and_save(folder: Path) -> None:
    rank, _ = rank_and_size()
    # A folder that the second process does not have.
    place = folder / f"state-{rank}"
    tune(1, checkpoint=place)
    (folder / f"wrote-{rank}").write_text(str(place.exists()))
    tuned, history = tune(1, checkpoint=place)
    assert (history.rates[0].epochs[0].samples, len(history.rates[0].epochs)) == (35, 1)
    for epochs, name in ((3, "tuned"), (2, "taught")):
        teacher = {} if name == "tuned" else {"teacher": net(seed=1), "optimizer": "adam"}
        tuned, history = tune(epochs, **teacher)
        save_file(tuned.state_dict(), folder / f"{name}-{rank}.safetensors")
        (folder / f"{name}-{rank}.txt").write_text(str(history.best.validation_loss))
    try:
        ts.finetune(net(seed=rank), labelled(), epochs=1)
    except InputError as error:
        (folder / f"error-{rank}.txt").write_text(str(error))


def torchrun(part: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A part of this file in two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [str(Path(__file__)), part, str(folder)]
    return subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=600)


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    killed = torchrun("die", tmp_path)
    assert killed.returncode != 0
    assert "Signal 9 (SIGKILL)" in killed.stderr
    done = torchrun("save", tmp_path)
    assert done.returncode == 0, done.stderr
    for name, (alone, history) in {"tuned": tune(3), "taught": tune(2, teacher=net(seed=1), optimizer="adam")}.items():
        expected = alone.state_dict()
        assert not torch.equal(expected["conv.weight"], net().conv.weight)
        first, second = (load_file(tmp_path / f"{name}-{rank}.safetensors") for rank in range(2))
        assert first.keys() == expected.keys()
        for key, value in first.items():
            assert torch.equal(value, second[key])
            torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-4)
        for rank in range(2):
            loss = float((tmp_path / f"{name}-{rank}.txt").read_text())
            assert loss == pytest.approx(history.best.validation_loss, rel=1e-3)
    # The run that was killed ends with the bits of the one that was not.
    whole = load_file(tmp_path / "tuned-0.safetensors")
    for rank in range(2):
        resumed = load_file(tmp_path / f"resumed-{rank}.safetensors")
        assert all(torch.equal(value, resumed[key]) for key, value in whole.items())
    assert [(tmp_path / f"wrote-{rank}").read_text() for rank in range(2)] == ["True", "False"]
    for rank in range(2):
        assert "different weights" in (tmp_path / f"error-{rank}.txt").read_text()


if __name__ == "__main__":
    if sys.argv[1] == "die":
        train_and_die(Path(sys.argv[2]))
    else:
        resume_and_save(Path(sys.argv[2]))
        train_and_save(Path(sys.argv[2]))

"""Training one copy of a model at one learning rate."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tensigma.errors import InputError, StoreError
from tensigma.finetuning.history import Epoch
from tensigma.finetuning.objectives import Objective
from tensigma.finetuning.team import Team
from tensigma.running import (
    Pair,
    Tally,
    borrowed,
    copied,
    device_of,
    mixed,
    n_samples,
    safe_backward,
    seed_all,
    tensors_of,
)

OPTIMIZERS = ("adam", "sgd")
_NORMS = (nn.modules.batchnorm._BatchNorm,)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How copies are trained, apart from the learning rate."""

    optimizer: str
    momentum: float
    weight_decay: float
    freeze_bn: bool
    mix: int
    seed: int

    def make(self, parameters: list[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
        """The optimizer with these settings."""
        if self.optimizer == "adam":
            return torch.optim.Adam(parameters, learning_rate, weight_decay=self.weight_decay)
        return torch.optim.SGD(parameters, learning_rate, momentum=self.momentum, weight_decay=self.weight_decay)


def judge(model: nn.Module, objective: Objective, validation: Iterable[Pair], seed: int) -> tuple[float, float, int]:
    """Mean loss and figure of the objective over the validation samples, and how many there are."""
    total, samples = 0.0, 0
    tally: Tally | None = None
    with borrowed(model), torch.no_grad():
        seed_all(seed)
        for index, (x, labels) in enumerate(validation):
            tally = tally or objective.tally(model, x, labels)
            total += objective.judge(model, x, labels, index, tally) * n_samples(x)
            samples += n_samples(x)
    if tally is None:
        raise InputError(
            "no sample was held out for validation; raise {validation_share}, or give {validation}",
            parameters=("validation_share", "validation"),
        )
    return total / samples, objective.score(tally), samples


class Tuner:
    """A copy of a model, its optimizer, and its best weights so far."""

    def __init__(
        self, model: nn.Module, learning_rate: float, objective: Objective, settings: Settings, team: Team
    ) -> None:
        self._model = copied(model).train(not objective.in_evaluation_mode)
        self._frozen = [module for module in self._model.modules() if settings.freeze_bn and isinstance(module, _NORMS)]
        for module in self._frozen:
            module.eval()
        self._needs_two = any(isinstance(module, _NORMS) and module.training for module in self._model.modules())
        self._objective, self._settings, self._team = objective, settings, team
        self._trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer: torch.optim.Optimizer | None = settings.make(self._trained, learning_rate)
        self.best: dict[str, Tensor] = {}
        self.history: list[Epoch] = []

    def run(self, training: Iterable[Pair], validation: Iterable[Pair]) -> Iterator[tuple[int, float]]:
        """Train one more epoch; yields the samples and the mean loss so far after each batch."""
        start = time.perf_counter()
        number, seed = len(self.history) + 1, self._settings.seed
        seed_all(seed * 1_000_003 + number)
        total, samples = 0.0, 0
        order = torch.Generator().manual_seed(seed * 1_000_003 + number)
        for index, (x, labels) in enumerate(mixed(training, self._settings.mix, order)):
            # BatchNorm cannot train on one sample, which the last batch may be.
            if n_samples(x) == 1 and self._needs_two:
                continue
            loss = self._step(x, labels, index)
            total, samples = total + loss * n_samples(x), samples + n_samples(x)
            yield samples, total / samples
            if not math.isfinite(loss):
                break
        if not samples:
            raise InputError(
                "nothing to train on: give batches of at least two samples, or {freeze_bn}",
                parameters=("freeze_bn=True",),
            )
        self._team.align_(self._model)
        outcome: tuple[float | None, float] = None, 0.0
        if math.isfinite(total):
            loss, score, _ = judge(self._model, self._objective, validation, seed)
            outcome = self._team.agreed((loss, score) if math.isfinite(loss) else outcome)
        self.history.append(
            Epoch(
                epoch=number,
                loss=total / samples if math.isfinite(total) else None,
                validation_loss=outcome[0],
                score=outcome[1],
                samples=samples,
                seconds=time.perf_counter() - start,
            )
        )
        if max(self.history, key=lambda epoch: epoch.key) is self.history[-1]:
            self.best = {key: tensor.detach().clone() for key, tensor in tensors_of(self._model).items()}

    def _step(self, x: Any, labels: Any, index: int) -> float:
        assert self._optimizer is not None
        own, own_labels, share = self._team.part(x, labels)
        shared = share < 1
        with (
            torch.enable_grad(),
            safe_backward(self._model),
            self._team.normalising_together(self._model) if shared else nullcontext(),
        ):
            loss = self._objective.loss(self._model, own, own_labels, index) * share
            self._optimizer.zero_grad()
            loss.backward()
            total = self._team.add_up_(self._trained, loss) if shared else loss.item()
            self._optimizer.step()
        return total

    def release(self) -> None:
        """Free everything but the history and the best weights: this was the last epoch."""
        self._model, self._optimizer, self._trained = nn.Identity(), None, []

    def tensors(self) -> dict[str, Tensor]:
        """Everything needed to resume: current and best weights, and the state of the optimizer."""
        assert self._optimizer is not None
        state = self._optimizer.state_dict()["state"]
        return {
            **{f"now/{key}": tensor for key, tensor in tensors_of(self._model).items()},
            **{f"best/{key}": tensor for key, tensor in self.best.items()},
            **{
                f"optimizer/{parameter}/{key}": value
                for parameter, values in state.items()
                for key, value in values.items()
                if isinstance(value, Tensor)
            },
        }

    def restore(self, tensors: Mapping[str, Tensor], history: list[Epoch]) -> None:
        """Resume from what :meth:`tensors` gave after the last epoch of ``history``."""
        assert self._optimizer is not None
        try:
            fill_(self._model, _below(tensors, "now"))
            device = device_of(self._model)
            self.best = {key: tensor.to(device) for key, tensor in _below(tensors, "best").items()}
            state: dict[int, dict[str, Any]] = {}
            for name, tensor in _below(tensors, "optimizer").items():
                parameter, _, key = name.partition("/")
                state.setdefault(int(parameter), {})[key] = tensor
            groups = self._optimizer.state_dict()["param_groups"]
            self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        except (KeyError, ValueError, RuntimeError) as error:
            raise StoreError(f"the checkpoint does not fit the model: {error}") from error
        self.history = list(history)


def fill_(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy values into the parameters and buffers of a model."""
    with torch.no_grad():
        for key, tensor in tensors_of(model).items():
            tensor.copy_(tensors[key])


def _below(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}/"): tensor for key, tensor in tensors.items() if key.startswith(f"{name}/")}

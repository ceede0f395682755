"""The distance of a small model from the original: the loss that refinement lowers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tensigma.running import floats_of

#: A batch of few values may have almost no variance; this share of the variance of all samples is its lower bound.
_LEAST = 0.1


class Likeness:
    """The distance of answers, and of the outputs of ``blocks``, between two models in evaluation mode.

    Errors are relative to the variance of the target in a batch, or to a share of its variance over ``probe`` if the
    batch has hardly any: one sample of a single number has none.

    >>> one, other = nn.Linear(2, 1), nn.Linear(2, 1)
    >>> loss = Likeness(one, other, [], [torch.eye(2)], temperature=1.0, features=0.0)
    >>> loss.value(torch.ones(1, 2)) > 0, Likeness(one, one, [], [torch.eye(2)]).value(torch.ones(1, 2))
    (True, 0.0)
    """

    def __init__(
        self,
        small: nn.Module,
        original: nn.Module,
        blocks: list[str],
        probe: Sequence[Tensor],
        *,
        temperature: float = 1.0,
        features: float = 1.0,
    ) -> None:
        self._small, self._original = small, original
        self._temperature, self._features = temperature, features
        self._blocks = blocks if features else []
        self._least = self._variances(probe)

    def __call__(self, x: Tensor) -> Tensor:
        target_answers, target_features = self._targets(x)
        with _outputs(self._small, list(target_features)) as features:
            answers = floats_of(self._small(x))
        pairs = enumerate(zip(answers, target_answers, strict=True))
        loss = torch.stack([self._distance(answer, target, index) for index, (answer, target) in pairs]).sum()
        for name, target in target_features.items():
            loss = loss + self._features / len(target_features) * self._relative(features[name], target, name)
        return loss

    @torch.no_grad()
    def value(self, x: Tensor) -> float:
        """The loss as a number, without gradients."""
        return self(x).item()

    @torch.no_grad()
    def _targets(self, x: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
        with _outputs(self._original, self._blocks) as features:
            return floats_of(self._original(x)), features

    def _variances(self, probe: Sequence[Tensor]) -> dict[int | str, float]:
        """The lower bound of the variance of each target."""
        sums: dict[int | str, Tensor] = {}
        for x in probe:
            answers, features = self._targets(x)
            targets: dict[int | str, Tensor] = dict(enumerate(answers))
            targets.update(features.items())
            for key, target in targets.items():
                variance, mean = torch.var_mean(target.double(), correction=0)
                moments = target.numel() * torch.stack([torch.ones_like(mean), mean, variance + mean.square()])
                if moments.isfinite().all():
                    sums[key] = sums[key] + moments if key in sums else moments
        return {key: _LEAST * float(square / n - (mean / n).square()) for key, (n, mean, square) in sums.items()}

    def _distance(self, answer: Tensor, target: Tensor, key: int) -> Tensor:
        """Divergence of class probabilities for scores of (batch, classes), squared relative error for all else."""
        if target.dim() == 2 and target.shape[1] > 1:
            log_p, log_target = ((scores / self._temperature).log_softmax(1) for scores in (answer, target))
            # T² keeps gradients at the scale they have at T = 1.
            return functional.kl_div(log_p, log_target, reduction="batchmean", log_target=True) * self._temperature**2
        return self._relative(answer, target, key)

    def _relative(self, output: Tensor, target: Tensor, key: int | str) -> Tensor:
        least = max(self._least.get(key, 0.0), torch.finfo(target.dtype).tiny)
        variance = target.var() if target.numel() > 1 else target.new_zeros(())
        return (output - target).square().mean() / variance.clamp_min(least)


@contextmanager
def _outputs(model: nn.Module, names: list[str]) -> Iterator[dict[str, Tensor]]:
    """The outputs of these modules in calls inside the block, if they are tensors of real numbers."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                outputs[name] = output

        return hook

    with ExitStack() as stack:
        for name in names:
            stack.callback(model.get_submodule(name).register_forward_hook(keep(name)).remove)
        yield outputs

"""The distance of a small model from the original: the loss that refinement lowers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tensigma.errors import InputError
from tensigma.running import Answers, Batch, Inputs, Numbers, Scores, Wish, first_answers

#: The outputs of the small model and of the original → what is made small.
LossFunction = Callable[[Any, Any], Tensor]
#: A batch of few values may have almost no variance; this share of the variance of all samples is its lower bound.
_LEAST = 0.1


class Likeness:
    """The distance of answers, and of the outputs of ``blocks``, between two models in evaluation mode.

    Errors are relative to the variance of the target in a batch, or to a share of its variance over ``probe`` if the
    batch has hardly any: one sample of a single number has none. ``loss``, a function of the outputs of both models,
    takes the place of the distance of answers.

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
        probe: Sequence[Inputs],
        *,
        temperature: float | None = None,
        features: float = 1.0,
        answers: Wish = None,
        loss: LossFunction | None = None,
    ) -> None:
        self._small, self._original = small, original
        self._loss = loss
        self._features = features
        self._blocks = blocks if features else []
        with torch.no_grad():
            #: How answers are read; by a loss function they are not.
            self.reading = Answers((), guessed=False)
            if loss is None:
                self.reading = first_answers(original, Batch(0, probe[0], None), answers, ask=False)[1]
            #: What scores are divided by before they are compared.
            self.temperature = self._softening(probe[0]) if temperature is None else temperature
        self._least = self._variances(probe)

    def __call__(self, x: Inputs) -> Tensor:
        target_output, target_answers, target_features = self._targets(x)
        with _outputs(self._small, list(target_features)) as features:
            output, answers = self.reading.run(self._small, Batch(0, x, None))
        kinds = self.reading.kinds(len(target_answers))
        losses = [
            kind.distance(answer, target, self._scale(target, index), self.temperature)
            for index, (kind, answer, target) in enumerate(zip(kinds, answers, target_answers, strict=True))
        ]
        if self._loss is not None:
            losses.append(_one_number(self._loss(output, target_output)))
        for name, feature in target_features.items():
            # Behind the first stage of a detector the two models look at different candidates.
            if features[name].shape == feature.shape:
                distance = Numbers().distance(features[name], feature, self._scale(feature, name))
                losses.append(self._features / len(target_features) * distance)
        return torch.stack(losses).sum()

    @torch.no_grad()
    def value(self, x: Inputs) -> float:
        """The loss as a number, without gradients."""
        return self(x).item()

    @torch.no_grad()
    def _targets(self, x: Inputs) -> tuple[Any, list[Tensor], dict[str, Tensor]]:
        with _outputs(self._original, self._blocks) as features:
            return *self.reading.run(self._original, Batch(0, x, None)), features

    def _softening(self, x: Inputs) -> float:
        """The temperature that suits the scores among the original's answers, the lowest where there are several."""
        _, answers = self.reading.run(self._original, Batch(0, x, None))
        kinds = self.reading.kinds(len(answers))
        wanted = [kind.softening(part) for kind, part in zip(kinds, answers, strict=True) if isinstance(kind, Scores)]
        return min(wanted, default=1.0)

    def _variances(self, probe: Sequence[Inputs]) -> dict[int | str, float]:
        """The lower bound of the variance of each target."""
        sums: dict[int | str, Tensor] = {}
        for x in probe:
            _, answers, features = self._targets(x)
            targets: dict[int | str, Tensor] = dict(enumerate(answers))
            targets.update(features.items())
            for key, target in targets.items():
                variance, mean = torch.var_mean(target.double(), correction=0)
                moments = target.numel() * torch.stack([torch.ones_like(mean), mean, variance + mean.square()])
                if moments.isfinite().all():
                    sums[key] = sums[key] + moments if key in sums else moments
        return {key: _LEAST * float(square / n - (mean / n).square()) for key, (n, mean, square) in sums.items()}

    def _scale(self, target: Tensor, key: int | str) -> Tensor:
        least = max(self._least.get(key, 0.0), torch.finfo(target.dtype).tiny)
        variance = target.var() if target.numel() > 1 else target.new_zeros(())
        return variance.clamp_min(least)


def _one_number(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise InputError("Refine: loss is a function of two outputs that returns one number as a tensor")
    return loss.reshape(())


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

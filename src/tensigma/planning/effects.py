"""How much an error in each layer matters to the answers, measured for all layers at once.

A layer is disturbed by leaving out its weakest output directions, at a squared relative error e² near 0.05, all other
layers as they are: its output y changes by δ = Q (y − ȳ), with Q the projection onto those directions. To second order
the answers then diverge from the original's by (Jδ)ᵀ F (Jδ), with J the Jacobian from y to the answers and F the
curvature of the divergence. For random u with E[u uᵀ] = F this is E[(uᵀJ δ)²], and one backward pass from u gives uᵀJ
of every layer. That mean, divided by e², is the effect of the layer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tensigma.linalg import seen_basis, share_lost
from tensigma.running import (
    Batch,
    Listener,
    Probe,
    Progress,
    all_notes,
    borrowed,
    n_samples,
    rank_and_size,
    safe_backward,
    silent,
    split,
    together,
)
from tensigma.solving import SVD_METHOD, Candidate, energy_views, means

#: Small enough that a layer is disturbed and not destroyed, large enough to stand out from rounding.
_ERROR2 = 0.05
# Effects further apart than this depend more on a handful of samples than on the layers.
_RANGE = 100.0
#: Backward passes for every forward pass. One is too noisy if a model is sure of most of its answers.
_DRAWS = 2
#: Bytes that the activations of one forward pass may take, roughly.
_BYTES = 400 * 10**6


@dataclass(frozen=True, kw_only=True)
class EffectProgress(Progress):
    """The effects of errors in the layers have been measured on some samples; steps are samples.

    >>> print(EffectProgress(done=16, total=64, seconds=1.0))
    effects of errors, 16 of 64 samples
    """

    title: ClassVar[str] = "planning"

    def __str__(self) -> str:
        return f"effects of errors, {self.done} of {self.total} samples"


def measured_effects(
    model: nn.Module, layers: Sequence[Candidate], probe: Probe, *, report: Listener = silent
) -> dict[str, float]:
    """Layer name → effect of its errors on the answers, with a geometric mean of 1; empty if no error has an effect.

    Layers that cannot be disturbed this way, because all their output directions but one are empty or the norm weighs
    single entries, have an effect of 1.
    """
    disturbances = {}
    for layer in layers:
        disturbance = Disturbance.of(layer, model.get_submodule(layer.name))
        if disturbance is not None:
            disturbances[layer.name] = disturbance
    shares = all_notes(together(lambda: _sums(model, disturbances, probe, _piece(layers), report)))
    effects = normalised(
        {name: sum(share[name] for share in shares) / disturbance.error2 for name, disturbance in disturbances.items()}
    )
    return {layer.name: effects.get(layer.name, 1.0) for layer in layers} if effects else {}


def _sums(
    model: nn.Module, disturbances: Mapping[str, Disturbance], probe: Probe, size: int, report: Listener
) -> dict[str, float]:
    """The squared moves of each layer over the samples of this process, run ``size`` at a time."""
    start = time.perf_counter()
    sums = dict.fromkeys(disturbances, 0.0)
    done = 0
    with borrowed(model), torch.enable_grad(), safe_backward(model), _listening(model, disturbances) as moved:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for batch in probe.batches:
            for inputs in split(batch.inputs, size):
                for squares in _squares(model, probe, Batch(batch.index, inputs, None), moved):
                    for name, square in squares.items():
                        sums[name] += square / _DRAWS
                done += n_samples(inputs)
                report(EffectProgress(done=done, total=probe.samples, seconds=time.perf_counter() - start))
    return sums


def normalised(effects: Mapping[str, float]) -> dict[str, float]:
    """The same with a geometric mean of 1, clipped to between a hundredth and a hundred times the median.

    >>> normalised({"a": 1.0, "b": 4.0})
    {'a': 0.5, 'b': 2.0}
    """
    usable = sorted(effect for effect in effects.values() if 0 < effect < math.inf)
    if not usable:
        return {}
    median = usable[len(usable) // 2]
    clipped = {name: min(max(effect, median / _RANGE), median * _RANGE) for name, effect in effects.items()}
    mean = math.exp(sum(map(math.log, clipped.values())) / len(clipped))
    return {name: effect / mean for name, effect in clipped.items()}


@dataclass(frozen=True, eq=False)
class Disturbance:
    """The weakest output directions of one layer, and the share of its energy that they carry."""

    #: One basis per group, of the directions that stay, (t/groups, directions).
    bases: tuple[Tensor, ...]
    #: The point that the output is measured from, (t).
    centre: Tensor
    error2: float
    n_spatial: int

    @classmethod
    def of(cls, layer: Candidate, module: nn.Module) -> Disturbance | None:
        """The weakest directions whose energy is nearest to ``_ERROR2``; None if they carry none."""
        geometry = layer.geometry
        if SVD_METHOD.why_not(geometry, layer.norm) is not None:
            return None
        views = energy_views(layer.kernels, layer.norm.targets(geometry, layer.stats))
        # Under the moments as they were gathered: the change of the answers is measured on the same data.
        energies, directions = zip(*(seen_basis(k.flatten(1), m.observed.to(k)) for k, m in views), strict=True)
        spectrum = torch.stack([values.cpu() for values in energies]).sum(0)
        known = min(basis.shape[1] for basis in directions)
        errors2 = share_lost(spectrum, spectrum.sum())[:-1][:known].tolist()
        # Without directions that carry no energy: leaving them out would measure only rounding.
        errors = {rank: error2 for rank, error2 in enumerate(errors2, start=1) if error2 > 1e-6}
        if not errors:
            return None
        rank = min(errors, key=lambda rank: abs(math.log(errors[rank] / _ERROR2)))
        bases = [basis[:, :rank] for basis in directions]
        centre = torch.zeros(geometry.out_channels, dtype=torch.float64)
        if layer.norm.moves_bias and layer.stats is not None:
            pairs = zip(layer.kernels, means(geometry, layer.stats), strict=True)
            centre = torch.cat([kernel.flatten(1).double() @ mean.to(kernel).double() for kernel, mean in pairs])
        bias = module.bias
        if isinstance(bias, Tensor):
            centre = centre.to(bias.device) + bias.detach().double()
        return cls(tuple(bases), centre, errors[rank], geometry.n_spatial)

    def change(self, output: Tensor) -> Tensor:
        """δ: the part of ``output`` that leaving the directions out would take away."""
        axis = output.dim() - 1 - self.n_spatial
        rows = output.movedim(axis, -1) - self.centre.to(output)
        parts = rows.split([len(basis) for basis in self.bases], dim=-1)
        pairs = zip(parts, self.bases, strict=True)
        lost = [part - (part @ basis.to(part)) @ basis.to(part).T for part, basis in pairs]
        return torch.cat(lost, -1).movedim(-1, axis)


@contextmanager
def _listening(model: nn.Module, disturbances: Mapping[str, Disturbance]) -> Iterator[dict[str, Tensor]]:
    """By how much the disturbance of each layer moves the value that a backward pass inside the block starts from.

    One number per sample; layers that are called several times are disturbed in all calls at once.
    """
    moved: dict[str, Tensor] = {}

    def listen(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            # The change is computed now, because later modules may work in place.
            change = disturbances[name].change(output.detach())
            # Only what comes after the first of these layers needs a gradient.
            tracked = output if output.requires_grad else output.detach().requires_grad_().clone()

            def add(gradient: Tensor) -> None:
                moved[name] = moved.get(name, 0.0) + (gradient * change).flatten(1).sum(1).double()

            tracked.register_hook(add)
            return None if tracked is output else tracked

        return hook

    with ExitStack() as stack:
        for name in disturbances:
            stack.callback(model.get_submodule(name).register_forward_hook(listen(name)).remove)
        yield moved


def _squares(model: nn.Module, probe: Probe, batch: Batch, moved: dict[str, Tensor]) -> Iterator[dict[str, float]]:
    """For each draw, the squared move of each layer, summed over samples."""
    # Every n-th batch is that of this process: the draws are those that one process would make for the batch.
    rank, size = rank_and_size()
    generator = torch.Generator().manual_seed(batch.index * size + rank)
    answers = probe.answers(model, batch)
    for draw in range(_DRAWS):
        moved.clear()
        mixture = probe.mixture(answers, generator)
        # Without a gradient, none of the layers was called.
        if mixture.requires_grad:
            mixture.backward(retain_graph=draw + 1 < _DRAWS)
        yield {name: move.square().sum().item() for name, move in moved.items()}


def _piece(layers: Sequence[Candidate]) -> int:
    """How many samples to run at a time, so that activations stay small."""
    # Outputs are kept by autograd, once more by the module after them, and as changes.
    sizes = [layer.calls * math.prod(layer.stats.output_shape) for layer in layers if layer.stats is not None]
    return max(1, min(64, int(_BYTES / (12 * sum(sizes) or 1))))

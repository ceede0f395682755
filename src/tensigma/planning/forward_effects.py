"""How much an error in each layer matters to the answers of a model without gradients: one layer at a time.

The layer is disturbed as in :mod:`tensigma.planning.effects`, the model is run forward, and the divergence of its
answers from the original's, divided by the squared error, is the effect. That takes one pass per layer instead of a few
for all of them, so there are few samples; they need to tell a sensitive layer from a robust one, and trials decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from tensigma.planning.effects import Disturbance, EffectProgress, normalised
from tensigma.running import Listener, Probe, silent
from tensigma.solving import Candidate

#: Multiply-adds for all passes together, and the fewest and most samples.
_MACS, _FEWEST, _MOST = 2e11, 8, 16


def forward_samples(layers: Sequence[Candidate]) -> int:
    """How many samples to measure the effects of these layers on."""
    work = len(layers) * sum(layer.cost(None).macs for layer in layers)
    return min(_MOST, max(_FEWEST, int(_MACS / work))) if work else _FEWEST


def forward_effects(
    model: nn.Module, layers: Sequence[Candidate], probe: Probe, *, report: Listener = silent
) -> dict[str, float]:
    """Layer name → effect of its errors on the answers, as :func:`tensigma.planning.effects.measured_effects` gives."""
    start = time.perf_counter()
    effects = {}
    for done, layer in enumerate(layers, start=1):
        module = model.get_submodule(layer.name)
        disturbance = Disturbance.of(layer, module)
        if disturbance is not None:
            handle = module.register_forward_hook(_disturbing(disturbance))
            try:
                effects[layer.name] = probe.divergence(model) / disturbance.error2
            finally:
                handle.remove()
        samples = probe.samples * done // len(layers)
        report(EffectProgress(done=samples, total=probe.samples, seconds=time.perf_counter() - start))
    usable = normalised(effects)
    return {layer.name: usable.get(layer.name, 1.0) for layer in layers} if usable else {}


def _disturbing(disturbance: Disturbance) -> Callable[..., Tensor]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output - disturbance.change(output)

    return hook

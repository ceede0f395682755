"""Re-estimating the statistics of BatchNorm layers from data without labels."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tensigma.errors import InputError
from tensigma.running import Batches, Key, borrowed, run


def reestimate_bn_(model: nn.Module, batches: Any, *, input: Key = None) -> int:
    """Replace running means and variances of ``model`` by averages over ``batches``; returns the number of layers.

    Layers that no batch reaches, such as those of heads used only in training, stay as they are.

    All other modules run in evaluation mode, so that dropout does not interfere. All layers are estimated in one pass:
    as in training, the layers before each one normalise a batch with that batch's own statistics.

    >>> model = nn.Sequential(nn.BatchNorm1d(2))
    >>> reestimate_bn_(model, [torch.tensor([[1.0, 5.0], [3.0, 5.0]])]), model[0].running_mean.tolist()
    (1, [2.0, 5.0])
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats
    }
    if not layers:
        return 0
    data = Batches(batches, input=input, name="data")
    data.check_rereadable("re-estimating BatchNorm")
    momenta = {name: layer.momentum for name, layer in layers.items()}
    former = {name: copy.deepcopy(dict(layer.named_buffers())) for name, layer in layers.items()}
    unchanged = set(layers)
    with borrowed(model), torch.no_grad():
        try:
            for layer in layers.values():
                layer.reset_running_stats()
                layer.momentum = None  # the plain average over batches
                layer.train()
            for batch in data:
                # A single sample has no variance if its map has one position.
                if len(batch) > 1:
                    run(model, batch)
            reached = {name for name, layer in layers.items() if int(layer.num_batches_tracked or 0)}
            if not reached:
                raise InputError("no batch of at least two samples reached a BatchNorm layer; pass larger batches")
            for name in sorted(reached):
                _check_finite(name, layers[name])
            unchanged -= reached
        finally:
            for name in unchanged:
                layers[name].load_state_dict(former[name], strict=False)
            for name, layer in layers.items():
                layer.momentum = momenta[name]
    return len(reached)


def _check_finite(name: str, layer: _BatchNorm) -> None:
    for statistic in ("running_mean", "running_var"):
        if not getattr(layer, statistic).isfinite().all():
            raise InputError(
                f"{statistic} of {name or 'the model'} would not be finite, so no layer is re-estimated; check"
                " the data for values that are not finite"
            )

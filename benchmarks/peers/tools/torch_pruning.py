"""Torch-Pruning: channels and all that depends on them, in one step, by group norm or by a Taylor expansion."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
import torch_pruning as tp
from torch import nn

from peers.search import n_params, nearest_above
from peers.worker import Assignment, main

# Images for the gradients of the Taylor criterion.
_IMAGES = 512


def compress(assignment: Assignment) -> nn.Module:
    """The share of channels that is removed, over all layers together, is searched until the rate is met."""
    model, rate = assignment.model, assignment.job.rate
    taylor = assignment.job.method == "taylor"
    with torch.no_grad():
        n_classes = model(assignment.example).shape[1]
    if taylor:
        accumulate_gradients(assignment)

    def pruned(share: float) -> nn.Module:
        small = copy.deepcopy(model)
        for parameter, source in zip(small.parameters(), model.parameters(), strict=True):
            parameter.grad = None if source.grad is None else source.grad.clone()
        last = [module for module in small.modules() if answers_with(module, n_classes)]
        pruner = tp.pruner.BasePruner(
            small,
            assignment.example,
            importance=tp.importance.GroupTaylorImportance() if taylor else tp.importance.GroupMagnitudeImportance(p=2),
            pruning_ratio=share,
            global_pruning=True,
            max_pruning_ratio=0.95,
            ignored_layers=last,
        )
        pruner.step()
        return small

    def count(share: float) -> int:
        return n_params(pruned(share))

    # Groups of which everything would go are left whole: the model does not shrink all the way.
    share = nearest_above(count, n_params(model) / rate, low=0.0, high=0.95, scan=19, steps=8)
    assignment.notes["pruning_ratio"] = share
    small = pruned(share)
    for parameter in small.parameters():
        parameter.grad = None
    return small


def accumulate_gradients(assignment: Assignment) -> None:
    """Gradients of the loss against the model's own answers: labels are not read."""
    model = assignment.model
    for x in assignment.images[:_IMAGES].split(64):
        answers = model(x)
        F.cross_entropy(answers, answers.detach().argmax(1), reduction="sum").backward()


def answers_with(module: nn.Module, n_classes: int) -> bool:
    """Whether the module gives the scores of the classes, whose number stays."""
    return n_classes in (getattr(module, "out_features", None), getattr(module, "out_channels", None))


if __name__ == "__main__":
    main(compress)

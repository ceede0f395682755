"""Which images of a set are used: splits, classes, random choices and shares of a mixture."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tensigma.errors import InputError
from tensigma.zoo.options import DataOptions
from tensigma.zoo.sources import Source
from tensigma.zoo.spec import Spec, unknown


def permutation(n: int, seed: int) -> list[int]:
    """A random order of ``n`` items that depends on the seed alone."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()


def choose(spec: Spec, source: Source, options: DataOptions) -> Tensor:
    """Indices of the images to use, in order."""
    order = permutation(len(source), options.seed)
    if options.holdout is not None and options.split is None:
        raise InputError(f"{spec}: holdout={options.holdout:g} needs split=train or split=val")
    if options.split is not None:
        if options.split == "test":
            raise InputError(f"{spec}: this set has no split=test; give split=train or split=val with holdout=")
        if options.holdout is None:
            raise InputError(f"{spec}: split={options.split} needs holdout=SHARE, such as holdout=0.1")
        n_held = max(1, round(options.holdout * len(order)))
        order = order[:n_held] if options.split == "val" else order[n_held:]
    labels = source.labels
    if (options.classes is not None or options.per_class is not None) and labels is None:
        raise InputError(f"{spec}: classes and per_class need labels, which this set does not have")
    if options.classes is not None:
        assert labels is not None
        class_indices = {index for name in options.classes for index in _class_indices(spec, name, source.classes)}
        order = [i for i in order if int(labels[i]) in class_indices]
    if options.per_class is not None:
        assert labels is not None
        order = _first_of_each(order, labels, options.per_class)
    if options.samples is not None:
        if options.samples > len(order):
            raise InputError(f"{spec}: samples={options.samples} is too many; there are {len(order)} to choose from")
        order = order[: options.samples]
    if not order:
        raise InputError(f"{spec}: no image is left after this selection; take more classes or a larger share")
    return torch.tensor(order if options.shuffle else sorted(order))


def _class_indices(spec: Spec, name: str, classes: tuple[str, ...]) -> range:
    """One class by name or number, or a range of numbers such as 151-268, the last one included."""
    if name in classes:
        index = classes.index(name)
        return range(index, index + 1)
    first, dash, last = name.partition("-")
    last = last if dash else first
    if first.isdigit() and last.isdigit() and int(first) <= int(last) < len(classes):
        return range(int(first), int(last) + 1)
    raise unknown(f"{spec}: the class", name, classes)


def _first_of_each(order: list[int], labels: Tensor, n: int) -> list[int]:
    seen: dict[int, int] = {}
    kept = []
    for i in order:
        label = int(labels[i])
        seen[label] = seen.get(label, 0) + 1
        if seen[label] <= n:
            kept.append(i)
    return kept


def share(chosen: Sequence[Tensor], options: Sequence[DataOptions]) -> list[Tensor]:
    """Images of every set in proportion to the weights, as many as the sets can give."""
    if all(option.weight is None for option in options):
        return list(chosen)
    weights = [option.weight or 1.0 for option in options]
    scale = min(len(indices) / weight for indices, weight in zip(chosen, weights, strict=True))
    shares = []
    for indices, weight, option in zip(chosen, weights, options, strict=True):
        n = max(1, math.floor(scale * weight + 1e-9))
        # Spread over the set even if its stored order is kept.
        shares.append(indices[sorted(permutation(len(indices), option.seed)[:n])])
    return shares

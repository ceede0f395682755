"""TensorLy: classical Tucker and CP of the weights. Every layer keeps the same share of its parameters.

Tucker-2 is ``partial_tucker`` over the two channel modes, CP is ``parafac``; pointwise and Linear layers take the
truncated SVD that both become there. The factors become plain convolutions.
"""

from __future__ import annotations

import tensorly as tl
import torch
from tensorly.decomposition import parafac, partial_tucker
from tensorly.tenalg import svd_interface
from torch import Tensor, nn

from peers.factorised import conv, layers_of, linear, replace_
from peers.search import n_params, nearest_above
from peers.worker import Assignment, main

_ITERATIONS, _TOLERANCE = 50, 1e-5


def compress(assignment: Assignment) -> nn.Module:
    tl.set_backend("pytorch")
    model, method = assignment.model, assignment.job.method
    layers = layers_of(model)
    fixed = n_params(model) - sum(layer.weight.numel() for layer in layers.values())

    def count(share_removed: float) -> int:
        return fixed + sum(cost_at(layer, method, 1 - share_removed) for layer in layers.values())

    removed = nearest_above(count, n_params(model) / assignment.job.rate, low=0.0, high=0.999, steps=20)
    assignment.notes["share kept in each layer"] = 1 - removed
    for name, layer in layers.items():
        ranks = ranks_at(layer, method, 1 - removed)
        if cost(layer, method, ranks) < layer.weight.numel():
            with torch.no_grad():
                replace_(model, name, factorised(layer, method, ranks, assignment.job.seed))
    return model


def is_matrix(layer: nn.Conv2d | nn.Linear) -> bool:
    return layer.weight[0, 0].numel() == 1


def cost(layer: nn.Conv2d | nn.Linear, method: str, ranks: tuple[int, ...]) -> int:
    """Weights of the factors."""
    t, s = layer.weight.shape[:2]
    taps = tuple(layer.weight.shape[2:])
    if is_matrix(layer):
        return ranks[0] * (t + s)
    if method == "cp":
        return ranks[0] * (t + s + sum(taps))
    return t * ranks[0] + ranks[0] * ranks[1] * taps[0] * taps[1] + s * ranks[1]


def ranks_at(layer: nn.Conv2d | nn.Linear, method: str, share: float) -> tuple[int, ...]:
    """The largest ranks, in Tucker-2 in proportion to the channels, that keep at most ``share`` of the weights."""
    t, s = layer.weight.shape[:2]
    limit = share * layer.weight.numel()
    if is_matrix(layer) or method == "cp":
        return (max(1, int(limit / cost(layer, method, (1,)))),)
    best = (1, 1)
    for rank in range(1, max(t, s) + 1):
        ranks = (max(1, round(rank * t / max(t, s))), max(1, round(rank * s / max(t, s))))
        if cost(layer, method, ranks) > limit:
            break
        best = ranks
    return best


def cost_at(layer: nn.Conv2d | nn.Linear, method: str, share: float) -> int:
    return min(layer.weight.numel(), cost(layer, method, ranks_at(layer, method, share)))


def factorised(layer: nn.Conv2d | nn.Linear, method: str, ranks: tuple[int, ...], seed: int) -> nn.Sequential:
    weight = layer.weight.detach()
    if is_matrix(layer):
        left, values, right = svd_interface(weight.flatten(1), n_eigenvecs=ranks[0])
        outer = left * values
        if isinstance(layer, nn.Linear):
            return nn.Sequential(linear(right), linear(outer, layer.bias))
        return nn.Sequential(
            conv(right[..., None, None], layer, axes="hw"), conv(outer[..., None, None], layer, bias=layer.bias)
        )
    assert isinstance(layer, nn.Conv2d)
    return tucker(weight, layer, ranks) if method == "tucker" else cp(weight, layer, ranks[0], seed)


def tucker(weight: Tensor, layer: nn.Conv2d, ranks: tuple[int, ...]) -> nn.Sequential:
    (core, (out, into)), _ = partial_tucker(
        weight, rank=ranks, modes=[0, 1], n_iter_max=_ITERATIONS, tol=_TOLERANCE, init="svd"
    )
    return nn.Sequential(
        conv(into.T[..., None, None], layer),
        conv(core, layer, axes="hw"),
        conv(out[..., None, None], layer, bias=layer.bias),
    )


def cp(weight: Tensor, layer: nn.Conv2d, rank: int, seed: int) -> nn.Sequential:
    # An SVD gives no more starting vectors than a mode has; the others are random.
    scale, (out, into, rows, columns) = parafac(
        weight, rank=rank, n_iter_max=_ITERATIONS, tol=_TOLERANCE, init="random", random_state=seed
    )
    return nn.Sequential(
        conv(into.T[..., None, None], layer),
        conv(rows.T[:, None, :, None], layer, axes="h", groups=rank),
        conv(columns.T[:, None, None, :], layer, axes="w", groups=rank),
        conv((out * scale)[..., None, None], layer, bias=layer.bias),
    )


if __name__ == "__main__":
    main(compress)

"""fasterai: convolutions with taps by its ``Conv_Decomposer``, Linear layers by its ``FC_Decomposer``.

Its activation-aware SVD takes Linear layers alone; with it, convolutions take fasterai's SVD of the weights. The share
of ranks that is removed is the same in all layers and is searched until the rate is met.
"""

from __future__ import annotations

from fasterai.misc.conv_decomposer import Conv_Decomposer
from fasterai.misc.fc_decomposer import FC_Decomposer
from torch import nn

from peers.factorised import layers_of
from peers.search import n_params, nearest_above
from peers.worker import Assignment, main


def compress(assignment: Assignment) -> nn.Module:
    model = assignment.model
    aware = assignment.job.method == "asvd"
    layers = list(layers_of(model))
    batches = list(assignment.batches()) if aware else None

    def decomposed(removed: float, iterations: int = 1) -> nn.Module:
        small = Conv_Decomposer().decompose(
            model, removed, method="svd" if aware else "tucker", layers=layers, n_iter=iterations
        )
        return FC_Decomposer().decompose(
            small, removed, data=batches if iterations > 1 else None, n_batches=len(batches or ()), layers=layers
        )

    wanted = n_params(model) / assignment.job.rate
    removed = nearest_above(lambda share: n_params(decomposed(share)), wanted, low=0.0, high=0.99, steps=10)
    assignment.notes["percent_removed"] = removed
    return decomposed(removed, iterations=10)


if __name__ == "__main__":
    main(compress)

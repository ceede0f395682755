"""Rules that give every layer its ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tensigma.errors import InputError, RankError
from tensigma.layers import matches, select
from tensigma.linalg import RankTuple
from tensigma.solving import Candidate, energy_views


@dataclass(frozen=True)
class RankRule(ABC):
    """Ranks for a layer. The groups of a grouped layer share the ranks of the group that needs most."""

    #: Whether the rule reads energies under the norm, so that errors may be known before solving.
    reads_energy = False

    @abstractmethod
    def ranks(self, layer: Candidate) -> RankTuple | None:
        """The ranks of one layer, or None if the rule gives it none."""

    def check_names(self, names: Iterable[str]) -> None:  # noqa: B027  most rules name no layer
        """Refuse names that no layer has."""


@dataclass(frozen=True)
class VBMF(RankRule):
    """The paper's rule, from the weights alone: VBMF's own rank at ``alpha=1``, the full rank at 0, linear between.

    Results are truncated to whole numbers and are at least 1; ``alpha`` may exceed 1.

    >>> VBMF(0.5)
    VBMF(alpha=0.5)
    """

    alpha: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or not self.alpha >= 0:
            raise InputError(f"alpha is 0 or more (0 keeps every rank, 1 is VBMF's own), got {self.alpha!r}")

    def ranks(self, layer: Candidate) -> RankTuple:
        ranks = [layer.method.vbmf_ranks(kernel, self.alpha) for kernel in layer.kernels]
        return tuple(map(max, zip(*ranks, strict=True)))


@dataclass(frozen=True)
class SigmaVBMF(VBMF):
    """The same rule on K Σ^½ instead of the kernel K, with Σ that of the plan's norm.

    The symmetric root keeps the order of the features, so K Σ^½ folds back into a kernel and is unfolded mode by mode
    as the format asks. Under ``norm="frobenius"`` it is :class:`VBMF` itself.

    >>> SigmaVBMF(0.5)
    SigmaVBMF(alpha=0.5)
    """

    def ranks(self, layer: Candidate) -> RankTuple:
        views = energy_views(layer.kernels, layer.norm.targets(layer.geometry, layer.stats))
        ranks = [
            layer.method.vbmf_ranks(metric.whiten(kernel.flatten(1)).view(kernel.shape), self.alpha)
            for kernel, metric in views
        ]
        return tuple(map(max, zip(*ranks, strict=True)))


@dataclass(frozen=True)
class Energy(RankRule):
    """The smallest ranks that keep ``share`` of the functional energy under the plan's norm.

    SVD keeps that share exactly. Tucker-2 keeps it along the outputs and along the inputs, so it may lose up to twice
    the rest. CP takes the rank that costs as many parameters as that Tucker-2.

    >>> Energy(0.99)
    Energy(share=0.99)
    """

    share: float
    reads_energy = True

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise InputError(f"the share of energy to keep lies in (0, 1], got {self.share!r}")

    def ranks(self, layer: Candidate) -> RankTuple:
        return layer.energy_ranks(1 - self.share)


@dataclass(frozen=True)
class Ranks(RankRule):
    """Ranks by layer name or pattern; layers without a match stay dense.

    If several match, the last one decides, so that exceptions follow the rule. One number stands for both
    ranks of Tucker-2, given as (out, in). Ranks beyond what a layer allows become the largest it allows.

    >>> Ranks({"layer1.*": 8, "layer2.0.conv1": (16, 8)}).by_name["layer1.*"]
    8
    """

    by_name: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.by_name, Mapping) or not self.by_name:
            raise InputError(f"Ranks takes a dict of layer names or patterns, such as {{'*': 8}}, got {self.by_name!r}")
        for pattern, ranks in self.by_name.items():
            check_ranks_value(ranks, pattern)

    def ranks(self, layer: Candidate) -> RankTuple | None:
        matching = [ranks for pattern, ranks in self.by_name.items() if matches(layer.name, pattern)]
        if not matching:
            return None
        try:
            return layer.method.cap_ranks(matching[-1], layer.geometry.kernel_shape)
        except RankError as error:
            raise error.prefixed(f"{layer.name}: ") from None

    def check_names(self, names: Iterable[str]) -> None:
        select(list(self.by_name), names, what="ranks")


def check_ranks_value(ranks: object, name: str) -> None:
    """Refuse anything but whole numbers of at least 1, or a sequence of them."""
    numbers = list(ranks) if isinstance(ranks, tuple | list) else [ranks]
    for rank in numbers or [None]:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise RankError(f"{name}: a rank is a whole number of at least 1, or a pair of them, got {ranks!r}")

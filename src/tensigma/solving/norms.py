"""The norms under which a kernel is approximated: what each needs from calibration and what solvers then minimise.

| name | minimised |
|---|---|
| ``centred`` | the variance of the output error; the bias takes up its mean |
| ``sigma`` | the mean square of the output error, as in the paper |
| ``frobenius`` | the squared error of the weights |
| ``fisher`` | the same, each entry weighed by its Fisher information (FW-LRA) |
| ``activation`` | the same, each output channel weighed by its mean absolute output (AG-LRA) |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from tensigma.calibration import LayerStats
from tensigma.errors import InputError
from tensigma.layers import Geometry, to_kernels
from tensigma.linalg import Importance, Metric
from tensigma.solving.metrics import centred_metrics, gram_metrics, identity_metrics

#: What a solver takes besides the kernel.
Target = Metric | Importance


@dataclass(frozen=True)
class Norm(ABC):
    """One row of the table above."""

    name: ClassVar[str]
    needs_stats: ClassVar[bool] = True
    #: Whether the bias moves, so that a layer without one gains one.
    moves_bias: ClassVar[bool] = False
    #: Whether single entries are weighed, which only Tucker-2 supports.
    weighs_entries: ClassVar[bool] = False
    #: What calibration must gather besides moments.
    fisher: ClassVar[Literal["model"] | None] = None

    @abstractmethod
    def targets(self, geometry: Geometry, stats: LayerStats | None) -> tuple[Target, ...]:
        """What to minimise, one item per group."""

    def why_not(self, stats: LayerStats | None) -> str | None:
        """Why these statistics are not enough; None if they are."""
        return None


@dataclass(frozen=True)
class Centred(Norm):
    name: ClassVar[str] = "centred"
    moves_bias: ClassVar[bool] = True

    def targets(self, geometry: Geometry, stats: LayerStats | None) -> tuple[Target, ...]:
        return centred_metrics(geometry, _needed(stats, self))


@dataclass(frozen=True)
class Sigma(Norm):
    name: ClassVar[str] = "sigma"

    def targets(self, geometry: Geometry, stats: LayerStats | None) -> tuple[Target, ...]:
        return gram_metrics(geometry, _needed(stats, self))


@dataclass(frozen=True)
class Frobenius(Norm):
    name: ClassVar[str] = "frobenius"
    needs_stats: ClassVar[bool] = False

    def targets(self, geometry: Geometry, stats: LayerStats | None) -> tuple[Target, ...]:
        return identity_metrics(geometry)


@dataclass(frozen=True)
class Fisher(Norm):
    name: ClassVar[str] = "fisher"
    weighs_entries: ClassVar[bool] = True
    fisher: ClassVar[Literal["model"] | None] = "model"

    def why_not(self, stats: LayerStats | None) -> str | None:
        if stats is not None and stats.fisher is None:
            return "the statistics hold no Fisher information; calibrate with {fisher}"
        return None

    def targets(self, geometry: Geometry, stats: LayerStats | None) -> tuple[Target, ...]:
        fisher = _needed(stats, self).fisher
        if fisher is None:
            raise InputError(f"{{norm}}: {self.why_not(stats)}", parameters=("norm='fisher'", "fisher='model'"))
        return tuple(map(Importance, to_kernels(fisher.sqrt(), geometry)))


@dataclass(frozen=True)
class Activation(Norm):
    name: ClassVar[str] = "activation"
    weighs_entries: ClassVar[bool] = True

    def why_not(self, stats: LayerStats | None) -> str | None:
        if stats is not None and stats.output_abs_mean is None:
            return "the statistics hold no mean absolute outputs; calibrate again"
        return None

    def targets(self, geometry: Geometry, stats: LayerStats | None) -> tuple[Target, ...]:
        sizes = _needed(stats, self).output_abs_mean
        if sizes is None:
            raise InputError(f"{{norm}}: {self.why_not(stats)}", parameters=("norm='activation'",))
        return tuple(map(Importance, sizes.reshape(geometry.groups, -1)))


def _needed(stats: LayerStats | None, norm: Norm) -> LayerStats:
    if stats is None:
        raise InputError(
            "{norm} needs the statistics of the layer; only the norm 'frobenius' needs none",
            parameters=(f"norm={norm.name!r}",),
        )
    return stats


NORMS: dict[str, Norm] = {norm.name: norm for norm in (Centred(), Sigma(), Frobenius(), Fisher(), Activation())}


def norm_of(name: str | Norm) -> Norm:
    """The norm of this name.

    >>> norm_of("sigma").moves_bias
    False
    """
    if isinstance(name, Norm):
        return name
    if name not in NORMS:
        raise InputError(f"norm {name!r} is unknown; choose one of {', '.join(map(repr, NORMS))}")
    return NORMS[name]


def energy_views(kernels: Sequence[Tensor], targets: Sequence[Target]) -> list[tuple[Tensor, Metric]]:
    """Kernels and metrics under which plain energy is the energy of the norm, one pair per group."""
    views = []
    for kernel, target in zip(kernels, targets, strict=True):
        if isinstance(target, Importance):
            views.append((target.applied(kernel), Metric.identity(kernel[0].numel())))
        else:
            views.append((kernel, target))
    return views

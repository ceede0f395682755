"""One layer that may be compressed, with all that is needed to choose its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from tensigma.calibration import LayerStats
from tensigma.layers import Cost, Format, Geometry, cost
from tensigma.linalg import RankTuple, Spectra
from tensigma.solving.methods import Method
from tensigma.solving.norms import Norm, energy_views


@dataclass(frozen=True, eq=False, kw_only=True)
class Candidate:
    """A layer, how it will be treated, and what is known about it."""

    name: str
    geometry: Geometry
    kernels: tuple[Tensor, ...] = field(repr=False)
    method: Method
    norm: Norm
    stats: LayerStats | None = field(repr=False)
    #: Spatial size of one input; None if unknown.
    input_size: tuple[int, ...] | None = None
    #: How often a sample passes through the layer at that size.
    calls: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    #: The methods among which a budget may choose.
    choices: tuple[Method, ...] = ()
    #: The fewest bits that a budget may give its weights.
    least_bits: int = 2

    @cached_property
    def spectra(self) -> Spectra:
        """Energies by direction under the norm, computed on first use."""
        targets = self.norm.targets(self.geometry, self.stats)
        return Spectra.of(energy_views(self.kernels, targets), inputs=self.method.reads_inputs)

    def energy_ranks(self, tail: float) -> RankTuple:
        """The smallest ranks that lose at most the share ``tail`` of the energy in each direction they cut."""
        return self.method.energy_ranks(self.spectra, tail, self.geometry.kernel_shape)

    def cost(self, ranks: RankTuple | None) -> Cost:
        """What the layer costs with these ranks (None: dense); MACs are 0 if its input size is unknown."""
        return self.cost_in(None if ranks is None else self.method.format(ranks))

    def cost_in(self, format: Format | None, bits: int | None = None) -> Cost:
        """The same for a format of any method, with weights of ``bits`` bits (None: float32)."""
        return layer_cost(self.geometry, format, self.input_size, self.norm, self.calls, bits)


def calls_of(geometry: Geometry, stats: LayerStats, input_size: tuple[int, ...]) -> float:
    """How often a sample passes through a layer: more than once where the model reuses it.

    A pass at another size than ``input_size`` counts by its positions, so that multiply-adds are those of all passes.

    >>> import torch
    >>> from torch import nn
    >>> twice = LayerStats.from_rows(torch.ones(2 * 3 * 16, 9), samples=3)
    >>> calls_of(Geometry.of(nn.Conv2d(1, 1, 3, padding=1)), twice, (4, 4))
    2.0
    """
    once = geometry.macs_from(input_size)
    # Statistics built from plain rows do not know the number of samples.
    if stats.count == stats.samples or not once:
        return 1.0
    return stats.count * geometry.n_weights / (stats.samples * once)


def layer_cost(
    geometry: Geometry,
    format: Format | None,
    input_size: tuple[int, ...] | None,
    norm: Norm,
    calls: float = 1.0,
    bits: int | None = None,
) -> Cost:
    """The cost of a layer in ``format`` (None: dense), with the bias that it gains under some norms."""
    bias = geometry.bias or (format is not None and norm.moves_bias)
    if input_size is not None:
        once = cost(format, geometry, input_size, bias=bias, bits=bits)
        return replace(once, macs=round(calls * once.macs))
    # Parameters do not depend on the size, so the smallest input that the kernel fits into will do.
    size = tuple(d * (k - 1) + 1 for d, k in zip(geometry.dilation, geometry.kernel_size, strict=True))
    return replace(cost(format, geometry, size, bias=bias, bits=bits), macs=0)

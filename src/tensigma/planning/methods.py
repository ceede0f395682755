"""Decompositions by name: the format each gives, its solver, and how its ranks are read from a kernel.

| name | layers that stand in | solver |
|---|---|---|
| ``tucker2`` | pointwise, small core, pointwise | :class:`~tensigma.linalg.Tucker2` |
| ``cp`` | pointwise, depthwise per spatial axis, pointwise | :class:`~tensigma.linalg.CP` |
| ``cp-joint`` | pointwise, depthwise over all axes at once, pointwise | :class:`~tensigma.linalg.CP` |
| ``deflation`` | as ``cp`` | :class:`~tensigma.linalg.Deflation`, one term at a time |
| ``svd`` | full-size into few channels, pointwise | :class:`~tensigma.linalg.SVD` |
| ``auto`` | under a budget the best of these for each layer; with ranks by a rule, Tucker-2 | as above |

Pointwise convolutions and Linear layers take SVD whatever the method: the other formats become that there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from tensigma.errors import InputError, RankError
from tensigma.layers import CPFormat, Format, Geometry, SVDFormat, Tucker2Format
from tensigma.linalg import (
    CP,
    SVD,
    Deflation,
    Fit,
    Metric,
    Tucker2,
    WeightedTucker2,
    cp_rank,
    max_rank,
    svd_errors,
    svd_rank,
    tucker2_errors,
    tucker2_ranks,
)
from tensigma.planning.norms import Importance, Norm, Target
from tensigma.planning.spectra import Spectra

RankTuple = tuple[int, ...]

# How many ranks a curve has. More change no choice by more than its rounding.
_SVD_RANKS = 64
_TUCKER2_RANKS = 24
_CP_RANKS = 48
# Ranks at which CP is solved for its curve, as shares of the largest, and for how many sweeps. On large layers fewer of
# both, and the fewer the higher the rank, where a sweep takes longest: that keeps the curve cheaper than the solution.
_CURVE = tuple((share, 30) for share in (0.05, 0.1, 0.2, 0.35, 0.55, 0.75, 1.0))
_LARGE_CURVE = ((0.05, 10), (0.2, 10), (0.55, 6), (1.0, 3))
_SMALL = 1024
# CP with joint taps is richer. Where it costs hardly more, CP with taps apart is not worth a curve of its own.
_HARDLY_MORE = 1.02


@dataclass(frozen=True)
class Method(ABC):
    """One decomposition: everything that planning and solving need to know about it."""

    name: ClassVar[str]
    format_type: ClassVar[type[Format]]
    #: What the ranks are called, in order.
    rank_names: ClassVar[tuple[str, ...]] = ("rank",)
    #: Options that its solver understands.
    options: ClassVar[tuple[str, ...]] = ()
    #: Whether ranks are read from the energies of input directions too.
    reads_inputs: ClassVar[bool] = True
    #: Whether it can follow a weight for every entry of the kernel.
    follows_entries: ClassVar[bool] = False

    @abstractmethod
    def format(self, ranks: RankTuple) -> Format:
        """The format with these ranks."""

    @abstractmethod
    def max_ranks(self, shape: Sequence[int]) -> RankTuple:
        """The ranks at which a kernel of this shape is kept as it is."""

    @abstractmethod
    def vbmf_ranks(self, kernel: Tensor, alpha: float) -> RankTuple:
        """The paper's ranks, from the weights alone."""

    @abstractmethod
    def energy_ranks(self, spectra: Spectra, tail: float, shape: Sequence[int]) -> RankTuple:
        """The smallest ranks that lose at most the share ``tail`` of the energy in each direction they cut."""

    @abstractmethod
    def errors(self, kernel: Tensor, metric: Metric) -> list[tuple[RankTuple, float]]:
        """Expected squared relative errors over a grid of ranks that depends on the kernel's shape alone.

        They cost far less than a solution; what a solver then reaches is a few per cent lower.
        """

    @abstractmethod
    def fit(self, kernel: Tensor, ranks: RankTuple, target: Target, options: Mapping[str, Any]) -> Fit[Any]:
        """Solve for one kernel."""

    def error(self, spectra: Spectra, ranks: RankTuple) -> float | None:
        """The relative error that ranks will give, where the spectra tell."""
        return None

    def why_not(self, geometry: Geometry, norm: Norm) -> str | None:
        """Why a layer cannot be treated so, or None where it can."""
        reason = self.format_type.why_not(geometry)
        if reason is None and norm.weighs_entries and not self.follows_entries:
            return f"norm={norm.name!r} weighs single entries of the kernel, which only Tucker-2 can follow"
        return reason

    def check_ranks(self, ranks: int | Sequence[int], shape: Sequence[int]) -> RankTuple:
        """Ranks as a tuple, one number standing for all; refused where the kernel does not allow them."""
        given = self.spread(ranks)
        for name, rank, largest in zip(self.rank_names, given, self.max_ranks(shape), strict=True):
            if not 1 <= rank <= largest:
                raise RankError(f"{name} lies between 1 and {largest} for a kernel {tuple(shape)}, got {rank}")
        return given

    def cap_ranks(self, ranks: int | Sequence[int], shape: Sequence[int]) -> RankTuple:
        """The same, but ranks beyond what the kernel allows become the largest it allows."""
        return tuple(
            min(rank, largest) for rank, largest in zip(self.spread(ranks), self.max_ranks(shape), strict=True)
        )

    def spread(self, ranks: int | Sequence[int]) -> RankTuple:
        """One number for every rank of the format, all whole and at least 1."""
        given = (ranks,) * len(self.rank_names) if isinstance(ranks, int) else tuple(ranks)
        if len(given) != len(self.rank_names):
            wanted = ", ".join(self.rank_names)
            raise RankError(f"{self.name} takes {len(self.rank_names)} rank(s) ({wanted}), got {ranks!r}")
        for rank in given:
            if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
                raise RankError(f"{self.name}: a rank is a whole number of at least 1, got {rank!r}")
        return given

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Refuse options that the solver does not know."""
        unknown = [key for key in options if key not in self.options]
        if unknown:
            known = ", ".join(self.options) or "none"
            raise InputError(f"method={self.name!r} has no option {unknown[0]!r}; it takes {known}")


@dataclass(frozen=True)
class SVDMethod(Method):
    name: ClassVar[str] = "svd"
    format_type: ClassVar[type[Format]] = SVDFormat
    reads_inputs: ClassVar[bool] = False

    def format(self, ranks: RankTuple) -> Format:
        return SVDFormat(*ranks)

    def max_ranks(self, shape: Sequence[int]) -> RankTuple:
        return (min(shape[0], _width(shape)),)

    def vbmf_ranks(self, kernel: Tensor, alpha: float) -> RankTuple:
        return (svd_rank(kernel, alpha),)

    def energy_ranks(self, spectra: Spectra, tail: float, shape: Sequence[int]) -> RankTuple:
        return self.cap_ranks(spectra.rank_out(tail), shape)

    def error(self, spectra: Spectra, ranks: RankTuple) -> float | None:
        return spectra.svd_error(*ranks)

    def errors(self, kernel: Tensor, metric: Metric) -> list[tuple[RankTuple, float]]:
        errors = svd_errors(kernel, metric).tolist()
        return [((rank,), errors[rank - 1]) for rank in _grid(len(errors), _SVD_RANKS)]

    def fit(self, kernel: Tensor, ranks: RankTuple, target: Target, options: Mapping[str, Any]) -> Fit[Any]:
        return SVD(*ranks).fit(kernel, _metric(target, self))


@dataclass(frozen=True)
class Tucker2Method(Method):
    name: ClassVar[str] = "tucker2"
    format_type: ClassVar[type[Format]] = Tucker2Format
    rank_names: ClassVar[tuple[str, ...]] = ("rank_out", "rank_in")
    options: ClassVar[tuple[str, ...]] = ("solver", "init", "max_sweeps", "tol", "seed")
    follows_entries: ClassVar[bool] = True

    def format(self, ranks: RankTuple) -> Format:
        return Tucker2Format(*ranks)

    def max_ranks(self, shape: Sequence[int]) -> RankTuple:
        return shape[0], shape[1]

    def vbmf_ranks(self, kernel: Tensor, alpha: float) -> RankTuple:
        return tucker2_ranks(kernel, alpha)

    def energy_ranks(self, spectra: Spectra, tail: float, shape: Sequence[int]) -> RankTuple:
        return spectra.rank_out(tail), spectra.rank_in(tail)

    def errors(self, kernel: Tensor, metric: Metric) -> list[tuple[RankTuple, float]]:
        ranks_out, ranks_in = (_grid(n, _TUCKER2_RANKS) for n in kernel.shape[:2])
        errors = tucker2_errors(kernel, metric, ranks_in).tolist()
        return [((out, into), row[out - 1]) for into, row in zip(ranks_in, errors, strict=True) for out in ranks_out]

    def fit(self, kernel: Tensor, ranks: RankTuple, target: Target, options: Mapping[str, Any]) -> Fit[Any]:
        if isinstance(target, Importance):
            # The start and the other choices of the solver under a metric mean nothing here.
            shared = {key: value for key, value in options.items() if key in ("max_sweeps", "tol")}
            return WeightedTucker2(*ranks, **shared).fit(kernel, target.weights.to(kernel.device))
        return Tucker2(*ranks, **options).fit(kernel, target)


@dataclass(frozen=True)
class CPMethod(Method):
    """CP has no spectrum of its own: at a given energy it takes the rank that costs as much as Tucker-2 would."""

    name: ClassVar[str] = "cp"
    format_type: ClassVar[type[Format]] = CPFormat
    options: ClassVar[tuple[str, ...]] = ("solver", "init", "max_sweeps", "tol", "seed")
    joint: ClassVar[bool] = False

    def format(self, ranks: RankTuple) -> Format:
        (rank,) = ranks
        return CPFormat(rank, joint=self.joint)

    def max_ranks(self, shape: Sequence[int]) -> RankTuple:
        return (max_rank(tuple(self._modes(shape))),)

    def vbmf_ranks(self, kernel: Tensor, alpha: float) -> RankTuple:
        return (cp_rank(kernel, alpha, joint=self.joint),)

    def energy_ranks(self, spectra: Spectra, tail: float, shape: Sequence[int]) -> RankTuple:
        rank_out, rank_in = spectra.rank_out(tail), spectra.rank_in(tail)
        t, s = shape[:2]
        tucker2 = t * rank_out + rank_out * rank_in * (_width(shape) // s) + s * rank_in
        return self.cap_ranks(max(1, tucker2 // sum(self._modes(shape))), shape)

    def errors(self, kernel: Tensor, metric: Metric) -> list[tuple[RankTuple, float]]:
        """CP has no closed form: a few ranks are solved roughly, and those between follow a power law."""
        largest = self._break_even(kernel.shape)
        points = _CURVE if kernel[0].numel() <= _SMALL else _LARGE_CURVE
        sweeps = {max(1, round(share * largest)): count for share, count in points}
        solver = CP(1, joint=self.joint, tol=1e-3)
        solved = [
            (rank, replace(solver, rank=rank, max_sweeps=count).fit(kernel, metric).error ** 2)
            for rank, count in sweeps.items()
        ]
        return [((rank,), _power_law(rank, solved)) for rank in _grid(largest, _CP_RANKS)]

    def fit(self, kernel: Tensor, ranks: RankTuple, target: Target, options: Mapping[str, Any]) -> Fit[Any]:
        return CP(*ranks, joint=self.joint, **options).fit(kernel, _metric(target, self))

    def _break_even(self, shape: Sequence[int]) -> int:
        """The largest rank that is worth a look: beyond it the kernel itself is smaller."""
        return max(1, min(math.prod(shape) // sum(self._modes(shape)), *self.max_ranks(shape)))

    def _modes(self, shape: Sequence[int]) -> list[int]:
        t, s, *taps = shape
        return [t, s, _width(shape) // s] if self.joint else [t, s, *taps]


@dataclass(frozen=True)
class CPJointMethod(CPMethod):
    name: ClassVar[str] = "cp-joint"
    joint: ClassVar[bool] = True


@dataclass(frozen=True)
class DeflationMethod(CPMethod):
    name: ClassVar[str] = "deflation"
    options: ClassVar[tuple[str, ...]] = ("max_sweeps", "tol")

    def errors(self, kernel: Tensor, metric: Metric) -> list[tuple[RankTuple, float]]:
        """Greedy terms are the same for every rank, so one run gives them all."""
        largest = self._break_even(kernel.shape)
        errors = Deflation(largest).fit(kernel, metric).errors
        return [((rank,), errors[rank] ** 2) for rank in _grid(largest, _CP_RANKS)]

    def fit(self, kernel: Tensor, ranks: RankTuple, target: Target, options: Mapping[str, Any]) -> Fit[Any]:
        return Deflation(*ranks, **options).fit(kernel, _metric(target, self))


def _grid(largest: int, count: int) -> list[int]:
    """At most ``count`` ranks from 1 to ``largest``, denser where they are small.

    >>> _grid(5, 9), _grid(100, 6)
    ([1, 2, 3, 4, 5], [1, 3, 6, 16, 40, 100])
    """
    if largest <= count:
        return list(range(1, largest + 1))
    return sorted({round(largest ** (step / (count - 1))) for step in range(count)})


def _power_law(rank: int, solved: Sequence[tuple[int, float]]) -> float:
    """The error of a rank between those that were solved, on a straight line of logarithms.

    Below the smallest of them it rises geometrically to 1, which is the error of leaving the layer out.

    >>> _power_law(8, [(4, 0.25), (16, 0.01)]), _power_law(2, [(4, 0.25), (16, 0.01)])
    (0.05, 0.5)
    """
    floor = 1e-12
    smallest, largest_error = solved[0]
    if rank < smallest:
        return max(largest_error, floor) ** (rank / smallest)
    above = next((i for i, (known, _) in enumerate(solved) if known >= rank), len(solved) - 1)
    (low, start), (high, end) = solved[max(above - 1, 0)], solved[above]
    if low == high or rank <= low:
        return start if rank <= low else end
    weight = math.log(rank / low) / math.log(high / low)
    return max(start, floor) ** (1 - weight) * max(end, floor) ** weight


def _width(shape: Sequence[int]) -> int:
    return math.prod(shape[1:])


def _metric(target: Target, method: Method) -> Metric:
    if isinstance(target, Importance):
        raise InputError(f"method={method.name!r} cannot weigh single entries of a kernel; use method='tucker2'")
    return target


SVD_METHOD = SVDMethod()
METHODS: dict[str, Method] = {
    method.name: method for method in (Tucker2Method(), CPMethod(), CPJointMethod(), DeflationMethod(), SVD_METHOD)
}
#: With ranks given by a rule, "auto" is Tucker-2 wherever a kernel has taps; under a budget each layer takes the best.
AUTO = "auto"
_AUTO_CHOICES = ("tucker2", "cp", "cp-joint", "svd")


def method_of(name: str | Method, geometry: Geometry | None = None) -> Method:
    """The method of this name for a layer of this geometry, which has the last word where it is pointwise.

    >>> from torch import nn
    >>> method_of("auto", Geometry.of(nn.Conv2d(4, 4, 3))).name, method_of("cp", Geometry.of(nn.Linear(4, 4))).name
    ('tucker2', 'svd')
    """
    if not isinstance(name, Method):
        if name != AUTO and name not in METHODS:
            known = ", ".join(map(repr, (AUTO, *METHODS)))
            raise InputError(f"method {name!r} is unknown; choose one of {known}")
        name = METHODS["tucker2" if name == AUTO else name]
    return SVD_METHOD if geometry is not None and geometry.is_pointwise else name


def choices_of(name: str | Method, geometry: Geometry, norm: Norm) -> tuple[Method, ...]:
    """The methods among which a budget may choose for a layer of this geometry.

    >>> from torch import nn
    >>> from tensigma.planning.norms import norm_of
    >>> [method.name for method in choices_of("auto", Geometry.of(nn.Conv2d(4, 4, 3, groups=2)), norm_of("sigma"))]
    ['tucker2', 'svd']
    >>> [method.name for method in choices_of("auto", Geometry.of(nn.Conv2d(99, 99, 3)), norm_of("sigma"))]
    ['tucker2', 'cp-joint', 'svd']
    """
    if name != AUTO or geometry.is_pointwise:
        return (method_of(name, geometry),)
    apart, joint = (METHODS[each] for each in ("cp", "cp-joint"))
    assert isinstance(apart, CPMethod)
    assert isinstance(joint, CPMethod)
    widths = [sum(method._modes(geometry.kernel_shape)) for method in (apart, joint)]
    left_out = {"cp"} if widths[1] <= _HARDLY_MORE * widths[0] else set()
    return tuple(
        METHODS[each]
        for each in _AUTO_CHOICES
        if each not in left_out and METHODS[each].why_not(geometry, norm) is None
    )

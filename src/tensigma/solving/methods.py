"""Decompositions by name: a format, and the solver that fills it.

| name | layers that replace one | solver |
|---|---|---|
| ``tucker2`` | pointwise, small core, pointwise | :class:`~tensigma.linalg.Tucker2` |
| ``cp`` | pointwise, depthwise per spatial axis, pointwise | :class:`~tensigma.linalg.CP` |
| ``cp-joint`` | pointwise, depthwise over all axes at once, pointwise | :class:`~tensigma.linalg.CPJoint` |
| ``deflation`` | as ``cp`` | :class:`~tensigma.linalg.Deflation`, one term at a time |
| ``svd`` | full-size into few channels, pointwise | :class:`~tensigma.linalg.SVD` |
| ``spatial-svd`` | k×1 into few channels, 1×k | :class:`~tensigma.linalg.SpatialSVD` |
| ``tensor-train`` | pointwise, k×1, 1×k, pointwise | :class:`~tensigma.linalg.TensorTrain` |
| ``dense`` | the layer itself, where weights take few bits | :class:`~tensigma.linalg.Dense` |
| ``auto`` | under a budget the best for each layer; with ranks by a rule, Tucker-2 | as above |

Pointwise convolutions and Linear layers always take SVD, because the other formats reduce to it there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from tensigma.errors import InputError, RankError
from tensigma.layers import (
    FORMATS,
    CPFormat,
    DenseFormat,
    Format,
    Geometry,
    SpatialSVDFormat,
    SVDFormat,
    TensorTrainFormat,
    Tucker2Format,
    cost,
    register_format,
)
from tensigma.linalg import (
    CP,
    SVD,
    CPJoint,
    Deflation,
    Dense,
    Factors,
    Fit,
    Importance,
    Metric,
    RankTuple,
    Solver,
    SpatialSVD,
    Spectra,
    TensorTrain,
    Tucker2,
    WeightedTucker2,
    option_names,
    rank_names,
)
from tensigma.solving.norms import Norm, Target

#: With ranks given by a rule, "auto" is Tucker-2 wherever a kernel has taps; under a budget each layer takes the best.
AUTO = "auto"
_WIDEST_OF_SPATIAL = 1024
# CP with joint taps is richer. If it costs at most this factor more, CP with separate taps needs no curve of its own.
_HARDLY_MORE = 1.02


@dataclass(frozen=True, kw_only=True)
class Method:
    """One decomposition: its name, its format, and the solver that defines its ranks and options.

    >>> method = Method(name="mine", format_type=SVDFormat, solver=SVD)
    >>> method.rank_names, method.options, method.max_ranks((8, 4, 3, 3))
    (('rank',), (), (8,))
    """

    name: str
    format_type: type[Format]
    solver: type[Solver]
    #: The solver under a weight for every entry of the kernel; None if there is none for the format.
    weighted: type[Any] | None = None
    #: Whether ``method="auto"`` may choose it under a budget.
    in_auto: bool = True
    #: The widest layer, in input features, for which ``"auto"`` considers it; None for any.
    widest_in_auto: int | None = None

    @property
    def rank_names(self) -> tuple[str, ...]:
        """The names of the ranks, in order."""
        return rank_names(self.solver)

    @property
    def options(self) -> tuple[str, ...]:
        """Options that the solver takes."""
        return option_names(self.solver)

    @property
    def reads_inputs(self) -> bool:
        """Whether ranks also depend on the energies of input directions."""
        return self.solver.reads_inputs

    def format(self, ranks: RankTuple) -> Format:
        """The format with these ranks."""
        variant = {name: getattr(self.solver, name) for name in self.solver.variant}
        return self.format_type(*ranks, **variant)

    def max_ranks(self, shape: Sequence[int]) -> RankTuple:
        """The ranks at which a kernel of this shape is represented exactly."""
        return self.solver.max_ranks(tuple(shape))

    def vbmf_ranks(self, kernel: Tensor, alpha: float) -> RankTuple:
        """The paper's ranks, from the weights alone."""
        return self.solver.vbmf_ranks(kernel, alpha)

    def energy_ranks(self, spectra: Spectra, tail: float, shape: Sequence[int]) -> RankTuple:
        """The smallest ranks that lose at most the share ``tail`` of the energy in each direction they cut."""
        return self.solver.energy_ranks(spectra, tail, tuple(shape))

    def errors(self, kernel: Tensor, metric: Metric) -> list[tuple[RankTuple, float]]:
        """Expected squared relative errors over a grid of ranks that depends on the kernel's shape alone.

        They cost far less than a solution; what a solver then reaches is a few per cent lower.
        """
        return self.solver.errors(kernel, metric)

    def error(self, spectra: Spectra, ranks: RankTuple) -> float | None:
        """The expected relative error at these ranks; None if the spectra do not tell."""
        return self.solver.expected_error(spectra, ranks)

    def fit(
        self,
        kernel: Tensor,
        ranks: RankTuple,
        target: Target,
        options: Mapping[str, Any],
        start: Factors | None = None,
    ) -> Fit[Any]:
        """Solve for one kernel, from the factors ``start`` of a similar problem unless ``options`` hold an ``init``."""
        if not isinstance(target, Importance):
            if start is not None and "init" in self.options:
                options = {"init": start, **options}
            return self.solver(*ranks, **options).fit(kernel, target)
        if self.weighted is None:
            raise InputError(
                "{method} cannot weigh single entries of a kernel; use 'tucker2'", parameters=(f"method={self.name!r}",)
            )
        # The start and the other options of the solver under a metric do not apply here.
        shared = {key: value for key, value in options.items() if key in ("max_sweeps", "tol")}
        return self.weighted(*ranks, **shared).fit(kernel, target.weights.to(kernel.device))

    def why_not(self, geometry: Geometry, norm: Norm) -> str | None:
        """Why a layer cannot take this method; None if it can."""
        reason = self.format_type.why_not(geometry)
        if reason is None and norm.weighs_entries and self.weighted is None:
            return f"norm={norm.name!r} weighs single entries of the kernel, which only Tucker-2 supports"
        return reason

    def check_ranks(self, ranks: int | Sequence[int], shape: Sequence[int]) -> RankTuple:
        """Ranks as a tuple; one number stands for all. Ranks beyond what the kernel allows are refused."""
        spread = self.spread(ranks)
        for name, rank, largest in zip(self.rank_names, spread, self.solver.capped(spread, tuple(shape)), strict=True):
            if rank > largest:
                raise RankError(f"{name} lies between 1 and {largest} for a kernel {tuple(shape)}, got {rank}")
        return spread

    def cap_ranks(self, ranks: int | Sequence[int], shape: Sequence[int]) -> RankTuple:
        """The same, but ranks beyond what the kernel allows become the largest it allows."""
        return self.solver.capped(self.spread(ranks), tuple(shape))

    def spread(self, ranks: int | Sequence[int]) -> RankTuple:
        """One number for every rank of the format, all whole and at least 1."""
        spread = (ranks,) * len(self.rank_names) if isinstance(ranks, int) else tuple(ranks)
        if len(spread) != len(self.rank_names):
            names = ", ".join(self.rank_names)
            raise RankError(f"{self.name} takes {len(self.rank_names)} rank(s) ({names}), got {ranks!r}")
        for rank in spread:
            if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
                raise RankError(f"{self.name}: a rank is a whole number of at least 1, got {rank!r}")
        return spread

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Refuse options that the solver does not know."""
        unknown = [key for key in options if key not in self.options]
        if unknown:
            accepted = ", ".join(self.options) or "none"
            raise InputError(f"method={self.name!r} has no option {unknown[0]!r}; it takes {accepted}")


_METHODS: dict[str, Method] = {}
#: Every method by name, those of other packages included.
METHODS: Mapping[str, Method] = MappingProxyType(_METHODS)


def register(method: Method) -> Method:
    """Make a method available by name to plans, budgets, archives and the command line.

    Its format is registered too, unless it already is.
    """
    if method.name == AUTO or method.name in _METHODS:
        raise InputError(f"a method named {method.name!r} already exists; choose another name")
    if FORMATS.get(method.format_type.name) is not method.format_type:
        register_format(method.format_type)
    _METHODS[method.name] = method
    return method


@contextmanager
def registered(method: Method) -> Iterator[Method]:
    """:func:`register` for as long as the block lasts."""
    register(method)
    try:
        yield method
    finally:
        del _METHODS[method.name]


register(Method(name="tucker2", format_type=Tucker2Format, solver=Tucker2, weighted=WeightedTucker2))
CP_METHOD = register(Method(name="cp", format_type=CPFormat, solver=CP))
CP_JOINT_METHOD = register(Method(name="cp-joint", format_type=CPFormat, solver=CPJoint))
register(Method(name="deflation", format_type=CPFormat, solver=Deflation, in_auto=False))
SVD_METHOD = register(Method(name="svd", format_type=SVDFormat, solver=SVD))
# Their curves take most of the planning of a wide layer, and budgets chose them for none of those measured.
register(Method(name="spatial-svd", format_type=SpatialSVDFormat, solver=SpatialSVD, widest_in_auto=_WIDEST_OF_SPATIAL))
register(
    Method(name="tensor-train", format_type=TensorTrainFormat, solver=TensorTrain, widest_in_auto=_WIDEST_OF_SPATIAL)
)
# Without bits it changes nothing, so a budget adds it where bits are to be had.
DENSE_METHOD = register(Method(name="dense", format_type=DenseFormat, solver=Dense, in_auto=False))


def method_of(name: str | Method, geometry: Geometry | None = None) -> Method:
    """The method of this name for a layer of this geometry; a pointwise layer always takes SVD.

    >>> from torch import nn
    >>> method_of("auto", Geometry.of(nn.Conv2d(4, 4, 3))).name, method_of("cp", Geometry.of(nn.Linear(4, 4))).name
    ('tucker2', 'svd')
    """
    if not isinstance(name, Method):
        if name != AUTO and name not in METHODS:
            names = ", ".join(map(repr, (AUTO, *METHODS)))
            raise InputError(f"method {name!r} is unknown; choose one of {names}")
        name = METHODS["tucker2" if name == AUTO else name]
    return SVD_METHOD if geometry is not None and geometry.is_pointwise and name != DENSE_METHOD else name


def choices_of(name: str | Method, geometry: Geometry, norm: Norm, *, few_rows: bool = False) -> tuple[Method, ...]:
    """The methods among which a budget may choose for a layer of this geometry.

    With ``few_rows``, statistics hold the rows that a very wide layer has seen instead of Σ, and SVD alone does without
    Σ.

    >>> from torch import nn
    >>> from tensigma.solving.norms import norm_of
    >>> [method.name for method in choices_of("auto", Geometry.of(nn.Conv1d(4, 4, 3, groups=2)), norm_of("sigma"))]
    ['tucker2', 'svd']
    >>> [method.name for method in choices_of("auto", Geometry.of(nn.Conv2d(99, 99, 3)), norm_of("sigma"))]
    ['tucker2', 'cp-joint', 'svd', 'spatial-svd', 'tensor-train']
    """
    if name != AUTO or geometry.is_pointwise:
        return (method_of(name, geometry),)
    if few_rows:
        return (SVD_METHOD,)
    choices = [
        method
        for method in METHODS.values()
        if method.in_auto
        and geometry.patch_size <= (method.widest_in_auto or geometry.patch_size)
        and method.why_not(geometry, norm) is None
    ]
    if CP_METHOD in choices and CP_JOINT_METHOD in choices:
        separate, joint = (_params_of_one_term(method, geometry) for method in (CP_METHOD, CP_JOINT_METHOD))
        if joint <= _HARDLY_MORE * separate:
            choices.remove(CP_METHOD)
    return tuple(choices)


def _params_of_one_term(method: Method, geometry: Geometry) -> int:
    return cost(method.format((1,)), geometry, geometry.kernel_size, bias=False).params

"""The interface of all decompositions: what plans and budgets need to know about one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor

from tensigma.errors import InputError
from tensigma.linalg.factors import Fit
from tensigma.linalg.metric import Metric
from tensigma.linalg.spectra import Spectra

RankTuple = tuple[int, ...]


class Solver(Protocol):
    """A frozen dataclass: its positional fields are the ranks, its keyword-only fields are options.

    Class methods say which ranks a kernel allows and what they cost in accuracy; :meth:`fit` finds the factors. A
    solver may inherit from this class, which gives it the defaults below, or simply have the same members.

    >>> from tensigma.linalg import SVD
    >>> solver: type[Solver] = SVD
    >>> solver.max_ranks((8, 6, 3, 3)), rank_names(solver)
    ((8,), ('rank',))
    """

    #: Whether :meth:`energy_ranks` reads the energies of input directions.
    reads_inputs: ClassVar[bool] = True
    #: Keyword-only fields that select another decomposition instead of tuning this one.
    variant: ClassVar[tuple[str, ...]] = ()

    def fit(self, weight: Tensor, metric: Metric) -> Fit[Any]:
        """Factors of ``weight``, (t, s, *taps), that are close to it under ``metric``."""
        ...

    @classmethod
    def max_ranks(cls, shape: Sequence[int]) -> RankTuple:
        """The ranks at which a kernel of this shape is kept as it is."""
        ...

    @classmethod
    def capped(cls, ranks: RankTuple, shape: Sequence[int]) -> RankTuple:
        """The same ranks, those beyond what a kernel of this shape allows lowered to the largest it allows."""
        return tuple(map(min, ranks, cls.max_ranks(shape)))

    @classmethod
    def vbmf_ranks(cls, kernel: Tensor, alpha: float) -> RankTuple:
        """The paper's ranks, from the weights alone."""
        ...

    @classmethod
    def energy_ranks(cls, spectra: Spectra, tail: float, shape: Sequence[int]) -> RankTuple:
        """The smallest ranks that lose at most the share ``tail`` of the energy in each direction they cut."""
        ...

    @classmethod
    def errors(cls, kernel: Tensor, metric: Metric) -> list[tuple[RankTuple, float]]:
        """Expected squared relative errors over a grid of ranks that depends on the kernel's shape alone.

        They cost far less than a solution, which usually ends a few per cent lower.
        """
        ...

    @classmethod
    def expected_error(cls, spectra: Spectra, ranks: RankTuple) -> float | None:
        """The relative error at these ranks, or None if the spectra do not determine it."""
        return None


def rank_names(solver: type[Solver]) -> tuple[str, ...]:
    """The names of a solver's ranks, in order.

    >>> from tensigma.linalg import Tucker2
    >>> rank_names(Tucker2)
    ('rank_out', 'rank_in')
    """
    return tuple(field.name for field in dataclasses.fields(solver) if not field.kw_only)  # type: ignore[arg-type]


def option_names(solver: type[Solver]) -> tuple[str, ...]:
    """The names of a solver's options, in order, without those that select another decomposition.

    >>> from tensigma.linalg import CP
    >>> option_names(CP)
    ('solver', 'init', 'max_sweeps', 'tol', 'seed')
    """
    keywords = (field.name for field in dataclasses.fields(solver) if field.kw_only)  # type: ignore[arg-type]
    return tuple(name for name in keywords if name not in solver.variant)


def check_options(options: Any, *, solvers: tuple[str, ...], inits: tuple[str, ...], factors: type) -> None:
    """Raise :class:`InputError` for an unknown solver or start, or an invalid count or tolerance."""
    if options.solver not in solvers:
        raise InputError(f"solver {options.solver!r} is unknown; choose one of {', '.join(map(repr, solvers))}")
    if options.init not in inits if isinstance(options.init, str) else not isinstance(options.init, factors):
        accepted = ", ".join(map(repr, inits))
        raise InputError(f"init {options.init!r} is unknown; choose {accepted} or a {factors.__name__} to start from")
    if isinstance(options.max_sweeps, bool) or not isinstance(options.max_sweeps, int) or options.max_sweeps < 0:
        raise InputError(f"max_sweeps is a whole number, 0 or more, got {options.max_sweeps!r}")
    if not options.tol >= 0:
        raise InputError(f"tol is 0 or more, got {options.tol!r}")

"""What every solver returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from tensigma.linalg.factors import Factors

F = TypeVar("F", bound=Factors)


@dataclass(frozen=True, eq=False)
class Fit(Generic[F]):
    """Factors and how they were reached.

    ``errors[0]`` belongs to the starting point, ``errors[i]`` to the best state after sweep (or step) ``i``, and
    ``errors[-1]`` to ``factors``. They are relative errors under the metric of the fit and never rise.
    """

    factors: F
    errors: tuple[float, ...]
    converged: bool

    @property
    def error(self) -> float:
        """Relative error of ``factors``."""
        return self.errors[-1]

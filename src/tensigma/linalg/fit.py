"""What every solver returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from tensigma.linalg.factors import Factors

F = TypeVar("F", bound=Factors)


@dataclass(frozen=True, eq=False)
class Fit(Generic[F]):
    """Factors, and the errors on the way to them.

    ``errors[0]`` belongs to the starting point, ``errors[i]`` to the best state after sweep (or step) ``i``, and
    ``errors[-1]`` to ``factors``. They are relative errors under the metric of the fit and never rise.

    >>> import torch
    >>> from tensigma.linalg import SVD, Metric
    >>> fit = SVD(rank=1).fit(torch.diag(torch.tensor([4.0, 3.0])), Metric.identity(2))
    >>> round(fit.error, 4), fit.error == fit.errors[-1], fit.converged
    (0.6, True, True)
    """

    factors: F
    errors: tuple[float, ...]
    converged: bool

    @property
    def error(self) -> float:
        """Relative error of ``factors``."""
        return self.errors[-1]

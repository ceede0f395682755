"""Decompositions of a kernel under a metric."""

from tensigma.linalg.factors import CPFactors, Factors, SVDFactors, Tucker2Factors
from tensigma.linalg.fit import Fit

__all__ = ["CPFactors", "Factors", "Fit", "SVDFactors", "Tucker2Factors"]

"""Decompositions of a kernel under a metric."""

from tensigma.linalg.cp import CP
from tensigma.linalg.factors import CPFactors, Factors, SVDFactors, Tucker2Factors
from tensigma.linalg.fit import Fit
from tensigma.linalg.metric import Metric
from tensigma.linalg.svd import SVD
from tensigma.linalg.tucker2 import Tucker2

__all__ = ["CP", "SVD", "CPFactors", "Factors", "Fit", "Metric", "SVDFactors", "Tucker2", "Tucker2Factors"]

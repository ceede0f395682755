"""Decompositions of a kernel under a metric: torch only, no modules, no files.

>>> import torch
>>> generator = torch.Generator().manual_seed(0)
>>> inputs = torch.randn(500, 27, generator=generator) @ torch.randn(27, 27, generator=generator)
>>> metric = Metric.from_gram(inputs.T @ inputs / 500)
>>> fit = Tucker2(rank_out=4, rank_in=2).fit(torch.randn(8, 3, 3, 3, generator=generator), metric)
>>> fit.factors.n_params, 0 < fit.error < 1
(110, True)
"""

from tensigma.linalg.cp import CP, CPFactors, CPJoint, cp_rank, max_rank
from tensigma.linalg.curves import power_law, rank_grid, share_lost
from tensigma.linalg.deflation import Deflation
from tensigma.linalg.dense import Dense, DenseFactors
from tensigma.linalg.factors import Factors, Fit
from tensigma.linalg.metric import Metric
from tensigma.linalg.rounding import RoundedKernel, Rounding
from tensigma.linalg.solver import RankTuple, Solver, option_names, rank_names
from tensigma.linalg.spatial_svd import SpatialSVD, SpatialSVDFactors, spatial_svd_errors
from tensigma.linalg.spectra import Spectra, input_spectrum, output_spectrum
from tensigma.linalg.svd import SVD, SVDFactors, output_basis, seen_basis, svd_errors, svd_rank
from tensigma.linalg.tensor_train import TensorTrain, TensorTrainFactors
from tensigma.linalg.tucker2 import Tucker2, Tucker2Factors, tucker2_errors, tucker2_ranks
from tensigma.linalg.vbmf import alpha_rank, vbmf_rank
from tensigma.linalg.weighted import Importance, WeightedTucker2

__all__ = [
    "CP",
    "SVD",
    "CPFactors",
    "CPJoint",
    "Deflation",
    "Dense",
    "DenseFactors",
    "Factors",
    "Fit",
    "Importance",
    "Metric",
    "RankTuple",
    "RoundedKernel",
    "Rounding",
    "SVDFactors",
    "Solver",
    "SpatialSVD",
    "SpatialSVDFactors",
    "Spectra",
    "TensorTrain",
    "TensorTrainFactors",
    "Tucker2",
    "Tucker2Factors",
    "WeightedTucker2",
    "alpha_rank",
    "cp_rank",
    "input_spectrum",
    "max_rank",
    "option_names",
    "output_basis",
    "output_spectrum",
    "power_law",
    "rank_grid",
    "rank_names",
    "seen_basis",
    "share_lost",
    "spatial_svd_errors",
    "svd_errors",
    "svd_rank",
    "tucker2_errors",
    "tucker2_ranks",
    "vbmf_rank",
]

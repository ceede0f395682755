"""From a layer's problem (method, norm, statistics) to its solution, kept in memory and on disk."""

from tensigma.solving.candidate import Candidate, calls_of, layer_cost
from tensigma.solving.folding import Folding, foldable, folded_copy, folded_norms, remove_norms_
from tensigma.solving.jobs import CompressionProgress, Job, compressed_copy, jobs_for
from tensigma.solving.methods import (
    DENSE_METHOD,
    METHODS,
    SVD_METHOD,
    Method,
    choices_of,
    method_of,
    register,
    registered,
)
from tensigma.solving.metrics import means
from tensigma.solving.norms import NORMS, Norm, energy_views, norm_of
from tensigma.solving.parallel import side_by_side
from tensigma.solving.rounding import rounding_error
from tensigma.solving.sharing import run_first, run_shared
from tensigma.solving.shrinkage import shrunk
from tensigma.solving.solution import Solution, solve
from tensigma.solving.solution_store import Solutions, stats_digest
from tensigma.solving.treatment import BITS, Treatment, check_bits, label_of

__all__ = [
    "BITS",
    "DENSE_METHOD",
    "METHODS",
    "NORMS",
    "SVD_METHOD",
    "Candidate",
    "CompressionProgress",
    "Folding",
    "Job",
    "Method",
    "Norm",
    "Solution",
    "Solutions",
    "Treatment",
    "calls_of",
    "check_bits",
    "choices_of",
    "compressed_copy",
    "energy_views",
    "foldable",
    "folded_copy",
    "folded_norms",
    "jobs_for",
    "label_of",
    "layer_cost",
    "means",
    "method_of",
    "norm_of",
    "register",
    "registered",
    "remove_norms_",
    "rounding_error",
    "run_first",
    "run_shared",
    "shrunk",
    "side_by_side",
    "solve",
    "stats_digest",
]

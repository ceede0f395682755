"""Which layers are compressed, in which format and with which ranks."""

from tensigma.planning.budget import Budget, Macs, Params
from tensigma.planning.entry import Entry
from tensigma.planning.methods import METHODS, Method, method_of
from tensigma.planning.norms import NORMS, Norm, norm_of
from tensigma.planning.planner import plan
from tensigma.planning.plans import Plan
from tensigma.planning.progress import PlanningProgress
from tensigma.planning.ranks import VBMF, Energy, RankRule, Ranks

__all__ = [
    "METHODS",
    "NORMS",
    "VBMF",
    "Budget",
    "Energy",
    "Entry",
    "Macs",
    "Method",
    "Norm",
    "Params",
    "Plan",
    "PlanningProgress",
    "RankRule",
    "Ranks",
    "method_of",
    "norm_of",
    "plan",
]

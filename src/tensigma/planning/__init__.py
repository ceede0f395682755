"""Which layers are compressed, in which format and with which ranks."""

from tensigma.planning.budget import Budget, CostBudget, Macs, Params
from tensigma.planning.drop import Drop
from tensigma.planning.entry import Entry
from tensigma.planning.heldout import SetAside
from tensigma.planning.latency import Latency
from tensigma.planning.methods import METHODS, Method, method_of
from tensigma.planning.norms import NORMS, Norm, norm_of
from tensigma.planning.planner import plan
from tensigma.planning.plans import Plan
from tensigma.planning.progress import EffectProgress, PlanningProgress, SearchProgress, TimingProgress, TrialProgress
from tensigma.planning.ranks import VBMF, Energy, RankRule, Ranks, SigmaVBMF
from tensigma.planning.sensitivity import sensitivities

__all__ = [
    "METHODS",
    "NORMS",
    "VBMF",
    "Budget",
    "CostBudget",
    "Drop",
    "EffectProgress",
    "Energy",
    "Entry",
    "Latency",
    "Macs",
    "Method",
    "Norm",
    "Params",
    "Plan",
    "PlanningProgress",
    "RankRule",
    "Ranks",
    "SearchProgress",
    "SetAside",
    "SigmaVBMF",
    "TimingProgress",
    "TrialProgress",
    "method_of",
    "norm_of",
    "plan",
    "sensitivities",
]

"""Which layers are compressed, in which format and with which ranks."""

from tensigma.planning.allocation import Allocation
from tensigma.planning.budgets import Budget, CostBudget, Macs, Params
from tensigma.planning.drop import Drop
from tensigma.planning.entry import Entry
from tensigma.planning.heldout import SetAside
from tensigma.planning.latency import Latency
from tensigma.planning.page_data import FRONT_VERSION, front_data
from tensigma.planning.planner import plan
from tensigma.planning.plans import Plan
from tensigma.planning.progress import EffectProgress, PlanningProgress, SearchProgress, TimingProgress, TrialProgress
from tensigma.planning.ranks import Energy, RankRule, Ranks, SigmaVBMF, VBMF
from tensigma.planning.sensitivity import sensitivities
from tensigma.planning.sieve import first_convolution
from tensigma.planning.weighing import in_words

__all__ = [
    "FRONT_VERSION",
    "VBMF",
    "Allocation",
    "Budget",
    "CostBudget",
    "Drop",
    "EffectProgress",
    "Energy",
    "Entry",
    "Latency",
    "Macs",
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
    "first_convolution",
    "front_data",
    "in_words",
    "plan",
    "sensitivities",
]

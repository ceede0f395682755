"""Which layers are compressed, in which format and with which ranks."""

from tensigma.planning.allocation import Allocation
from tensigma.planning.budgets import AllOf, Budget, Bytes, CostBudget, Macs, Params
from tensigma.planning.drop import Drop, SearchProgress
from tensigma.planning.effects import EffectProgress
from tensigma.planning.entry import CompressedEntry, DenseEntry, Entry
from tensigma.planning.front import FrontPoint, ParetoFront, PlanningProgress
from tensigma.planning.latency import Latency, TimingProgress
from tensigma.planning.page_data import FRONT_VERSION, front_data, spectra_data
from tensigma.planning.planner import plan, plan_prepared
from tensigma.planning.plans import NOTE_CHECKS, Front, Plan
from tensigma.planning.preparation import Prepared, prepare
from tensigma.planning.ranks import VBMF, Energy, RankRule, Ranks, SigmaVBMF
from tensigma.planning.recipe import Recipe, first_convolution
from tensigma.planning.sensitivity import sensitivities
from tensigma.planning.weighing import TrialProgress, weighing_in_words

__all__ = [
    "FRONT_VERSION",
    "NOTE_CHECKS",
    "VBMF",
    "AllOf",
    "Allocation",
    "Budget",
    "Bytes",
    "CompressedEntry",
    "CostBudget",
    "DenseEntry",
    "Drop",
    "EffectProgress",
    "Energy",
    "Entry",
    "Front",
    "FrontPoint",
    "Latency",
    "Macs",
    "Params",
    "ParetoFront",
    "Plan",
    "PlanningProgress",
    "Prepared",
    "RankRule",
    "Ranks",
    "Recipe",
    "SearchProgress",
    "SigmaVBMF",
    "TimingProgress",
    "TrialProgress",
    "first_convolution",
    "front_data",
    "plan",
    "plan_prepared",
    "prepare",
    "sensitivities",
    "spectra_data",
    "weighing_in_words",
]

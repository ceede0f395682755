"""The paper's tables and figures, two experiments of our own, and the demonstration."""

from tensigma.experiments.balf import BALF
from tensigma.experiments.catalogue import CONFIGS, NAMES, PAPER, configs_of, load_config
from tensigma.experiments.demo import (
    DEFAULT,
    MODEL,
    TEST,
    TRAIN,
    TrainingProgress,
    Trial,
    compare,
    find_front,
    n_trials,
    train_once,
)
from tensigma.experiments.hits import advantage, pack_hits, unpack_hits
from tensigma.experiments.paper_page import write_html, write_page
from tensigma.experiments.quick import quick_form
from tensigma.experiments.reproduction import ReproductionProgress, State, current_cells, reproduce, state_of
from tensigma.experiments.results import Results
from tensigma.experiments.sections import section_of
from tensigma.experiments.settings import Config
from tensigma.experiments.tables import markdown
from tensigma.experiments.workshop import Overrides

__all__ = [
    "BALF",
    "CONFIGS",
    "DEFAULT",
    "MODEL",
    "NAMES",
    "PAPER",
    "TEST",
    "TRAIN",
    "Config",
    "Overrides",
    "ReproductionProgress",
    "Results",
    "State",
    "TrainingProgress",
    "Trial",
    "advantage",
    "compare",
    "configs_of",
    "current_cells",
    "find_front",
    "load_config",
    "markdown",
    "n_trials",
    "pack_hits",
    "quick_form",
    "reproduce",
    "section_of",
    "state_of",
    "train_once",
    "unpack_hits",
    "write_html",
    "write_page",
]

"""A model over data: batches, borrowing a model, answers, hold-outs, progress, processes, digests and timing."""

from tensigma.running.answers import floats_of, scores_of
from tensigma.running.batches import class_labels, count_batches, input_of, is_batch, is_one_shot, iterate
from tensigma.running.borrowing import borrowed, device_of, kept_rng
from tensigma.running.holdout import Pair, Pairs, hold_out, mixed
from tensigma.running.probe import Probe, UnlikeAnswers
from tensigma.running.processes import common_device, everyone, process_group, rank_and_size, shard
from tensigma.running.tallies import answered
from tensigma.running.timetable import TimeTable
from tensigma.running.timing import Chain, RUNTIMES, runtime_facts, runtime_of

__all__ = [
    "RUNTIMES",
    "Chain",
    "Pair",
    "Pairs",
    "Probe",
    "TimeTable",
    "UnlikeAnswers",
    "answered",
    "borrowed",
    "class_labels",
    "common_device",
    "count_batches",
    "device_of",
    "everyone",
    "floats_of",
    "hold_out",
    "input_of",
    "is_batch",
    "is_one_shot",
    "iterate",
    "kept_rng",
    "mixed",
    "process_group",
    "rank_and_size",
    "runtime_facts",
    "runtime_of",
    "scores_of",
    "shard",
]

"""A model over data: batches, borrowing a model, answers, hold-outs, progress, processes, digests and timing."""

from tensigma.running.answers import dense_scores_of, drawn_labels, floats_of, leaves, scores_of
from tensigma.running.batches import (
    Batch,
    Batches,
    class_labels,
    count_batches,
    input_of,
    is_batch,
    is_one_shot,
    iterate,
    not_ended,
    target_labels,
)
from tensigma.running.borrowing import allows_gradients, borrowed, device_of, kept_rng, run, seed_all
from tensigma.running.copying import copied
from tensigma.running.digests import Digest, content_digest, content_digests, tensors_of, weights_digest
from tensigma.running.gradients import check_gradients, has_gradients
from tensigma.running.halting import OutOfOrder, halted_passes, live_bytes
from tensigma.running.holdout import Pair, Pairs, SetAside, hold_out, mixed
from tensigma.running.onednn import safe_backward, safe_layout
from tensigma.running.probe import Probe, UnlikeAnswers
from tensigma.running.processes import check_together, common_device, everyone, process_group, rank_and_size, shard
from tensigma.running.progress import Listener, Progress, Wanted, WeightedProgress, reporter, samples_per_second, silent
from tensigma.running.tallies import Tally, alike, answered, right
from tensigma.running.thread_count import threads
from tensigma.running.timetable import TimeTable
from tensigma.running.timing import RUNTIMES, Chain, processor_clock, runtime_facts, runtime_of

__all__ = [
    "RUNTIMES",
    "Batch",
    "Batches",
    "Chain",
    "Digest",
    "Listener",
    "OutOfOrder",
    "Pair",
    "Pairs",
    "Probe",
    "Progress",
    "SetAside",
    "Tally",
    "TimeTable",
    "UnlikeAnswers",
    "Wanted",
    "WeightedProgress",
    "alike",
    "allows_gradients",
    "answered",
    "borrowed",
    "check_gradients",
    "check_together",
    "class_labels",
    "common_device",
    "content_digest",
    "content_digests",
    "copied",
    "count_batches",
    "dense_scores_of",
    "device_of",
    "drawn_labels",
    "everyone",
    "floats_of",
    "halted_passes",
    "has_gradients",
    "hold_out",
    "input_of",
    "is_batch",
    "is_one_shot",
    "iterate",
    "kept_rng",
    "leaves",
    "live_bytes",
    "mixed",
    "not_ended",
    "process_group",
    "processor_clock",
    "rank_and_size",
    "reporter",
    "right",
    "run",
    "runtime_facts",
    "runtime_of",
    "safe_backward",
    "safe_layout",
    "samples_per_second",
    "scores_of",
    "seed_all",
    "shard",
    "silent",
    "target_labels",
    "tensors_of",
    "threads",
    "weights_digest",
]

"""A model over data: batches, borrowing a model, answers, hold-outs, progress, processes, digests and timing."""

from tensigma.running.answers import Answers, UnknownAnswers, UnlikeAnswers, Wish, first_answers
from tensigma.running.batches import (
    Batch,
    Batches,
    Key,
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
from tensigma.running.chains import Chain
from tensigma.running.copying import copied
from tensigma.running.digests import Digest, content_digest, content_digests, tensors_of, weights_digest
from tensigma.running.freeing import give_back
from tensigma.running.gradients import check_gradients, has_gradients
from tensigma.running.halting import HaltedPasses, OutOfOrder, halted_passes, live_bytes
from tensigma.running.heads import raw_outputs
from tensigma.running.holdout import Pair, Pairs, SetAside, hold_out, mixed
from tensigma.running.inputs import (
    Inputs,
    Several,
    call,
    mapped,
    moved,
    n_samples,
    shape_of,
    split,
    taken,
    tensors_in,
)
from tensigma.running.kinds import Boxes, Kind, Likened, Numbers, Scores, Smooth
from tensigma.running.layout import channels_last
from tensigma.running.onednn import safe_backward, safe_layout
from tensigma.running.outputs import dense_scores_of, drawn_labels, leaves
from tensigma.running.precision import Detections, average_precision
from tensigma.running.probe import Probe
from tensigma.running.processes import (
    all_notes,
    common_device,
    everyone,
    process_group,
    rank_and_size,
    shard,
    share_of,
    together,
)
from tensigma.running.progress import Listener, Progress, Wanted, WeightedProgress, reporter, samples_per_second, silent
from tensigma.running.scores_tally import ScoresTally, alike, answered, right
from tensigma.running.tallies import Tally
from tensigma.running.thread_count import threads
from tensigma.running.timetable import TimeTable
from tensigma.running.timing import RUNTIMES, processor_clock, runtime_facts, runtime_of

__all__ = [
    "RUNTIMES",
    "Answers",
    "Batch",
    "Batches",
    "Boxes",
    "Chain",
    "Detections",
    "Digest",
    "HaltedPasses",
    "Inputs",
    "Key",
    "Kind",
    "Likened",
    "Listener",
    "Numbers",
    "OutOfOrder",
    "Pair",
    "Pairs",
    "Probe",
    "Progress",
    "Scores",
    "ScoresTally",
    "SetAside",
    "Several",
    "Smooth",
    "Tally",
    "TimeTable",
    "UnknownAnswers",
    "UnlikeAnswers",
    "Wanted",
    "WeightedProgress",
    "Wish",
    "alike",
    "all_notes",
    "allows_gradients",
    "answered",
    "average_precision",
    "borrowed",
    "call",
    "channels_last",
    "check_gradients",
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
    "first_answers",
    "give_back",
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
    "mapped",
    "mixed",
    "moved",
    "n_samples",
    "not_ended",
    "process_group",
    "processor_clock",
    "rank_and_size",
    "raw_outputs",
    "reporter",
    "right",
    "run",
    "runtime_facts",
    "runtime_of",
    "safe_backward",
    "safe_layout",
    "samples_per_second",
    "seed_all",
    "shape_of",
    "shard",
    "share_of",
    "silent",
    "split",
    "taken",
    "target_labels",
    "tensors_in",
    "tensors_of",
    "threads",
    "together",
    "weights_digest",
]

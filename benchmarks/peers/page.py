"""docs/peers.md and its pictures, from the records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from peers import quoted
from peers.catalogue import OURS, PEERS
from peers.comparison import ours_beside
from peers.job import TRACKS
from peers.pictures import drawable, panels, picture
from peers.records import Record, Records, failed
from peers.run import ORIGINAL, missing_cells
from peers.subjects import SUBJECTS
from tensigma.files import whole_file
from tensigma.report import draw

_TRACKS = {
    "closed": "Unlabelled images and nothing else",
    "label-free": "One epoch of training towards the original's answers",
    "labels": "One epoch of training with labels",
}
_HEAD = """# Beside the peers

Other tools on the very same weights, calibration images and test images as Tensigma, each in an environment of its own,
and all judged from files by one program. `make bench-peers` runs what has no result yet and writes this page;
`results/benchmark_peers.json` has every figure, with the hits image by image.

- **closed**: nothing but unlabelled images: 2,000 of CIFAR, 1,000 of ImageNet, 256 of it for the ResNet-50.
  **label-free**: the same, then one epoch of Adam towards the original's answers, on 4,000 images of CIFAR-10, 3,000 of
  CIFAR-100, 500 of ImageNet, 256 for the ResNet-50. **labels**: the same epoch with labels instead. All take the same
  steps. A fifth of the images, 500 at most, is held out: there three settings (learning rates of 1e-3, 2e-4, and 4e-5
  with the statistics of BatchNorm kept) are compared after 15 % of the steps, the best trains for all of them, and the
  result is kept if it lowers the loss there. *untrained*: it did not, and the model is that of the first track.
- **rate**: parameters before ÷ after. Tensigma keeps the budget or falls below it; a tool whose setting cannot meet the
  rate is given the nearest setting with *more* parameters, which is to its advantage. AIMET alone shares out a target
  by itself, which is set to the rate and met roughly; where that leaves less than nine tenths of our parameters, the
  two are not compared.
- **parameters**, **MACs** and **bytes** are shares of the original's; bytes are those of the ONNX file. **time**: one
  image in ONNX Runtime on one thread, as a share of the original's in the same run. **seconds** and **memory** are the
  processor time and the peak of the tool's process while it compressed, calibration included.
- **Tensigma − it**: difference in top-1 on the same images, with a paired 95 % bootstrap interval; *level* where that
  holds 0. INT8 is compared with Tensigma's own INT8 at the same rate.
- BatchNorm statistics are taken anew on 256 of the images for every tool, where answers on 256 others then agree with
  the original's more often; a note in the results says where.
- One run and one seed. Tools are used as their documentation shows, in one step; training schedules that their authors
  recommend are longer than one epoch and may do better. Published results are at the end."""

_PUBLISHED = """What others report, *quoted* and not measured here: other weights, long training with all 50,000 labels
of CIFAR-10 or 1.28 million of ImageNet, all test images. Beside it what is reached here with a fifth of the labels of
CIFAR-10: `python benchmarks/finetuned.py` compresses, refines on 30,000 samples towards the original's answers, and
trains on 9,000 labels for up to 6 epochs, the best one chosen on 1,000 others; judged on 5,000 test images."""


def page(records: Records, runtimes: str = "", finetuned: Iterable[Record] = ()) -> str:
    missing, total = missing_cells(records, SUBJECTS.values())
    parts = [_HEAD, state(records, missing, total)]
    for subject in SUBJECTS.values():
        known = [record for record in records if record["model"] == subject.name]
        if known:
            parts += section(subject.name, subject.title, known, records)
    parts += ["## Runtimes", runtimes] if runtimes else []
    parts += [
        "## Published results",
        _PUBLISHED,
        quoted.table(finetuned),
    ]
    return "\n\n".join(parts) + "\n"


def state(records: Records, missing: int, total: int) -> str:
    verdicts = Counter(
        difference.verdict for record in records if (difference := ours_beside(record, records)) is not None
    )
    counts = ", ".join(f"{word} in {verdicts[word]}" for word in ("ahead", "level", "behind"))
    failures = sum(failed(record) for record in records)
    text = f"**So far {total - missing} of {total} cells have run, {failures} of them without a model to judge.**"
    text = f"{text} Where both have a result, Tensigma is {counts}." if verdicts else text
    return "\n\n".join([text, *slower(records)])


def slower(records: Iterable[Record]) -> list[str]:
    """Where fewer parameters are not less time, which a budget of parameters does not ask for."""
    ours = [r for r in records if r["peer"] == OURS and r["track"] == "closed" and not failed(r)]
    worse = [f"{r['model']} at {r['rate']:g} ({r['time_ratio']:.2f})" for r in ours if r["time_ratio"] > 1]
    if not worse:
        return []
    return [
        f"**Smaller and slower** than the original in ONNX Runtime, {len(worse)} of {len(ours)} models of Tensigma's: "
        f"{', '.join(worse)}. All tools are given a budget of parameters here; `ts.Macs` and `ts.Latency` are for time."
    ]


def section(name: str, title: str, known: list[Record], records: Records) -> list[str]:
    original = records.find(ORIGINAL, name, 1.0, "closed")
    parts = [f"## {title}"]
    if original is not None:
        parts.append(
            f"The original: top-1 {original['top1']:.1f}, {short(original['params'])} parameters, "
            f"{short(original['macs'])} multiply-adds, {short(original['bytes'])} bytes."
        )
    for track in TRACKS:
        rows = [record for record in known if record["track"] == track and record["peer"] != ORIGINAL]
        plain = sizes_only(rows)
        if plain:
            parts += [f"### {_TRACKS[track]}", *figures(name, track, plain), table(plain, records)]
        quantized = [record for record in rows if PEERS[record["peer"]].quantizes]
        if quantized:
            parts += ["### INT8", table(quantized, records)]
    return parts


def table(rows: list[Record], records: Records) -> str:
    original = records.find(ORIGINAL, rows[0]["model"], 1.0, "closed") or {}
    head = ["rate", "tool", "parameters", "MACs", "bytes", "time", "top-1", "agreement", "seconds", "memory"]
    lines = [f"| {' | '.join([*head, 'Tensigma − it'])} | |", "|---" * (len(head) + 2) + "|"]
    for record in rows:
        cells = [f"{record['rate']:g}", PEERS[record["peer"]].title]
        if failed(record):
            reason = record["failure"].replace("|", "\\|").replace("\n", " ")
            lines.append(f"| {' | '.join(cells)} |{' – |' * (len(head) - 1)} {reason} |")
            continue
        cells += [share(record, original, measure) for measure in ("params", "macs", "bytes")]
        cells += [f"{record['time_ratio']:.2f}", f"{record['top1']:.1f}", f"{record['agreement']:.1f}"]
        cells += [f"{record['cpu_seconds']:.0f}", f"{record['peak_bytes'] / 1e9:.1f} GB"]
        difference = ours_beside(record, records)
        cells += ["–", ""] if difference is None else [str(difference), difference.verdict]
        cells[-1] = ", ".join(filter(None, [cells[-1], "" if record.get("trained", True) else "untrained"]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def share(record: Record, original: dict[str, Any], measure: str) -> str:
    return f"{record[measure] / original[measure]:.2f}" if original else short(record[measure])


def short(count: float) -> str:
    """
    >>> short(272474), short(40800000), short(980)
    ('272 k', '40.8 M', '980')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return f"{count:g}"


def figures(name: str, track: str, rows: list[Record]) -> list[str]:
    words = "Top-1 against parameters, multiply-adds, bytes and time"
    return [f"![{words}]({picture(name, track)})"] if drawable(rows) else []


def sizes_only(rows: Iterable[Record]) -> list[Record]:
    """Without the original and without quantized models."""
    return [record for record in rows if record["peer"] in PEERS and not PEERS[record["peer"]].quantizes]


def write(records: Records, docs: Path, runtimes: str = "", finetuned: Iterable[Record] = ()) -> None:
    """The page and every picture that it shows."""
    for subject in SUBJECTS.values():
        original = records.find(ORIGINAL, subject.name, 1.0, "closed")
        for track in TRACKS:
            rows = sizes_only(r for r in records if (r["model"], r["track"]) == (subject.name, track))
            if original is not None and drawable(rows):
                title = f"{subject.title}: {_TRACKS[track].lower()}"
                draw(panels(rows, original), docs / picture(subject.name, track), title=title)
    with whole_file(docs / "peers.md") as partial:
        partial.write_text(page(records, runtimes, finetuned), encoding="utf-8")

"""The answer of a model: which of its parts are compared, and as what."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tensigma.errors import AnswersWarning, InputError
from tensigma.running.batches import Batch
from tensigma.running.borrowing import run
from tensigma.running.guessing import boxes_in, first_path, floats_in, guess, is_by_sample, is_told
from tensigma.running.heads import Heads, last_layers, raw_outputs, watched
from tensigma.running.inputs import mapped
from tensigma.running.kinds import Boxes, Kind, Likened, LikenessFunction, Numbers, Scores, Smooth
from tensigma.running.outputs import items_of, leaves

#: What a caller may say about the answers of a model: one kind for all, a kind by path (None: not compared), a function
#: of two outputs, or None to have them guessed.
Wish = Kind | Mapping[str, Kind | None] | LikenessFunction | None


class UnlikeAnswers(Exception):
    """Answers that cannot be compared, because their number or their shapes differ from the original's."""


class UnknownAnswers(InputError):
    """What the numbers of an answer mean cannot be told from their shape."""


@dataclass(frozen=True)
class Part:
    """One part of an answer: where it is, what it means, and what it is in words."""

    path: str
    kind: Kind
    words: str


@dataclass(frozen=True)
class Answers:
    """How the answers of one model are read and compared. The first part gives the main figures.

    ``str(answers)`` says what was guessed or set.
    """

    parts: tuple[Part, ...]
    guessed: bool
    #: Whether the first part is taken for scores though nothing but the width of the last layer says so.
    assumed: bool = False
    #: Layers whose outputs stand in for parts that have no gradient, such as boxes.
    raw: tuple[str, ...] = ()
    #: Parts that have a distance with a gradient.
    smooth: tuple[Part, ...] = ()

    def __str__(self) -> str:
        named = len(self.parts) > 1 or any(part.path for part in self.parts)
        texts = [f"{part.path or 'output'}: {part.words}" if named else part.words for part in self.parts]
        doubt = "assumed" if self.assumed else "guessed"
        return "; ".join(texts) + (f" ({doubt}; answers= sets it)" if self.guessed else "")

    @property
    def measure(self) -> str:
        """The name of the main figure."""
        return self.parts[0].kind.measure if self.parts else "likeness"

    def read(self, output: Any) -> list[Any]:
        """The parts of an output that are compared, in order."""
        return [_at(output, part) for part in self.parts]

    def run(self, model: nn.Module, batch: Batch) -> tuple[Any, list[Tensor]]:
        """The output of ``model`` for ``batch``, and the tensors that have a distance with a gradient.

        These are the parts that are scores or numbers, and in place of boxes the raw outputs they are computed from.
        """
        with raw_outputs(model, self.raw) as raw:
            output = run(model, batch)
        parts = [_at(output, part) for part in self.smooth]
        # The second stage of a detector has a row for each candidate, and no two models have the same candidates.
        rows = [tensor for name in self.raw for tensor in raw[name] if len(tensor) == len(batch)]
        return output, [*parts, *rows]

    def kinds(self, n_tensors: int) -> list[Smooth]:
        """The kind of each of the tensors that :meth:`run` gives."""
        kinds = [part.kind for part in self.smooth if isinstance(part.kind, Smooth)]
        return [*kinds, *[Numbers()] * (n_tensors - len(kinds))]


def first_answers(model: nn.Module, batch: Batch, wish: Wish = None, *, ask: bool = True) -> tuple[Any, Answers]:
    """The output of ``model`` for its first batch, and how its answers are read.

    Without a ``wish`` the meaning of each tensor is guessed. Scores are: what is called ``logits`` or ``scores``; what
    has as many classes as the last Linear layer or convolution of one tap has outputs, unless a normalisation layer
    follows it, rows have length 1, or the answer has the shape of the input; rows that are probabilities; and answers
    to a batch whose labels are class numbers. Dicts with ``boxes`` and ``scores`` are boxes. All others are numbers,
    except that a two-dimensional answer that might be an embedding or scores is asked for, with ``ask``, if no other
    part is clear. Scores that only the last layer speaks for are told in an :class:`~tensigma.errors.AnswersWarning`.

    >>> from collections import OrderedDict
    >>> _, answers = first_answers(nn.Sequential(OrderedDict(fc=nn.Linear(3, 4))), Batch(0, torch.ones(2, 3), None))
    >>> print(answers)
    scores of 4 classes along axis 1 (guessed; answers= sets it)
    >>> first_answers(nn.LayerNorm(4), Batch(0, torch.randn(2, 4), None))
    Traceback (most recent call last):
    ...
    tensigma.running.answers.UnknownAnswers: each answer is 4 numbers, which may be class scores or an embedding; say \
which with answers=, Scores() or Numbers()
    """
    with watched(model) as heads:
        output = run(model, batch)
    heads.share_out(leaves(output).values())
    parts = _guessed(output, batch, heads, ask=ask) if wish is None else _wished(output, wish, batch, heads)
    assumed = wish is None and bool(parts) and not _is_sure(output, parts[0], batch, heads)
    if assumed:
        _warn(parts[0], heads.of(_walk(output, parts[0].path)).name)
    # A function of two outputs has no gradient that could be relied on.
    close = _guessed(output, batch, heads, ask=False) if parts and isinstance(parts[0].kind, Likened) else parts
    smooth = tuple(part for part in close if isinstance(part.kind, Smooth))
    answers = Answers(parts, guessed=wish is None, assumed=assumed, smooth=smooth)
    return output, answers if len(smooth) == len(close) else replace(answers, raw=_raw(model, batch))


def _raw(model: nn.Module, batch: Batch) -> tuple[str, ...]:
    # Inference tensors cannot be recorded; their copies can.
    with torch.inference_mode(False):
        copied = Batch(batch.index, mapped(batch.inputs, torch.clone), None)
        return tuple(last_layers(model, lambda: run(model, copied)))


def _wished(output: Any, wish: Wish, batch: Batch, heads: Heads) -> tuple[Part, ...]:
    if isinstance(wish, Boxes):
        return (_part(output, (boxes_in(output, wish) or [""])[0], wish),)
    if isinstance(wish, Numbers):
        return tuple(_part(output, path, wish) for path in floats_in(output) or [""])
    if isinstance(wish, Kind):
        scores = _part(output, first_path(list(floats_in(output))), wish)
        others = _guessed(output, batch, heads, ask=False)
        return (scores, *(part for part in others if part.path != scores.path))
    if isinstance(wish, Mapping):
        kinds = {str(path): kind for path, kind in wish.items() if kind is not None}
        if kinds and all(isinstance(kind, Kind) for kind in kinds.values()):
            return tuple(_part(output, path, kind) for path, kind in kinds.items())
    elif callable(wish) and not isinstance(wish, type):
        return (Part("", Likened(wish), Likened(wish).words(output)),)
    raise InputError(
        "{answers} takes Scores(axis), Numbers(), Boxes(…), a dict of these by name of the part, or a function of two "
        f"outputs; got {wish!r}",
        parameters=("answers",),
    )


def _guessed(output: Any, batch: Batch, heads: Heads, *, ask: bool) -> tuple[Part, ...]:
    boxes = boxes_in(output, Boxes())
    if boxes:
        return tuple(_part(output, path, Boxes()) for path in boxes)
    tensors = floats_in(output)
    kinds = {path: guess(path, tensor, batch, heads.of(tensor)) for path, tensor in tensors.items()}
    if not any(isinstance(kind, Scores) for kind in kinds.values()):
        # Labels say that there are scores, not which of several parts they are.
        kinds = {path: guess(path, tensor, batch, heads.of(tensor), batch.targets) for path, tensor in tensors.items()}
    found = [path for path, kind in kinds.items() if isinstance(kind, Scores)]
    scores = sorted(found, key=lambda path: path != first_path(found))
    unclear = next((path for path, kind in kinds.items() if kind is None), None)
    if ask and is_by_sample(output, len(batch)):
        raise UnknownAnswers(
            "the model returns a list with a tensor for each sample; say how two of them are compared, with {answers}, "
            "a function of both",
            parameters=("answers",),
        )
    if ask and not kinds:
        raise UnknownAnswers(
            f"the model returns a {type(output).__name__} without real numbers; say how two outputs are compared, with "
            "{answers}, a function of both",
            parameters=("answers",),
        )
    if ask and not scores and unclear is not None:
        where = f"the part {unclear!r} of each answer" if unclear else "each answer"
        raise UnknownAnswers(
            f"{where} is {tensors[unclear].shape[1]:,} numbers, which may be class scores or an embedding; say "
            "which with {answers}, Scores() or Numbers()",
            parameters=("answers",),
        )
    others = [path for path in kinds if path not in scores]
    parts = [_part(output, path, kinds[path] or Numbers()) for path in (*scores, *others)]
    sure = {part.path for part in parts if _is_sure(output, part, batch, heads)}
    if scores and sure & set(scores):
        # Beside scores that are told as such, others that only a width speaks for are more likely numbers.
        told = [part if part.path in sure else _part(output, part.path, Numbers()) for part in parts]
        parts = sorted(told, key=lambda part: not isinstance(part.kind, Scores))
    return tuple(parts)


def _is_sure(output: Any, part: Part, batch: Batch, heads: Heads) -> bool:
    """Whether a part is what it is taken for: no scores, or scores that something but a width tells."""
    if not isinstance(part.kind, Scores):
        return True
    tensor = _walk(output, part.path)
    return is_told(part.path, tensor, part.kind.axis, heads.of(tensor), batch.targets)


def _warn(part: Part, name: str) -> None:
    layer = f"the layer {name}" if name else "a layer"
    warnings.warn(
        f"the answers are compared as {part.words}: they come from {layer}, and nothing else says what they "
        "mean. If they are an embedding or other numbers, pass answers=Numbers() (--answers numbers); answers=Scores() "
        "(--answers scores) confirms the assumption",
        AnswersWarning,
        stacklevel=3,
    )


def _part(output: Any, path: str, kind: Kind) -> Part:
    leaf = _walk(output, path)
    if leaf is None:
        raise InputError(
            f"{{answers}} names {path!r}, which is no part of what the model returns: {', '.join(leaves(output))}",
            parameters=("answers",),
        )
    kind.check(leaf, f"the part {path!r} of the answer" if path else "the answer of the model")
    return Part(path, kind, kind.words(leaf))


def _walk(output: Any, path: str) -> Any:
    """The part at this path; None if there is none."""
    if not path:
        return output
    for key, item in items_of(output) or ():
        name = str(key)
        if path == name or path.startswith(f"{name}."):
            return _walk(item, path[len(name) + 1 :])
    return None


def _at(output: Any, part: Part) -> Any:
    """What an output has in place of this part; in training mode a model may return its scores among others."""
    found = _walk(output, part.path)
    if found is None or (isinstance(part.kind, Smooth) and not isinstance(found, Tensor)):
        tensors = leaves(output)
        if not tensors:
            raise UnlikeAnswers(f"a {type(output).__name__} without tensors in place of {part.words}")
        return tensors[first_path(list(tensors))]
    return found

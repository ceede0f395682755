"""Watching a forward pass: the layer that an answer comes from, and the raw outputs behind boxes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from tensigma.layers import TARGETS

#: Words in the name of a layer, as people name the last layer of a classifier or of what gives an embedding.
_OF_CLASSES = {"cls", "classifier", "classification", "class", "classes", "logit", "logits"}
_OF_EMBEDDINGS = {"embed", "embedding", "embeddings", "proj", "projection", "projector", "feature", "features"}
#: The last layer of a classifier is often called so, that of an embedding at times: then its width has to agree.
_OF_EITHER = {"fc", "head", "heads"}
#: Embeddings are made as wide as suits processors; numbers of classes hardly ever are multiples of this.
_STEP_OF_EMBEDDINGS = 32
#: Words in the name of a class, as people name what gives an embedding, and those by which it does something else.
_EMBEDDING_CLASSES = _OF_EMBEDDINGS | {"embedder", "encoder", "siamese", "triplet"}
_OTHER_CLASSES = {"classifier", "classification", "decoder", "segmenter", "segmentation"}
#: Attributes in which libraries keep the number of classes.
_CLASS_COUNTS = ("num_classes", "n_classes", "num_labels")


@dataclass
class Head:
    """The Linear layer or convolution that an answer comes from."""

    #: Its number of outputs; 0 if there is none.
    width: int = 0
    linear: bool = False
    #: Whether it has a kernel of one tap, as Linear layers do.
    pointwise: bool = False
    #: Whether a normalisation layer was called after it.
    normalised: bool = False
    name: str = ""
    #: Whether its name, or an attribute of the model with a width that fits, says that its outputs are classes.
    classifies: bool = False

    def gives(self, width: int) -> bool:
        """Whether scores of ``width`` classes can be what this layer computes."""
        return self.width == width and self.pointwise and not self.normalised


class Heads:
    """The heads of a forward pass: for each answer, the layer that it comes from.

    An answer that a layer returned comes from that layer. Any other comes from the last layer that was called, unless
    that one returned an answer itself: then no more is known than the kind of the layer before it.
    """

    def __init__(self) -> None:
        #: Every call of a layer in order, with what it returned as long as that is in use.
        self.calls: list[tuple[Head, ReferenceType[Any]]] = []
        self._own: dict[int, Head] = {}
        self._rest = Head()

    def share_out(self, answers: Iterable[Tensor]) -> None:
        """Find the heads of these answers, which are all that the pass returned."""
        ids = {id(answer) for answer in answers}
        for head, returned in self.calls:
            if id(returned()) in ids:
                # Norms that were called later belong to other branches.
                self._own[id(returned())] = replace(head, normalised=False)
                self._rest = Head(linear=self._rest.linear)
            else:
                self._rest = head

    def of(self, answer: Tensor) -> Head:
        """The head of one of the answers."""
        return self._own.get(id(answer), self._rest)


@contextmanager
def watched(model: nn.Module) -> Iterator[Heads]:
    """The heads of the forward pass inside the block.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.LayerNorm(2))
    >>> with watched(model) as heads:
    ...     answer = model(torch.ones(1, 4))
    >>> heads.share_out([answer])
    >>> heads.of(answer).name, heads.of(answer).normalised
    ('1', True)
    """
    heads = Heads()
    names = {module: name for name, module in model.named_modules()}

    def layer(module: nn.Module, args: Any, output: Any) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        head = Head(
            width=int(getattr(module, "out_features", 0) or getattr(module, "out_channels", 0)),
            linear=isinstance(module, nn.Linear),
            pointwise=weight[0, 0].numel() == 1,
            name=names[module],
        )
        if isinstance(output, Tensor):
            heads.calls.append((head, ref(output)))

    def norm(module: nn.Module, args: Any, output: Any) -> None:
        if heads.calls:
            heads.calls[-1][0].normalised = True

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, TARGETS):
                stack.callback(module.register_forward_hook(layer).remove)
            elif "norm" in type(module).__name__.lower() and not any(module.children()):
                stack.callback(module.register_forward_hook(norm).remove)
        yield heads
    counts = _class_counts(model)
    for head, _ in heads.calls:
        named = names_classes(head.name, head.width) and not _is_embedding(model, head.name)
        # Libraries of image classifiers build embeddings too, whose width is then their "number of classes".
        head.classifies = named or (head.width in counts and not _is_width_of_embeddings(head.width))


def names_classes(name: str, width: int) -> bool:
    """Whether a layer of this name and width gives class scores: the last part of the name that tells decides.

    >>> [names_classes(name, 10) for name in ("backbone.fc2", "classifier.4", "low_classifier", "auxLogits.0")]
    [True, True, True, True]
    >>> [names_classes(name, 10) for name in ("6", "linear", "head.projection", "projection_head.0")]
    [False, False, False, False]
    >>> [names_classes(name, 128) for name in ("fc", "head", "classifier", "classifier.fc")]
    [False, False, True, True]
    """
    for part in reversed(name.split(".")):
        words = _words(part)
        if words & _OF_EMBEDDINGS:
            return False
        if words & _OF_CLASSES or (words & _OF_EITHER and not _is_width_of_embeddings(width)):
            return True
    return False


def _is_width_of_embeddings(width: int) -> bool:
    return width % _STEP_OF_EMBEDDINGS == 0


def _words(name: str) -> set[str]:
    return {word.lower() for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", name)}


def _is_embedding(model: nn.Module, name: str) -> bool:
    """Whether the class of the model, or of a part around the layer of this name, is called like an embedding."""
    around = name.split(".")[:-1]
    parts = [model.get_submodule(".".join(around[:depth])) for depth in range(len(around) + 1)]
    words = [_words(type(part).__name__) for part in parts]
    return any(each & _EMBEDDING_CLASSES and not each & _OTHER_CLASSES for each in words)


def _class_counts(model: nn.Module) -> set[int]:
    """How many classes parts of the model, or their configurations, say there are."""
    holders = [holder for module in model.modules() for holder in (module, getattr(module, "config", None))]
    counts = [getattr(holder, name, None) for holder in holders for name in _CLASS_COUNTS]
    return {count for count in counts if isinstance(count, int)}


def last_layers(model: nn.Module, run: Callable[[], Any]) -> list[str]:
    """The layers of the model after which no other layer comes: what they compute are its raw outputs.

    ``run`` calls the model, once. Boxes are computed from such outputs in ways that have no gradient, such as sorting.

    >>> model = nn.ModuleDict({"body": nn.Linear(4, 4), "boxes": nn.Linear(4, 8), "classes": nn.Linear(4, 3)})
    >>> def run():
    ...     features = model["body"](torch.ones(1, 4)).relu()
    ...     return model["boxes"](features), model["classes"](features)
    >>> last_layers(model, run)
    ['boxes', 'classes']
    """
    inputs: list[Any] = []
    outputs: dict[Any, str] = {}
    names: dict[nn.Module, str] = {}
    names.update((module, name) for name, module in model.named_modules() if isinstance(module, TARGETS))

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("input")
        inputs.append(getattr(x, "grad_fn", None))

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor):
            return None
        # Without a node of its own the layer could not be found again, as where its weights are frozen.
        tracked = output.clone() if output.requires_grad else output.detach().requires_grad_().clone()
        outputs[tracked.grad_fn] = names[module]
        return tracked

    with ExitStack() as stack, torch.enable_grad():
        for module in names:
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after).remove)
        run()
    seen: set[Any] = set()
    followed: set[Any] = set()
    pending = [node for node in inputs if node is not None]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in outputs:
            followed.add(node)
        else:
            pending += [earlier for earlier, _ in node.next_functions if earlier is not None]
    inner = {outputs[node] for node in followed}
    return [name for name in dict.fromkeys(outputs.values()) if name not in inner]


@contextmanager
def raw_outputs(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, list[Tensor]]]:
    """What the modules of these names return in calls inside the block, if it is tensors of real numbers."""
    outputs: dict[str, list[Tensor]] = {name: [] for name in names}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                outputs[name].append(output)

        return hook

    with ExitStack() as stack:
        for name in names:
            stack.callback(model.get_submodule(name).register_forward_hook(keep(name)).remove)
        yield outputs

"""What a model answers: guessed where that is safe, asked for where it is not, and read in every nesting."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import tensigma as ts
from tensigma.errors import AnswersWarning, InputError
from tensigma.running import Answers, Batch, UnlikeAnswers, Wish, first_answers

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def reading(model: nn.Module, x: Any = X, wish: Wish = None, labels: Any = None, *, ask: bool = True) -> Answers:
    item = None if labels is None else (x, labels)
    with torch.no_grad():
        return first_answers(model.eval(), Batch(0, x, item), wish, ask=ask)[1]


def kinds(answers: Answers) -> list[Any]:
    return [part.kind for part in answers.parts]


class Body(nn.Module):
    """A convolution and what follows it."""

    def __init__(self, *after: nn.Module, channels: int = 6, kernel: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, channels, kernel, padding=kernel // 2), nn.BatchNorm2d(channels), nn.ReLU()
        )
        self.after = nn.Sequential(*after)

    def forward(self, x: Tensor) -> Any:
        return self.after(self.body(x))


class Unit(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=1)


POOL = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
SCORES, LAST = ts.Scores(), ts.Scores(axis=-1)
CASES = [
    pytest.param(Body(*POOL, nn.Linear(6, 5)), [SCORES], id="linear-head"),
    pytest.param(Body(*POOL, nn.Linear(6, 5), nn.Softmax(1)), [SCORES], id="softmax"),
    pytest.param(Body(*POOL, nn.Linear(6, 5), nn.Sigmoid()), [SCORES], id="sigmoid"),
    pytest.param(Body(nn.Conv2d(6, 5, 1), nn.ReLU(), *POOL), [SCORES], id="convolutional-head"),
    pytest.param(Body(*POOL, nn.Linear(6, 1)), [ts.Numbers()], id="one-number"),
    pytest.param(Body(*POOL, nn.Linear(6, 1), nn.Flatten(0)), [ts.Numbers()], id="flat"),
    pytest.param(Body(nn.Conv2d(6, 5, 1), nn.Upsample(scale_factor=2)), [SCORES], id="segmenter"),
    pytest.param(Body(nn.Conv2d(6, 3, 1)), [ts.Numbers()], id="image-of-the-same-shape"),
    pytest.param(Body(nn.Conv2d(6, 4, 3, padding=1)), [ts.Numbers()], id="three-by-three"),
    pytest.param(Body(nn.Flatten(2), nn.Linear(64, 7)), [LAST], id="sequence"),
    pytest.param(Body(), [ts.Numbers()], id="features"),
    pytest.param(nn.Sequential(nn.Flatten(), nn.Softmax(1)), [SCORES], id="probabilities-without-a-layer"),
]


@pytest.mark.parametrize(("model", "expected"), CASES)
def test_guesses(model: nn.Module, expected: list[Any]) -> None:
    answers = reading(model)
    assert kinds(answers) == expected
    assert str(answers).endswith("(assumed; answers= sets it)" if answers.assumed else "(guessed; answers= sets it)")


class Named(nn.Module):
    """A convolution, and a last layer of some name."""

    def __init__(self, name: str, last: nn.Module, **attributes: Any) -> None:
        super().__init__()
        pool = POOL if isinstance(last, nn.Linear) else ()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), *pool)
        self.add_module(name, last)
        self.name = name
        for key, value in attributes.items():
            setattr(self, key, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule(self.name)(self.body(x))


@dataclass
class Config:
    num_labels: int


class EmbeddingNet(Named):
    """By its own name, what its last layer gives are no classes, whatever that is called."""


class SiameseEncoder(Named):
    pass


class EncoderClassifier(Named):
    pass


ASSUMED = [
    pytest.param(lambda: EmbeddingNet("fc", nn.Linear(6, 5)), "fc", id="name-of-the-model"),
    pytest.param(lambda: SiameseEncoder("head", nn.Linear(6, 5)), "head", id="another-name-of-the-model"),
    pytest.param(lambda: nn.Sequential(EmbeddingNet("fc", nn.Linear(6, 5))), "0.fc", id="name-of-a-part"),
    pytest.param(lambda: Named("fc", nn.Linear(6, 128)), "fc", id="width-of-embeddings"),
    pytest.param(lambda: Named("head", nn.Linear(6, 96), num_classes=96), "head", id="width-of-embeddings-twice-told"),
    pytest.param(lambda: Body(*POOL, nn.Linear(6, 5)), "after.2", id="sequential"),
    pytest.param(lambda: Body(*POOL, nn.Linear(6, 5), nn.Sigmoid()), "after.2", id="sigmoid"),
    pytest.param(lambda: Named("linear", nn.Linear(6, 5)), "linear", id="a-name-that-says-nothing"),
    pytest.param(lambda: Named("embedding", nn.Linear(6, 5)), "embedding", id="embedding"),
    pytest.param(lambda: Named("projection_head", nn.Linear(6, 5)), "projection_head", id="projection-head"),
    pytest.param(lambda: Named("last", nn.Linear(6, 5), num_classes=4), "last", id="another-number-of-classes"),
    pytest.param(lambda: Named("flow", nn.Conv2d(6, 2, 1)), "flow", id="maps"),
]


@pytest.mark.parametrize(("build", "layer"), ASSUMED)
def test_scores_that_nothing_but_a_width_speaks_for_are_not_assumed_in_silence(build: Any, layer: str) -> None:
    model = build()
    for ask in (True, False):
        with pytest.warns(AnswersWarning, match=f"come from the layer {layer}, and nothing else says .*Numbers\\(\\)"):
            answers = reading(model, ask=ask)
        assert (answers.assumed, kinds(answers)) == (True, [ts.Scores()])
        assert str(answers).endswith("(assumed; answers= sets it)")
    with pytest.warns(AnswersWarning):
        assert "(assumed; answers= sets it)" in str(ts.evaluate(model, [X], original=model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for wish in (ts.Scores(), ts.Numbers()):
            assert kinds(reading(model, wish=wish)) == [wish]
            ts.evaluate(model, [X], original=model, answers=wish)
        # Class numbers as labels say it too.
        classes = torch.zeros(4, 8, 8, dtype=torch.long) if layer == "flow" else torch.zeros(4, dtype=torch.long)
        assert not reading(model, labels=classes).assumed


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: Named("fc", nn.Linear(6, 5)), id="fc"),
        pytest.param(lambda: Named("class_head", nn.Linear(6, 5)), id="head"),
        pytest.param(lambda: Named("classifier", nn.Conv2d(6, 5, 1)), id="segmenter"),
        pytest.param(lambda: Named("fc", nn.Linear(6, 1000)), id="a-thousand-classes"),
        pytest.param(lambda: Named("classifier", nn.Linear(6, 64)), id="classifier-of-any-width"),
        pytest.param(lambda: Named("last", nn.Linear(6, 5), num_classes=5), id="number-of-classes"),
        pytest.param(lambda: EmbeddingNet("fc", nn.Linear(6, 5), num_classes=5), id="number-and-name"),
        pytest.param(lambda: EncoderClassifier("fc", nn.Linear(6, 5)), id="encoder-of-a-classifier"),
        pytest.param(lambda: Named("last", nn.Linear(6, 5), config=Config(num_labels=5)), id="configuration"),
        pytest.param(lambda: Body(*POOL, nn.Linear(6, 5), nn.Softmax(1)), id="softmax"),
        pytest.param(lambda: Body(*POOL, nn.Linear(6, 5), nn.LogSoftmax(1)), id="log-softmax"),
        pytest.param(lambda: Body(nn.Conv2d(6, 5, 1), nn.LogSoftmax(1)), id="log-softmax-of-maps"),
        pytest.param(lambda: Returns(lambda f, s: {"scores": s}), id="name-of-the-part"),
        pytest.param(lambda: ts.zoo.load_model("zoo:resnet20-cifar"), id="zoo"),
    ],
)
def test_what_says_that_it_classifies_is_guessed_without_a_warning(build: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answers = reading(build())
    assert (kinds(answers), answers.guessed, answers.assumed) == ([ts.Scores()], True, False)


@pytest.mark.slow
def test_everything_that_goes_by_the_answers_prints_what_it_took_them_for() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU(), Named("fc", nn.Linear(6, 5))).eval()
    data = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    guess = "\ncompared: scores of 5 classes along axis 1 (guessed; answers= sets it)"
    weighed = ts.plan(model, budget=ts.Params(0.8), data=data)
    searched = ts.plan(model, budget=ts.Drop(0.5, trials=1), data=data, weights=None)
    unweighed = ts.plan(model, budget=ts.Params(0.8), data=data, weights=None)
    assert [guess in str(plan) for plan in (weighed, searched, unweighed)] == [True, True, False]
    reports = [ts.compress(model, plan, data=data)[1] for plan in (weighed, searched, unweighed)]
    assert [guess in str(report) for report in reports] == [True, True, False]
    assert guess in str(ts.compress(model, unweighed, data=data, refine=8)[1])
    small, _ = ts.compress(model, unweighed, data=data)
    tuned, history = ts.finetune(small, data, teacher=model, epochs=1, learning_rates=1e-4)
    assert guess in str(history)
    assert guess in str(ts.evaluate(tuned, data, original=model))
    wished = ts.plan(model, budget=ts.Params(0.8), data=data, answers=ts.Numbers())
    assert str(wished).endswith("\ncompared: numbers of shape (5,)")


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Body(*POOL), id="pooled-features"),
        pytest.param(Body(*POOL, nn.Linear(6, 5), nn.BatchNorm1d(5)), id="normalised-by-a-layer"),
        pytest.param(Body(*POOL, nn.Linear(6, 5), Unit()), id="unit-length"),
        pytest.param(Body(*POOL, channels=5, kernel=1), id="pointwise-and-normalised"),
        pytest.param(nn.Flatten(), id="no-layer"),
    ],
)
def test_an_embedding_is_never_taken_for_scores(model: nn.Module) -> None:
    with pytest.raises(
        InputError, match=r"may be class scores or an embedding; say which with answers=, Scores\(\) or"
    ):
        reading(model)
    # Where nothing is reported, it is compared as what it surely is.
    assert kinds(reading(model, ask=False)) == [ts.Numbers()]
    assert kinds(reading(model, wish=ts.Scores())) == [ts.Scores()]
    assert kinds(reading(model, wish=ts.Numbers())) == [ts.Numbers()]
    # Labels that are class numbers say it too.
    assert kinds(reading(model, labels=torch.zeros(4, dtype=torch.long))) == [ts.Scores()]


def test_labels_at_every_position_tell_the_axis_of_classes() -> None:
    model = nn.Conv2d(3, 4, 3, padding=1)
    assert kinds(reading(model, labels=torch.zeros(4, 8, 8, dtype=torch.long))) == [ts.Scores()]
    assert kinds(reading(model, labels=torch.zeros(4, 8, 8))) == [ts.Numbers()]


@dataclass
class Output:
    features: Tensor
    logits: Tensor
    loss: Tensor | None = None


class Pair(NamedTuple):
    features: Tensor
    scores: Tensor


class Object:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Returns(nn.Module):
    """Features and scores, in some nesting."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.form = form
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Any:
        features = x.flatten(1)[:, :6]
        return self.form(features, self.head(features))


FORMS = [
    pytest.param(lambda f, s: s, "", id="tensor"),
    pytest.param(lambda f, s: (f, s), "1", id="tuple"),
    pytest.param(lambda f, s: [f, [f, s]], "1.1", id="nested"),
    pytest.param(lambda f, s: {"features": f, "logits": s}, "logits", id="dict"),
    pytest.param(Output, "logits", id="dataclass"),
    pytest.param(Pair, "1", id="named-tuple"),
    pytest.param(lambda f, s: Object(s), "logits", id="object"),
    pytest.param(lambda f, s: {"out": {"a": s}, "ids": s.argmax(1)}, "out.a", id="dict-of-dicts"),
]


@pytest.mark.parametrize(("form", "path"), FORMS)
def test_scores_are_found_in_every_nesting(form: Any, path: str) -> None:
    model = Returns(form)
    answers = reading(model)
    assert (answers.parts[0].path, answers.parts[0].kind) == (path, ts.Scores())
    with torch.no_grad():
        output, tensors = answers.run(model, Batch(0, X, None))
        expected = model.head(X.flatten(1)[:, :6])
        assert torch.equal(answers.read(output)[0], expected)
    assert torch.equal(tensors[0], expected)
    result = ts.evaluate(model, [X], original=model)
    assert (result.agreement, result.likeness, result.measure) == (1.0, 1.0, "agreement")
    assert f"compared: {answers}" in str(result)


class Branches(nn.Module):
    """Several layers whose outputs are answers, and answers that are computed from other layers."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU())
        self.layers = nn.ModuleDict(layers)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = self.body(x)
        return {
            name: layer(maps if name.startswith("map") else maps.mean((2, 3))) for name, layer in self.layers.items()
        }


def test_each_part_is_read_by_the_layer_that_it_comes_from() -> None:
    colour, shape, size = nn.Linear(6, 5), nn.Linear(6, 7), nn.Linear(6, 2)
    # Two classifiers, neither of which is the last layer that was called for both.
    both = reading(Branches(colour=colour, shape=shape))
    assert {part.path: part.kind for part in both.parts} == {"colour": ts.Scores(), "shape": ts.Scores()}
    assert both.assumed
    # Maps of class scores beside numbers, called before them or after them, enlarged or as they are.
    maps = nn.Sequential(OrderedDict(logits=nn.Conv2d(6, 4, 1)))
    for layers in ({"map": maps, "size": size}, {"size": size, "map": maps}):
        answers = reading(Branches(**layers))
        assert [(part.path, part.kind) for part in answers.parts] == [("map", ts.Scores()), ("size", ts.Numbers())]
        assert not answers.assumed
    enlarged = Returns(lambda f, s: {"logits": f[:, :, None, None].expand(-1, -1, 9, 9), "size": s})
    assert {part.path: part.kind for part in reading(enlarged).parts}["logits"] == ts.Scores()
    # Features on the way to the scores are no scores.
    hidden = nn.Sequential(nn.Flatten(), nn.Linear(192, 10), nn.ReLU())

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = hidden, nn.Linear(10, 5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            features = self.fc1(x)
            return features, self.fc2(features)

    assert [(part.path, part.kind) for part in reading(Both()).parts] == [("1", ts.Scores()), ("0", ts.Numbers())]


def test_a_list_with_a_tensor_for_each_sample_is_asked_for() -> None:
    # Parts are told apart by their path: of such a list only the first sample would be compared.
    model = Returns(lambda f, s: list(s[:, None].expand(-1, 3, -1)))
    with pytest.raises(
        InputError, match="a list with a tensor for each sample; say how two of them are compared, with a"
    ):
        reading(model)
    assert not reading(model, ask=False).assumed

    def same(one: list[Tensor], other: list[Tensor]) -> Tensor:
        pairs = zip(one, other, strict=True)
        return torch.stack([(a.argmax(1) == b.argmax(1)).double().mean() for a, b in pairs])

    assert ts.evaluate(model, [X, X[:3]], original=model, answers=same).likeness == 1
    # A list with as many parts as there are samples is something else.
    assert len(reading(Returns(lambda f, s: [s, s, s, s])).parts) == 4


def test_an_unclear_part_is_named() -> None:
    with pytest.raises(InputError, match="the part 'age' of each answer is 6 numbers, which may be class scores or an"):
        reading(Returns(lambda f, s: {"age": f}))


def test_parts_can_be_named() -> None:
    model = Returns(lambda f, s: {"features": f, "scores": s})
    answers = reading(model, wish={"features": ts.Numbers(), "scores": None})
    assert [(part.path, part.kind) for part in answers.parts] == [("features", ts.Numbers())]
    assert str(answers) == "features: numbers of shape (6,)"
    with pytest.raises(InputError, match="names 'embedding', which is no part of what the model returns: features, sc"):
        reading(model, wish={"embedding": ts.Numbers()})
    with pytest.raises(InputError, match=r"answers= takes Scores\(axis\), Numbers\(\), Boxes"):
        reading(model, wish="scores")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="holds no boxes"):
        reading(model, wish=ts.Boxes())
    with pytest.raises(InputError, match="scores of at least two classes along axis 2"):
        reading(model, wish=ts.Scores(axis=2))


def test_wrong_settings_are_refused() -> None:
    for wrong in (
        lambda: ts.Scores(axis=0),
        lambda: ts.Scores(least=0.0),
        lambda: ts.Boxes(iou=1.5),
        lambda: ts.Boxes(score=50),
    ):
        with pytest.raises(InputError):
            wrong()


class Moody(nn.Module):
    """Scores in evaluation mode, scores among others in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Any:
        scores = self.fc(x.flatten(1)[:, :6])
        return (scores, scores[:, :2]) if self.training else scores


def test_training_mode_may_answer_otherwise() -> None:
    model = Moody()
    answers = reading(model)
    model.train()
    output, tensors = answers.run(model, Batch(0, X, None))
    assert torch.equal(answers.read(output)[0], output[0])
    assert [tensor.shape for tensor in tensors] == [(4, 5)]
    with pytest.raises(UnlikeAnswers):
        answers.read({})


def test_a_function_of_two_outputs() -> None:
    def nearness(one: Tensor, other: Tensor) -> Tensor:
        return 1 / (1 + (one - other).abs().flatten(1).sum(1))

    one, other = nn.Linear(6, 5), nn.Linear(6, 5)
    x = X.flatten(1)[:, :6]
    result = ts.evaluate(one, [x[:3], x[3:]], original=other, answers=nearness)
    assert result.likeness == pytest.approx(nearness(one(x), other(x)).double().mean().item(), rel=1e-6)
    assert (result.measure, result.agreement, result.certificate) == ("likeness", None, None)
    with pytest.raises(InputError, match=r"returned 2; a likeness lies in \[0, 1\]"):
        ts.evaluate(one, [x], original=other, answers=lambda a, b: 2.0)

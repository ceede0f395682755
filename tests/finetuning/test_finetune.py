"""Fine-tuning: the plain loop as a twin, the split, the sweep, teachers, and runs that are killed."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import tensigma as ts
from support_nets import batches, small_net
from tensigma.errors import InputError, StoreError
from tensigma.finetuning import FineTuningProgress
from tensigma.finetuning.history import Epoch
from tensigma.finetuning.sweep import ALL, DIVERGED, ELIMINATED, PATIENCE, Sweep
from tensigma.running import hold_out


class Tiny(nn.Module):
    """A convolution, BatchNorm, dropout and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(functional.relu(self.norm(self.conv(x))).mean((2, 3))))


def tiny(seed: int = 0) -> Tiny:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Tiny().eval()


def biased(seed: int = 0) -> Tiny:
    """One that always answers the first class, so that any training is kept."""
    model = tiny(seed)
    model.head.bias.data = torch.tensor([8.0, 0.0, 0.0, 0.0])
    return model


def labelled(count: int = 4, size: int = 8, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Images whose class is the brightest corner: something that can be learnt."""
    images = torch.cat(batches(count, size, pixels=6, seed=seed))
    corners = torch.stack([images[..., i, j].sum(1) for i, j in itertools.product((0, -1), repeat=2)], 1)
    return list(zip(images.split(size), corners.argmax(1).split(size), strict=True))


def state(model: nn.Module) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in model.state_dict().items()}


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for key, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[key]), key


def seeded(seed: int, epoch: int) -> int:
    return seed * 1_000_003 + epoch


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("freeze_bn", [False, True])
def test_one_epoch_is_the_plain_loop(optimizer: str, freeze_bn: bool, seed: int) -> None:
    model, data = biased(seed), labelled(seed=seed)
    tuned, history = ts.finetune(
        model,
        data,
        validation=data,
        epochs=1,
        learning_rates=0.01,
        optimizer=optimizer,
        weight_decay=0.1,
        freeze_bn=freeze_bn,
        seed=seed,
    )
    assert history.epoch == 1
    twin = copy.deepcopy(model).train()
    if freeze_bn:
        twin.norm.eval()
    own = (
        torch.optim.Adam(twin.parameters(), 0.01, weight_decay=0.1)
        if optimizer == "adam"
        else torch.optim.SGD(twin.parameters(), 0.01, momentum=0.9, weight_decay=0.1)
    )
    with torch.random.fork_rng():
        torch.manual_seed(seeded(seed, 1))
        losses = []
        for x, y in data:
            loss = functional.cross_entropy(twin(x), y)
            own.zero_grad()
            loss.backward()
            own.step()
            losses.append(loss.item())
    assert_same(twin, tuned)
    assert history.rates[0].epochs[0].loss == pytest.approx(sum(losses) / len(losses))
    key = "norm.running_mean"
    assert torch.equal(tuned.state_dict()[key], model.state_dict()[key]) == freeze_bn


def test_one_epoch_of_a_teacher_is_the_plain_loop() -> None:
    teacher, model, data = tiny(5), biased(), [x for x, _ in labelled()]
    tuned, history = ts.finetune(
        model, data, validation=data, epochs=1, learning_rates=0.01, teacher=teacher, temperature=3.0, optimizer="sgd"
    )
    twin = copy.deepcopy(model).train()
    own = torch.optim.SGD(twin.parameters(), 0.01, momentum=0.9)
    with torch.random.fork_rng():
        torch.manual_seed(seeded(0, 1))
        for x in data:
            wanted = functional.softmax(teacher(x).detach() / 3, 1)
            log_own = functional.log_softmax(twin(x) / 3, 1)
            loss = 9 * (wanted * (wanted.log() - log_own)).sum(1).mean()
            own.zero_grad()
            loss.backward()
            own.step()
    assert history.measure == "agreement"
    assert history.epoch == 1
    for key, tensor in twin.state_dict().items():
        torch.testing.assert_close(tuned.state_dict()[key], tensor)


class TwoHeads(nn.Module):
    """Class scores at every position, and two numbers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.classifier, self.size = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 1), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.body(x).relu()
        return {"logits": self.classifier(features), "size": self.size(features.mean((2, 3)))}


def test_the_distance_of_a_teacher_is_that_at_every_part_of_the_answers() -> None:
    with torch.random.fork_rng():
        teacher, model = TwoHeads(0).eval(), TwoHeads(1).eval()
    (data,) = batches(1)
    _, history = ts.finetune(
        model, [data], validation=[data], teacher=teacher, epochs=1, learning_rates=0.01, temperature=1.0
    )
    with torch.no_grad():
        own, wanted = model(data), teacher(data)
    log_own, log_wanted = (each["logits"].log_softmax(1) for each in (own, wanted))
    positions = log_own[:, 0].numel()
    divergence = (log_wanted.exp() * (log_wanted - log_own)).sum() / positions
    error = (own["size"] - wanted["size"]).square().mean() / wanted["size"].var(correction=0)
    assert history.start.validation_loss == pytest.approx((divergence + error).item(), rel=1e-4)
    assert history.answers.startswith("logits: scores of 4 classes along axis 1; size: numbers of shape (2,)")


@pytest.mark.slow
def test_learns_and_leaves_everything_as_it_was() -> None:
    model, teacher, data = tiny().train(), tiny(3).train(), labelled(8)
    before, taught, rng = state(model), state(teacher), torch.get_rng_state()
    tuned, history = ts.finetune(model, data, epochs=20, learning_rates=(0.03, 1e-7))
    ts.finetune(model, data, epochs=1, learning_rates=1e-3, teacher=teacher)
    assert torch.equal(torch.get_rng_state(), rng)
    for network, values in ((model, before), (teacher, taught)):
        assert all(torch.equal(network.state_dict()[key], value) for key, value in values.items())
        assert network.training
        assert all(parameter.grad is None for parameter in network.parameters())
    assert tuned.training
    assert history.learning_rate == 0.03
    assert history.best.score > history.start.score + 0.2
    assert history.best.score == max(epoch.score for rate in history.rates for epoch in rate.epochs)
    # What came back is that very epoch.
    held = list(hold_out(data, None, share=0.1, seed=0)[1])
    assert sum(len(x) for x, _ in held) == history.validation_samples == 6
    assert ts.evaluate(tuned, held).top1 == history.best.score


def test_same_seed_same_bits() -> None:
    options: dict[str, Any] = {"epochs": 2, "learning_rates": (0.02, 0.001), "mix": 3}
    first, history = ts.finetune(tiny(), labelled(6), seed=4, **options)
    again, repeated = ts.finetune(tiny(), labelled(6), seed=4, **options)
    assert_same(first, again)
    scores = [[epoch.validation_loss for epoch in rate.epochs] for rate in history.rates]
    assert scores == [[epoch.validation_loss for epoch in rate.epochs] for rate in repeated.rates]
    other, _ = ts.finetune(tiny(), labelled(6), seed=5, **options)
    assert not torch.equal(first.state_dict()["conv.weight"], other.state_dict()["conv.weight"])


def test_never_worse_than_the_model_as_it_came() -> None:
    model, data = tiny(), labelled()
    answers = [(x, model(x).argmax(1)) for x, _ in data]
    tuned, history = ts.finetune(model, answers, epochs=2, learning_rates=50.0)
    assert history.start.score == 1
    assert (history.learning_rate, history.epoch) == (None, 0)
    assert history.best == history.start
    assert_same(tuned, model)


def test_a_rate_that_diverges_ends() -> None:
    tuned, history = ts.finetune(
        tiny(), labelled(), epochs=3, learning_rates=(1e30, 1e-3), optimizer="sgd", momentum=0.0
    )
    assert history.rates[0].ended == DIVERGED
    assert history.rates[0].epochs[-1].diverged
    assert len(history.rates[1].epochs) == 3
    assert all(torch.isfinite(tensor).all() for tensor in tuned.state_dict().values())
    json.dumps(history.to_json(), allow_nan=False)


@pytest.mark.slow
def test_a_compressed_model_learns_from_its_original_without_labels() -> None:
    net = small_net()
    plan = ts.plan(net, norm="frobenius", ranks=ts.Ranks({"pointwise": 2, "hidden": 2}))
    small, _ = ts.compress(net, plan)
    tuned, history = ts.finetune(small, batches(6), teacher=net, epochs=6, learning_rates=(1e-2, 1e-3))
    assert history.best.key > history.start.key
    assert [type(layer) for layer in tuned.modules()] == [type(layer) for layer in small.modules()]


def test_frozen_parameters_stay() -> None:
    model = biased()
    model.conv.requires_grad_(False)
    tuned, _ = ts.finetune(model, labelled(), validation=labelled(), epochs=1, learning_rates=0.05)
    before, after = model.state_dict(), tuned.state_dict()
    assert torch.equal(after["conv.weight"], before["conv.weight"])
    assert not torch.equal(after["head.weight"], before["head.weight"])
    with pytest.raises(InputError, match="requires_grad_"):
        ts.finetune(model.requires_grad_(False), labelled())


def at(epoch: int, score: float, loss: float | None = 1.0) -> Epoch:
    return Epoch(epoch=epoch, loss=loss, validation_loss=loss, score=score, samples=1, seconds=0.0)


def trained(sweep: Sweep, scores: list[list[float | None]]) -> tuple[list[int], dict[int, str]]:
    """The order in which rates train, and how each ended, with given scores (None: diverged)."""
    histories: list[list[Epoch]] = [[] for _ in scores]
    order = []
    while (decision := sweep.decide(histories)).next is not None:
        index = decision.next
        score = scores[index][len(histories[index])]
        epoch = len(histories[index]) + 1
        histories[index].append(at(epoch, 0.0, None) if score is None else at(epoch, score))
        order.append(index)
    return order, decision.ended


def test_all_rates_train_side_by_side() -> None:
    sweep = Sweep(n_rates=2, epochs=2, patience=None, eliminate=False)
    assert trained(sweep, [[0.1, 0.2], [0.3, 0.1]]) == ([0, 1, 0, 1], {0: ALL, 1: ALL})
    assert sweep.n_steps == 4


def test_the_worst_rate_is_given_up_after_each_epoch() -> None:
    sweep = Sweep(n_rates=3, epochs=4, patience=None, eliminate=True)
    scores: list[list[float | None]] = [[0.5, 0.1], [0.2], [0.4, 0.6, 0.1, 0.1]]
    order, ended = trained(sweep, scores)
    assert order == [0, 1, 2, 0, 2, 2, 2]
    assert ended == {1: ELIMINATED, 0: ELIMINATED, 2: ALL}
    assert sweep.n_steps == len(order)


def test_what_diverged_is_the_worst() -> None:
    sweep = Sweep(n_rates=3, epochs=3, patience=None, eliminate=True)
    assert trained(sweep, [[None], [0.2, 0.3, 0.3], [0.4, 0.1]])[1] == {0: DIVERGED, 2: ELIMINATED, 1: ALL}


def test_patience_counts_epochs_without_a_new_best() -> None:
    sweep = Sweep(n_rates=1, epochs=9, patience=2, eliminate=False)
    assert trained(sweep, [[0.1, 0.3, 0.2, 0.4, 0.4, 0.4]]) == ([0] * 6, {0: PATIENCE})


def test_the_loss_decides_between_equal_scores() -> None:
    assert at(1, 0.5, 0.1).key > at(2, 0.5, 0.2).key
    assert at(2, 0.0, 9.0).key > at(1, 0.0, None).key


class Killed(Exception):
    """In the middle of an epoch."""


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("killed_after", [0, 3, 9, 20])
def test_a_killed_run_ends_with_the_same_result(optimizer: str, killed_after: int, tmp_path: Path) -> None:
    model, data = tiny(), DataLoader(TensorDataset(*map(torch.cat, zip(*labelled(5), strict=True))), 8, shuffle=True)
    options: dict[str, Any] = {
        "epochs": 3,
        "learning_rates": (0.02, 0.01, 1e-3),
        "optimizer": optimizer,
        "eliminate": True,
        "mix": 2,
    }
    whole, history = ts.finetune(model, data, **options)
    seen = 0

    def kill(progress: FineTuningProgress) -> None:
        nonlocal seen
        seen += 1
        if seen > killed_after:
            raise Killed

    with pytest.raises(Killed):
        ts.finetune(model, data, checkpoint=tmp_path / "state", progress=kill, **options)
    left = {file.name for file in (tmp_path / "state").iterdir()}
    assert left <= {"run.json", *(f"rate-{index}.safetensors" for index in range(3))}
    resumed, again = ts.finetune(model, data, checkpoint=tmp_path / "state", **options)
    assert_same(whole, resumed)

    def facts(found: ts.FineTuning) -> list[Any]:
        return [[(e.loss, e.validation_loss, e.score) for e in rate.epochs] + [rate.ended] for rate in found.rates]

    assert facts(history) == facts(again)
    assert (history.learning_rate, history.epoch) == (again.learning_rate, again.epoch)
    # What is finished is not done again.
    calls: list[Any] = []
    assert_same(ts.finetune(model, data, checkpoint=tmp_path / "state", progress=calls.append, **options)[0], whole)
    assert not calls


def test_what_a_kill_left_in_its_first_moment_is_no_checkpoint_of_something_else(tmp_path: Path) -> None:
    place = tmp_path / "state"
    place.mkdir()
    (place / ".run.json.partial-999999999").write_text("{")
    ts.finetune(tiny(), labelled(), epochs=1, learning_rates=0.01, checkpoint=place)
    assert sorted(path.name for path in place.iterdir()) == ["rate-0.safetensors", "run.json"]


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "state"
    ts.finetune(tiny(), labelled(), epochs=1, learning_rates=0.01, checkpoint=place)
    with pytest.raises(StoreError, match=r"epochs=1, this one has epochs=2"):
        ts.finetune(tiny(), labelled(), epochs=2, learning_rates=0.01, checkpoint=place)
    with pytest.raises(StoreError, match="with model="):
        ts.finetune(tiny(1), labelled(), epochs=1, learning_rates=0.01, checkpoint=place)
    with pytest.raises(StoreError, match="other validation samples"):
        ts.finetune(tiny(), labelled(seed=9), epochs=1, learning_rates=0.01, checkpoint=place)
    (place / "rate-0.safetensors").write_bytes(b"cut")
    with pytest.raises(StoreError, match=r"rate-0.safetensors cannot be read"):
        ts.finetune(tiny(), labelled(), epochs=1, learning_rates=0.01, checkpoint=place)
    (place / "run.json").write_text("{}")
    with pytest.raises(StoreError, match=r"run.json cannot be read"):
        ts.finetune(tiny(), labelled(), epochs=1, learning_rates=0.01, checkpoint=place)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(StoreError, match="something else"):
        ts.finetune(tiny(), labelled(), checkpoint=tmp_path / "other")


class Reshuffled:
    """Batches in a new order in every pass, told by nothing."""

    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter([self.data[i] for i in torch.randperm(len(self.data)).tolist()])


def test_what_shuffles_unseen_is_not_split() -> None:
    with pytest.raises(InputError, match="another order"):
        ts.finetune(tiny(), Reshuffled(labelled(8)), epochs=3, learning_rates=1e-3)
    ts.finetune(tiny(), Reshuffled(labelled(8)), validation=labelled(2, seed=1), epochs=1, learning_rates=1e-3)


def test_batches_come_in_many_forms() -> None:
    pairs = labelled()
    forms: list[tuple[Any, str | None]] = [
        (pairs, None),
        ([{"pixels": x, "label": y} for x, y in pairs], "pixels"),
        ([(x.numpy(), y.numpy()) for x, y in pairs], None),
    ]
    options: dict[str, Any] = {"epochs": 1, "learning_rates": 0.01}
    first, *others = (ts.finetune(tiny(), data, input=key, **options)[0] for data, key in forms)
    for other in others:
        assert_same(first, other)


def test_wrong_arguments_are_refused() -> None:
    data = labelled()
    with pytest.raises(InputError, match=r"training reads batches more than once.*generator.*DataLoader"):
        ts.finetune(tiny(), (batch for batch in data))
    with pytest.raises(InputError, match=r"training reads validation more than once.*generator"):
        ts.finetune(tiny(), data, validation=(batch for batch in data))
    with pytest.raises(InputError, match=r"no labels.*teacher="):
        ts.finetune(tiny(), [x for x, _ in data])
    with pytest.raises(InputError, match="8 inputs and 3 labels"):
        ts.finetune(tiny(), [(data[0][0], torch.tensor([1, 2, 3]))])
    with pytest.raises(InputError, match="is empty"):
        ts.finetune(tiny(), [])
    with pytest.raises(InputError, match="no sample was held out"):
        ts.finetune(tiny(), [(data[0][0][:1], data[0][1][:1])], seed=1)
    with pytest.raises(InputError, match="at least two samples"):
        ts.finetune(tiny(), [(x[:1], y[:1]) for x, y in data], validation=data)
    for wrong, words in (
        ({"epochs": 0}, "epochs=0"),
        ({"patience": 0}, "patience=0"),
        ({"learning_rates": ()}, "learning_rates"),
        ({"learning_rates": (1e-3, 1e-3)}, "different numbers"),
        ({"learning_rates": -1.0}, "above 0"),
        ({"optimizer": "lion"}, "adam, sgd"),
        ({"temperature": 0.0, "teacher": tiny()}, "temperature"),
        ({"validation_share": 0.9}, "up to 0.5"),
        ({"teacher": nn.Sequential(nn.Flatten(), nn.Linear(108, 7))}, "same classes"),
    ):
        with pytest.raises(InputError, match=words):
            ts.finetune(tiny(), data, **wrong)


def test_progress_tells_the_share_of_the_work() -> None:
    seen: list[FineTuningProgress] = []
    ts.finetune(tiny(), labelled(), epochs=4, learning_rates=(0.1, 0.01), patience=1, progress=seen.append)
    done = [each.done for each in seen]
    assert done == sorted(done)
    assert seen[-1].total is not None
    assert seen[-1].done == seen[-1].total <= 8
    assert seen[0].total == 8
    assert {each.learning_rate for each in seen} == {0.1, 0.01}
    assert all(each.samples > 0 < each.seconds for each in seen)
    shares = [each.share for each in seen if each.share is not None]
    assert len(shares) == len(seen)
    assert shares[-1] == 1.0
    assert seen[-1].remaining == 0


def test_the_history_is_plain_data() -> None:
    _, history = ts.finetune(tiny(), labelled(), epochs=2, learning_rates=(0.1, 0.01), eliminate=True)
    text = json.dumps(history.to_json(), allow_nan=False)
    assert ts.FineTuning.from_json(json.loads(text)) == history
    assert "eliminated" in str(history)
    with pytest.raises(StoreError, match="not a fine-tuning"):
        ts.FineTuning.from_json({})
    with pytest.raises(StoreError, match="damaged"):
        ts.FineTuning.from_json({**history.to_json(), "start": {"epoch": 1}})

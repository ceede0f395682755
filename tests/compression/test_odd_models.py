"""Models that hold more than plain layers: hooks, pruning, parametrisations, inference mode, things no copy takes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import tensigma as ts
from tensigma.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(12, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 16, 24),
        ).eval()


def images() -> Tensor:
    return torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def macs(model: nn.Module) -> int | None:
    return ts.evaluation.size_of(model, images()[:1]).macs


def changed(change: Callable[[nn.Module], object]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = net()
        change(model[2])
        model(images())  # leaves computed tensors behind
        return model

    return build


class Frozen(nn.Module):
    """Switches gradients off in its own forward."""

    def __init__(self, mode: Callable[[], torch.inference_mode | torch.no_grad]) -> None:
        super().__init__()
        self.net, self.mode = net(), mode

    def forward(self, x: Tensor) -> Tensor:
        with self.mode():
            return self.net(x)


class Remembering(nn.Module):
    """Keeps what it computed, with its history."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = net(), {"last": [torch.zeros(1)]}

    def forward(self, x: Tensor) -> Tensor:
        self.seen["last"] = [self.net(x)]
        return self.seen["last"][0]


def built_for_inference() -> nn.Module:
    with torch.inference_mode():
        return net()


def remembering() -> nn.Module:
    model = Remembering().eval()
    model(images())
    return model


MODELS = {
    "pruned": changed(lambda layer: prune.l1_unstructured(layer, "weight", 0.5)),
    "old weight_norm": changed(nn.utils.weight_norm),
    "old spectral_norm": changed(nn.utils.spectral_norm),
    "weight_norm": changed(parametrizations.weight_norm),
    "spectral_norm": changed(parametrizations.spectral_norm),
    "inference_mode inside": lambda: Frozen(torch.inference_mode).eval(),
    "no_grad inside": lambda: Frozen(torch.no_grad).eval(),
    "built in inference_mode": built_for_inference,
    "remembers its outputs": remembering,
}


@pytest.mark.slow
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_they_are_compressed_saved_and_loaded(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    model = build()
    small, report = ts.compress(model, [images()], recipe=ts.Recipe(ranks=ts.Ranks({"*": 4})))
    assert report.compressed
    assert report.before.macs == macs(net())
    assert report.after.macs == macs(small)
    ts.save(small, tmp_path / "small")
    with torch.inference_mode():
        assert torch.equal(ts.load(tmp_path / "small", build())(images()), small(images()))


WITHOUT_GRADIENTS = ("no_grad inside", "inference_mode inside", "built in inference_mode")


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_GRADIENTS)
def test_without_gradients_layers_are_weighed_by_forward_runs(name: str) -> None:
    plan = ts.plan(MODELS[name](), budget=ts.Params(0.6), method="svd", data=[images()])
    assert plan.notes["weighing"]["by"] == "forward runs"


@pytest.mark.parametrize("build", [MODELS[name] for name in WITHOUT_GRADIENTS[:2]], ids=WITHOUT_GRADIENTS[:2])
def test_without_gradients_training_is_refused_with_the_reason(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(InputError, match="no gradients pass through the model"):
        ts.calibrate(build(), [images()], fisher="model")
    with pytest.raises(InputError, match="no gradients pass through the model"):
        ts.finetune(build(), [images(), images()], teacher=net(), epochs=1, learning_rates=(1e-3,))


def test_what_cannot_be_copied_is_named() -> None:
    model = net()
    model[2].lock = threading.Lock()  # type: ignore[assignment]
    plan = ts.plan(model, ranks=ts.Ranks({"*": 4}), norm="frobenius")
    ts.compress(model, plan)  # layers that are replaced are not copied
    model[1].lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"cannot be copied: its attribute 1\.lock is a lock"):
        ts.compress(model, plan)


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_layers_with_hooks_stay_dense_with_the_reason(kind: str, tmp_path: Path) -> None:
    model = net()
    calls: list[str] = []

    handle = getattr(model[2], kind)(lambda *_: calls.append("called"))
    plan = ts.plan(model, ranks=ts.Ranks({"*": 4}), norm="frobenius")
    assert "hooks, which a replaced layer would lose; remove them first" in str(plan["2"].reason)
    small, _ = ts.compress(model, plan)
    calls.clear()
    small(images()).sum().backward()
    assert calls
    # Neither are they lost when a model is loaded.
    handle.remove()
    ts.save(ts.compress(model, ts.plan(model, ranks=ts.Ranks({"*": 4}), norm="frobenius"))[0], tmp_path / "small")
    getattr(model[2], kind)(lambda *_: None)
    with pytest.raises(InputError, match=r"layer '2' of the model has .*hooks, which it would lose"):
        ts.load(tmp_path / "small", model)


def set_forward(layer: nn.Module) -> None:
    plain = layer.forward
    layer.forward = lambda x: 2 * plain(x)


#: What a layer carries besides its weights, in words.
CARRIED = {
    "a forward on the object": (set_forward, "methods set on the object"),
    "a hook on the gradient": (lambda layer: layer.weight.register_hook(lambda gradient: gradient), "hooks on its"),
    "a hook after the gradient": (
        lambda layer: layer.weight.register_post_accumulate_grad_hook(lambda parameter: None),
        "hooks on its parameters",
    ),
}


@pytest.mark.parametrize(("change", "words"), CARRIED.values(), ids=CARRIED)
def test_so_do_layers_that_carry_anything_else(change: Callable[[nn.Module], object], words: str) -> None:
    model = net()
    change(model[2])
    plan = ts.plan(model, ranks=ts.Ranks({"*": 4}), norm="frobenius")
    assert f"it has {words}" in str(plan["2"].reason)
    assert plan["4"].reason is None


def test_a_batchnorm_with_a_forward_on_the_object_is_not_folded() -> None:
    model = nn.Sequential(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 12, 3)).eval()
    set_forward(model[1])
    plan = ts.plan(model, ts.calibrate(model, [images()]), budget=ts.Bytes(0.5))
    assert not plan.folding.layers
    assert "methods set on the object" in plan.folding.left["1"]


@pytest.mark.parametrize("parametrize", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrised_layers_count_in_budgets_of_macs(parametrize: Callable[[nn.Module], nn.Module]) -> None:
    model = net()
    parametrize(model[2])
    stats = ts.calibrate(model, [images()])
    plan = ts.plan(model, stats, budget=ts.Macs(0.9))
    assert plan.before.macs == macs(model)
    assert plan.after.macs <= 0.9 * plan.before.macs
    small, _ = ts.compress(model, plan, stats)
    assert macs(small) == plan.after.macs

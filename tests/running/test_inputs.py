"""What a model is called with: single tensors, several arguments, lists of images of different sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensigma as ts
from tensigma.errors import InputError
from tensigma.running import Batches, Several, hold_out, mixed


def images(*sizes: int) -> list[Tensor]:
    return [torch.full((3, size, size + 1), float(size)) for size in sizes]


class Two(nn.Module):
    """An image network that is also told something."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.body = nn.Conv2d(16, 16, 3)
        self.told = nn.Linear(4, 16)
        self.fc = nn.Linear(16, 5)

    def forward(self, image: Tensor, facts: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        seen = self.body(self.conv(image).relu()).relu().mean((2, 3))
        return {"logits": self.fc(seen + scale * self.told(facts))}


def dicts(n: int = 3, seed: int = 0) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "image": torch.randn(8, 3, 8, 8, generator=generator),
            "facts": torch.randn(8, 4, generator=generator),
            "id": list(range(8)),
        }
        for _ in range(n)
    ]


FORMS = [
    pytest.param(dicts(), ("image", "facts"), id="keys"),
    pytest.param([{key: batch[key] for key in ("image", "facts")} for batch in dicts()], "**", id="all-of-a-dict"),
    pytest.param([(batch["image"], batch["facts"]) for batch in dicts()], "*", id="all-of-a-tuple"),
    pytest.param([(batch["id"], batch["image"], batch["facts"]) for batch in dicts()], (1, 2), id="positions"),
]


@pytest.mark.parametrize(("data", "key"), FORMS)
def test_several_inputs_are_passed_together(data: list[Any], key: Any) -> None:
    model = Two().eval()
    assert [len(batch) for batch in Batches(data, input=key, max_samples=11)] == [8, 3]
    assert set(ts.calibrate(model, data, input=key)) == {"conv", "body", "told", "fc"}
    assert ts.evaluate(model, data, original=model, input=key).agreement == 1


@pytest.mark.slow
def test_several_inputs_from_calibration_to_evaluation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data, key = Two().eval(), dicts(), ("image", "facts")
    small, report = ts.compress(model, data, budget=ts.Params(0.6), input=key)
    assert report.after.params <= 0.6 * report.before.params
    result = ts.evaluate(small, data, original=model, input=key, latency=True, rounds=1)
    assert result.samples == 24
    assert result.likeness is not None
    assert result.answers == "logits: scores of 5 classes along axis 1 (guessed; answers= sets it)"
    assert result.size.macs is not None
    assert result.size.macs < result.original.size.macs  # type: ignore[union-attr,operator]
    _, history = ts.finetune(small, data, teacher=model, input=key, epochs=1, learning_rates=1e-4, mix=2)
    assert history.answers == result.answers
    half = ts.quantize(small, tmp_path / "half", data, precision="fp16", original=model, input=key, latency=False)
    assert half.after.agreement == pytest.approx(half.before.agreement, abs=0.05)
    eight = ts.quantize(small, tmp_path / "small.onnx", data, original=model, input=key, latency=False)
    assert eight.after.agreement == pytest.approx(eight.before.agreement, abs=0.1)
    scaled = [{**batch, "scale": 1.0} for batch in data]
    with pytest.raises(InputError, match=r"only models whose inputs are tensors become ONNX files; .*; scale: float"):
        ts.quantize(small, tmp_path / "small.onnx", scaled, input=(*key, "scale"))


def test_arguments_that_are_no_samples_belong_to_all() -> None:
    several = Several((torch.arange(4.0),), {"scale": 2.0, "table": torch.ones(7, 2)})
    half = several[:2]
    assert (len(half), half.kwargs["scale"], half.kwargs["table"].shape) == (2, 2.0, (7, 2))


def test_what_cannot_be_called_is_refused() -> None:
    for key, message in (
        (("image", "nothing"), "no entry 'nothing'"),
        ("*", "takes the items of a tuple"),
        (("id",), "is a tensor with one entry a sample"),
    ):
        with pytest.raises(InputError, match=message):
            next(iter(Batches(dicts(), input=key)))
    with pytest.raises(InputError, match=r'input=, one of .* or pass all of it with input="\*\*"'):
        next(iter(Batches(dicts())))


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param((images(4, 5), [{"boxes": 1}, {"boxes": 2}]), id="with-targets"),
        pytest.param([images(4, 5), [{"boxes": 1}, {"boxes": 2}]], id="lists"),
        pytest.param((tuple(images(4, 5)), ({"boxes": 1}, {"boxes": 2})), id="tuples"),
        pytest.param({"images": images(4, 5), "targets": [{"boxes": 1}, {"boxes": 2}]}, id="dict"),
    ],
)
def test_lists_of_images_are_batches(batch: Any) -> None:
    key = "images" if isinstance(batch, dict) else None
    (found,) = Batches([batch], input=key)
    assert [tuple(image.shape) for image in found.inputs] == [(3, 4, 5), (3, 5, 6)]
    assert [target["boxes"] for target in found.targets] == [1, 2]
    (cut,) = Batches([batch], input=key, max_samples=1)
    assert (len(cut), len(cut.targets)) == (1, 1)


@pytest.mark.parametrize("count", [1, 2])
def test_lists_of_images_are_held_out_and_mixed(count: int) -> None:
    data = [(images(*range(n, n + 5)), [{"n": k} for k in range(n, n + 5)]) for n in (4, 9)]
    training, validation = hold_out(data, None, share=0.2, seed=0)
    sides = [[(x, y) for pair in side for x, y in zip(*pair, strict=True)] for side in (training, validation)]
    assert [len(side) for side in sides] == [8, 2]
    assert sorted(y["n"] for side in sides for _, y in side) == list(range(4, 14))
    for inputs, labels in mixed(training, count, torch.Generator().manual_seed(1)):
        assert [int(image[0, 0, 0]) for image in inputs] == [label["n"] for label in labels]

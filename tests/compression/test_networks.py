"""Networks that are no image classifiers: segmenters, a U-Net, a pitch tracker with real weights, a 3-D network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import tensigma as ts
from tensigma.compression import reestimate_bn_

pytestmark = pytest.mark.slow
DATA = os.environ.get("TENSIGMA_DATA", "")


def images(n: int = 4, side: int = 32, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(seed))


#: One layer of each is enough: others are thousands of channels wide.
SEGMENTERS = [
    ("lraspp_mobilenet_v3_large", "classifier.cbr.0"),
    ("fcn_resnet50", "backbone.layer1.0.conv2"),
    ("deeplabv3_mobilenet_v3_large", "backbone.4.block.0.0"),
]


@pytest.mark.parametrize(("name", "layer"), SEGMENTERS)
def test_segmenters_of_torchvision(name: str, layer: str) -> None:
    torch.manual_seed(0)
    model = ts.zoo.load_model(f"torchvision:{name}?num_classes=5")
    reestimate_bn_(model, [images(seed=1)])
    stats = ts.calibrate(model, [images()], layers=layer)
    small, _ = ts.compress(model, ts.plan(model, stats, ranks=ts.Ranks({layer: 2}), layers=[layer], skip=()), stats)
    masks = torch.randint(0, 5, (4, 32, 32), generator=torch.Generator().manual_seed(0))
    result = ts.evaluate(small, [(images(), masks)], original=model)
    assert result.answers == "out: scores of 5 classes along axis 1 (guessed; answers= sets it)"
    for share in (result.position_agreement, result.iou, result.label_iou, result.top1):
        assert share is not None
        assert 0 < share < 1
    assert result.original is not None
    assert (result.original.iou, result.original.agreement) == (1, 1)


class UNet(nn.Module):
    """Down, up, and past."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.down1, self.down2 = self.block(3, 12), self.block(12, 24)
        self.up = nn.ConvTranspose2d(24, 12, 2, stride=2)
        self.out = self.block(24, 12)
        self.head = nn.Conv2d(12, classes, 1)

    @staticmethod
    def block(n_in: int, n_out: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(n_in, n_out, 3, padding=1), nn.ReLU(), nn.Conv2d(n_out, n_out, 3, padding=1), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        near = self.down1(x)
        far = self.up(self.down2(nn.functional.max_pool2d(near, 2)))
        return self.head(self.out(torch.cat([near, far], 1)))


@pytest.fixture(scope="module")
def unet() -> UNet:
    torch.manual_seed(0)
    return UNet().eval()


BATCHES = [images(8, 16, seed) for seed in range(3)]


def test_a_unet_through_everything(unet: UNet, tmp_path: Path) -> None:
    small, report = ts.compress(unet, BATCHES, budget=ts.Params(0.5), refine=48)
    assert report.notes["weighing"]["answers"].startswith("scores of 4 classes along axis 1")
    assert report.notes["refinement"]["loss_after"] <= report.notes["refinement"]["loss_before"]
    held_out = images(8, 16, seed=7)
    before = ts.evaluate(small, [held_out], original=unet)
    tuned, history = ts.finetune(small, BATCHES, teacher=unet, epochs=3, learning_rates=1e-3)
    assert history.measure == "agreement"
    assert history.best.key >= history.start.key
    after = ts.evaluate(tuned, [held_out], original=unet)
    assert before.position_agreement is not None
    assert after.position_agreement is not None
    assert after.position_agreement > 0.5
    eight = ts.quantize(small, tmp_path / "small.onnx", BATCHES, original=unet, rounds=1)
    assert eight.after.position_agreement is not None
    assert abs(eight.after.position_agreement - (eight.before.position_agreement or 0)) < 0.1
    assert eight.after.answers.startswith("scores of 4 classes along axis 1")


def test_drop_counts_positions(unet: UNet) -> None:
    plan = ts.plan(unet, budget=ts.Drop(0.1, trials=3), data=BATCHES, weights=None)
    note = plan.notes["drop"]
    assert (note["measure"], note["kept"] >= 0.9) == ("agreement", True)
    with_masks = [(x, unet(x).argmax(1)) for x in BATCHES]
    labelled = ts.plan(unet, budget=ts.Drop(0.1, trials=3), data=with_masks, weights=None)
    assert labelled.notes["drop"]["measure"] == "accuracy"
    assert labelled.notes["drop"]["original"] == 1


def test_masks_as_labels_train(unet: UNet) -> None:
    data = [(x, unet(x).argmax(1)) for x in BATCHES]
    torch.manual_seed(1)  # other weights than those that made the labels
    _, history = ts.finetune(UNet(), data, epochs=4, learning_rates=1e-2)
    assert history.measure == "top1"
    assert history.best.score > history.start.score


def test_a_regressor_by_its_numbers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(16 * 16, 1)
    ).eval()
    data = [images(8, 8, seed) for seed in range(5)]
    plan = ts.plan(model, budget=ts.Drop(0.2, trials=3), data=data, weights=None)
    assert plan.notes["drop"]["measure"] == "closeness"
    small, _ = ts.compress(model, plan, data=data)
    result = ts.evaluate(small, [images(8, 8, 9)], original=model)
    assert result.error is not None
    assert result.likeness == pytest.approx(1 - result.error)
    assert result.certificate is None
    _, history = ts.finetune(small, data, teacher=model, epochs=2, learning_rates=1e-4)
    assert history.measure == "closeness"
    targets = [(x, model(x).detach()) for x in data]
    _, by_numbers = ts.finetune(small, targets, epochs=1, learning_rates=1e-4)
    assert by_numbers.measure == "closeness"
    assert by_numbers.start.score == pytest.approx(history.start.score, abs=1e-4)


def test_a_network_of_three_axes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 3, 1)
    ).eval()
    clips = [torch.randn(2, 1, 4, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    small, report = ts.compress(model, clips, budget=ts.Params(0.5))
    assert report.after.params <= 0.5 * report.before.params
    result = ts.evaluate(small, clips, original=model)
    assert result.answers.startswith("scores of 3 classes along axis 1")
    assert result.position_agreement is not None
    assert result.position_agreement > 0.5


def test_a_network_for_video_of_torchvision(tmp_path: Path) -> None:
    """Its convolutions are of a subclass of nn.Conv3d that is only built in another way."""

    def build() -> nn.Module:
        return ts.zoo.load_model("torchvision:r3d_18?num_classes=5")

    torch.manual_seed(0)
    model = build()
    clips = [torch.randn(2, 3, 4, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    reestimate_bn_(model, clips)
    stats = ts.calibrate(model, clips, layers="layer1.*")
    ranks, options = ts.Ranks({"layer1.*": 12}), {"max_sweeps": 2}
    plan = ts.plan(model, stats, ranks=ranks, layers="layer1.*", skip=(), options=options)
    assert {entry.name for entry in plan.compressed} == {f"layer1.{k}.conv{n}.0" for k in (0, 1) for n in (1, 2)}
    small, report = ts.compress(model, plan, stats)
    assert report.after.params == plan.after.params < report.before.params
    assert ts.evaluate(small, clips, original=model).answers.startswith("scores of 5 classes along axis 1")
    ts.save(small, tmp_path / "small")
    loaded = ts.load(tmp_path / "small", build())
    with torch.no_grad():
        assert torch.equal(loaded(clips[0]), small(clips[0]))


class Crepe(nn.Module):
    """The pitch tracker CREPE, tiny: six wide convolutions over 1,024 samples of sound, 360 bins of pitch."""

    CHANNELS = (1, 128, 16, 16, 16, 32, 64)

    def __init__(self) -> None:
        super().__init__()
        for n in range(1, 7):
            kernel, stride = ((512, 1), (4, 1)) if n == 1 else ((64, 1), 1)
            setattr(self, f"conv{n}", nn.Conv2d(self.CHANNELS[n - 1], self.CHANNELS[n], kernel, stride))
            setattr(self, f"conv{n}_BN", nn.BatchNorm2d(self.CHANNELS[n], eps=1e-3))
        self.classifier = nn.Linear(256, 360)

    def forward(self, x: Tensor) -> Tensor:
        for n in range(1, 7):
            x = nn.functional.pad(x, (0, 0, 254, 254) if n == 1 else (0, 0, 31, 32))
            x = getattr(self, f"conv{n}_BN")(getattr(self, f"conv{n}")(x).relu())
            x = nn.functional.max_pool2d(x, (2, 1))
        return self.classifier(x.permute(0, 2, 1, 3).flatten(1)).sigmoid()


def tones(pitches: Tensor, seed: int = 0) -> Tensor:
    """Frames of a tone with some of its harmonics, at any phase."""
    generator = torch.Generator().manual_seed(seed)
    moments = torch.arange(1024) / 16_000
    phases = 6.28 * torch.rand(len(pitches), 3, 1, generator=generator)
    waves = torch.sin(6.2832 * pitches[:, None, None] * torch.tensor([1.0, 2.0, 3.0])[:, None] * moments + phases)
    frames = (waves * torch.tensor([1.0, 0.5, 0.25])[:, None]).sum(1)
    frames = (frames - frames.mean(1, keepdim=True)) / frames.std(1, keepdim=True)
    return frames[:, None, :, None]


@pytest.mark.real
@pytest.mark.skipif(not DATA, reason="TENSIGMA_DATA does not name the folder of real models and images")
def test_a_pitch_tracker_with_real_weights() -> None:
    model = Crepe()
    model.load_state_dict(load_file(Path(DATA) / "audio" / "crepe_tiny.safetensors"))
    model.eval()
    generator = torch.Generator().manual_seed(3)
    data = [tones(80 * 2 ** (4 * torch.rand(32, generator=generator)), seed) for seed in range(4)]
    # Of the first layers, a patch has up to 8,192 values: more work than all else.
    layers = ("conv5", "conv6", "classifier")
    stats = ts.calibrate(model, data, layers=layers)
    plan = ts.plan(model, stats, budget=ts.Params(0.8), layers=layers, method="svd", data=data)
    assert plan.notes["weighing"]["answers"].startswith("scores of 360 classes along axis 1")
    small, report = ts.compress(model, plan, stats, data=data)
    assert report.after.params <= 0.8 * report.before.params
    pitches = torch.tensor([110.0, 220.0, 440.0, 880.0])
    with torch.no_grad():
        bins = [network(tones(pitches, seed=8)).argmax(1) for network in (model, small)]
    hertz = [10 * 2 ** ((20 * each + 1997.38) / 1200) for each in bins]
    assert torch.allclose(hertz[0], pitches, rtol=0.03)
    assert torch.allclose(hertz[1], pitches, rtol=0.06)
    result = ts.evaluate(small, [tones(80 * 2 ** (4 * torch.rand(32, generator=generator)), 11)], original=model)
    assert result.answers.startswith("scores of 360 classes along axis 1")

    def within_a_semitone(one: Tensor, other: Tensor) -> Tensor:
        return ((one.argmax(1) - other.argmax(1)).abs() <= 5).double()

    near = ts.evaluate(small, data, original=model, answers=within_a_semitone)
    assert near.likeness is not None
    assert near.likeness > 0.6


def test_a_head_of_convolutions_over_whole_maps() -> None:
    """As of VGG in timm: few rows of many features, for which no Σ is made."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 84, 3, padding=1), nn.ReLU(), nn.Conv2d(84, 40, 7), nn.Flatten(), nn.Linear(40, 5)
    ).eval()
    data = [images(n=16, side=7)]
    stats = ts.calibrate(model, data)
    assert stats["2"].rows is not None
    plan = ts.plan(model, stats, budget=ts.Params(0.5), weights=None)
    assert plan["2"].label.startswith("svd")
    small, report = ts.compress(model, plan, stats, sequential=False)
    assert isinstance(small, nn.Sequential)
    before, after = model[:3](data[0]), small[:3](data[0])
    spread = before - before.mean(0)
    assert report["2"].error == pytest.approx(((after - before).norm() / spread.norm()).item(), rel=1e-3, abs=1e-6)
    assert ts.compress(model, plan, stats, data=data)[1].after.params == plan.after.params

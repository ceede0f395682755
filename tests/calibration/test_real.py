"""A trained network on real images: the moments of its layers against the naive unfold."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tensigma as ts
from reference_calibration import naive_moments
from tensigma.errors import CalibrationWarning

DATA = os.environ.get("TENSIGMA_DATA", "")


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.skipif(not DATA, reason="TENSIGMA_DATA does not name the folder of real models and images")
def test_squeezenet_on_photographs():
    model = ts.zoo.load_model("torchvision:squeezenet1_1")
    model.load_state_dict(load_file(Path(DATA) / "imagenet" / "squeezenet1_1.safetensors"))
    image = importlib.import_module("PIL.Image")
    files = sorted((Path(DATA) / "imagenet" / "calib").glob("*/*.jpg"))[:4]
    pixels = torch.stack([torch.from_numpy(np.array(image.open(file).convert("RGB"))[:192, :192]) for file in files])
    x = (pixels.permute(0, 3, 1, 2) / 255 - 0.45) / 0.225
    names = ["features.0", "features.3.expand3x3", "features.6.squeeze", "features.12.expand3x3"]
    seen: dict[str, torch.Tensor] = {}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda layer, args, name=name: seen.update({name: args[0].clone()})
        )
        for name in names
    ]
    model.eval()
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    stats = ts.calibrate(model, x.split(2), layers=names)
    for name in names:
        count, mean, covariance, gram = naive_moments(model.get_submodule(name), [seen[name]])
        assert stats[name].count == count
        for found, wanted in ((stats[name].mean, mean), (stats[name].covariance, covariance), (stats[name].gram, gram)):
            # Batches of two and of four may differ in the last digits of the activations themselves.
            assert (found.double() - wanted).norm() < 2e-6 * wanted.norm()


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.skipif(not DATA, reason="TENSIGMA_DATA does not name the folder of real models and images")
@pytest.mark.filterwarnings("error:the data does not look like:tensigma.errors.CalibrationWarning")
def test_a_forgotten_normalisation_is_noticed_with_published_weights():
    """They come without the number of batches that training has seen."""
    folder = Path(DATA) / "cifar10"
    model = ts.zoo.load_model("zoo:resnet20-cifar", folder / "resnet20.safetensors")
    data = ts.zoo.load_data(f"cifar10:{folder}", samples=64)
    ts.calibrate(model, data)
    (batch,) = ts.running.Batches(data)
    for x in (batch.inputs / 4, 60 * batch.inputs + 120):
        with pytest.raises(CalibrationWarning, match="its first BatchNorm"):
            ts.calibrate(model, [x])

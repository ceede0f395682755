"""Data that does not look like the training data is noticed at the first BatchNorm."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import tensigma as ts
from tensigma.errors import CalibrationWarning, InputError


def images() -> Tensor:
    """Images as a usual normalisation leaves them."""
    return torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def trained(*, counted: bool = True) -> nn.Module:
    """Published weights often come without the number of batches, which is 0 then."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
        for _ in range(60):
            model(images() + 0.1 * torch.randn(32, 3, 8, 8))
    if not counted:
        for key, buffer in model.named_buffers():
            if key.endswith("num_batches_tracked"):
                buffer.zero_()
    return model.eval()


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "not counted"])
@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        pytest.param(lambda x: x, False, id="as trained"),
        pytest.param(lambda x: 1.3 * x + 0.2, False, id="a little brighter"),
        pytest.param(lambda x: 58 * x + 115, True, id="0 to 255"),
        pytest.param(lambda x: 0.225 * x + 0.45, True, id="0 to 1"),
        pytest.param(lambda x: x + 20, True, id="another mean"),
    ],
)
def test_a_forgotten_normalisation_is_noticed(change, wrong: bool, counted: bool) -> None:
    model = trained(counted=counted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if not wrong:
            ts.calibrate(model, [change(images())])
            return
        with pytest.raises(CalibrationWarning, match=r"at '1', its first BatchNorm, the variance is .* times"):
            ts.calibrate(model, [change(images())])


def test_untrained_models_and_models_without_batchnorm_say_nothing() -> None:
    for model in (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), nn.Sequential(nn.Conv2d(3, 8, 3))):
        ts.calibrate(model.eval(), [255 * images()])


def test_an_iterator_that_has_ended_is_not_taken_for_no_data() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    stats = ts.calibrate(model, [images()])
    plan = ts.plan(model, stats, ranks=ts.Ranks({"*": 2}))
    for call in (
        lambda: ts.compress(model, plan, stats, data=iter([])),
        lambda: ts.plan(model, ranks=ts.Ranks({"*": 2}), data=iter([])),
    ):
        with pytest.raises(InputError, match="data is an iterator that has ended"):
            call()
    # One that has not ended still serves.
    ts.compress(model, plan, data=iter([images()]))

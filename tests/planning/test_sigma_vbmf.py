"""VBMF on what a kernel does: the twin multiplies by a root of Σ and unfolds by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import tensigma as ts
from reference import psd_root
from support_nets import batches, small_net
from tensigma.errors import InputError
from tensigma.linalg import Metric, alpha_rank, vbmf_rank


def structured(seed: int) -> tuple[nn.Sequential, ts.Calibration]:
    """A convolution with a few strong directions, on images with a few strong channels."""
    generator = torch.Generator().manual_seed(seed)
    conv = nn.Conv2d(10, 24, 3, padding=1, bias=False)
    left, right = torch.randn(24, 4, generator=generator), torch.randn(4, 90, generator=generator)
    with torch.no_grad():
        conv.weight.copy_((left @ right + 0.5 * torch.randn(24, 90, generator=generator)).view(24, 10, 3, 3))
    images = torch.randn(40, 10, 6, 6, generator=generator) * torch.logspace(0, -2, 10)[:, None, None] + 0.3
    net = nn.Sequential(conv)
    return net, ts.calibrate(net, [images])


@pytest.mark.parametrize("norm", ["sigma", "centred"])
@pytest.mark.parametrize("alpha", [0.6, 1.0])
def test_ranks_are_those_of_the_kernel_times_the_root(seed: int, norm: str, alpha: float) -> None:
    net, stats = structured(seed)
    own = stats["0"]
    sigma = (own.gram if norm == "sigma" else own.covariance).double().numpy().reshape(90, 90)
    weight = net[0].weight.detach().double().numpy()  # type: ignore[operator]
    seen = (weight.reshape(24, 90) @ psd_root(sigma)).reshape(24, 10, 3, 3)

    def rank(mode: int) -> int:
        return vbmf_rank(torch.from_numpy(np.moveaxis(seen, mode, 0).reshape(seen.shape[mode], -1)))

    wanted = {
        "tucker2": (alpha_rank(rank(0), 24, alpha), alpha_rank(rank(1), 10, alpha)),
        "cp": (alpha_rank(max(map(rank, range(4))), 90, alpha),),
        "svd": (alpha_rank(rank(0), 24, alpha),),
    }
    for method, ranks in wanted.items():
        options = {"method": method, "norm": norm, "skip": (), "saving": "none"}
        plan = ts.plan(net, stats, ranks=ts.SigmaVBMF(alpha), **options)  # type: ignore[arg-type]
        assert plan["0"].ranks == ranks


def test_without_data_it_is_the_rule_on_weights() -> None:
    for method in ("tucker2", "cp", "svd"):
        plans = [
            ts.plan(small_net(), ranks=rule(0.7), norm="frobenius", method=method) for rule in (ts.VBMF, ts.SigmaVBMF)
        ]
        assert plans[0] == plans[1]


def test_it_sees_that_data_has_few_directions() -> None:
    """Weights of full rank on inputs of rank 3: the rule on weights cannot know, this one does."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(40, 30)
    with torch.no_grad():
        layer.weight.copy_(torch.linalg.qr(torch.randn(40, 30, generator=generator))[0].T)
    net = nn.Sequential(layer)
    inputs = torch.randn(500, 3, generator=generator) @ torch.randn(3, 40, generator=generator)
    noisy = inputs + 1e-3 * torch.randn(500, 40, generator=generator)
    stats = ts.calibrate(net, [noisy])
    plan = ts.plan(net, stats, ranks=ts.SigmaVBMF(1.0))
    assert plan["0"].ranks == (3,)


def test_rows_whiten_as_their_gram_does(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(7, 12, generator=generator, dtype=torch.float64)
    matrix = torch.randn(5, 12, generator=generator, dtype=torch.float64)
    by_rows = Metric.from_rows(rows).whiten(matrix)
    by_gram = Metric.from_gram(rows.T @ rows / 7).whiten(matrix)
    torch.testing.assert_close(by_rows, by_gram)
    torch.testing.assert_close(by_rows @ by_rows.T, Metric.from_rows(rows).outputs(matrix))


def test_groups_share_the_largest_ranks() -> None:
    net = small_net()
    stats = ts.calibrate(net, batches())
    plan = ts.plan(net, stats, ranks=ts.SigmaVBMF(1.0), layers=["grouped"], saving="none")
    assert plan["grouped"].ranks is not None


@pytest.mark.parametrize("alpha", [-1, True, "x"])
def test_alpha_is_checked(alpha: float) -> None:
    with pytest.raises(InputError, match="alpha"):
        ts.SigmaVBMF(alpha)

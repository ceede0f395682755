"""Certificates: exact, never claiming more than they may, and part of every evaluation beside an original."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import tensigma as ts
from reference import binomial_bound
from support_nets import batches, small_net
from tensigma.errors import InputError, StoreError
from tensigma.evaluation import Certificate


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.999])
@pytest.mark.parametrize(("samples", "agreed"), [(1, 0), (1, 1), (7, 3), (40, 40), (40, 39), (200, 150)])
def test_the_bound_is_that_of_summed_probabilities(samples: int, agreed: int, confidence: float) -> None:
    bound = Certificate(samples=samples, agreed=agreed, confidence=confidence).bound
    assert bound == pytest.approx(binomial_bound(samples, agreed, confidence), abs=1e-9)
    assert bound <= agreed / samples


@pytest.mark.parametrize("share", [0.5, 0.9, 0.97, 0.995])
@pytest.mark.parametrize("samples", [10, 60])
def test_the_bound_holds_as_often_as_it_says(samples: int, share: float) -> None:
    """Over all that may come out, weighed by its probability."""
    covered = sum(
        math.comb(samples, k) * share**k * (1 - share) ** (samples - k)
        for k in range(samples + 1)
        if Certificate(samples=samples, agreed=k, confidence=0.95).bound <= share
    )
    assert covered >= 0.95


def test_the_bound_holds_over_random_draws() -> None:
    share, samples, seeds = 0.93, 300, 400
    bounds = {k: Certificate(samples=samples, agreed=k, confidence=0.9).bound for k in range(240, samples + 1)}
    held = 0
    for seed in range(seeds):
        draws = torch.rand(samples, generator=torch.Generator().manual_seed(seed))
        held += bounds[int((draws < share).sum())] <= share
    # Four standard deviations of the count.
    assert held >= seeds * 0.9 - 4 * math.sqrt(seeds * 0.09)
    assert held < seeds


def test_words_claim_no_more_than_the_bound() -> None:
    for samples, agreed in ((1000, 990), (333, 333), (50, 20)):
        certificate = Certificate(samples=samples, agreed=agreed)
        said = float(str(certificate).split("at least ")[1].split(" %")[0]) / 100
        assert certificate.bound - 0.001 <= said <= certificate.bound


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": 0, "agreed": 0},
        {"samples": 5, "agreed": 6},
        {"samples": 5, "agreed": -1},
        {"samples": 5.5, "agreed": 1},
        {"samples": 5, "agreed": 5, "confidence": 1.0},
        {"samples": 5, "agreed": 5, "confidence": True},
    ],
)
def test_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Certificate(**wrong)


@pytest.mark.slow
def test_evaluations_carry_it() -> None:
    net = small_net()
    small, _ = ts.compress(net, batches(), budget=ts.Params(0.5))
    held_out = batches(seed=7)
    result = ts.evaluate(small, held_out, original=net, confidence=0.8)
    assert result.certificate is not None
    assert result.agreement is not None
    assert (result.certificate.samples, result.certificate.agreed) == (24, round(24 * result.agreement))
    data = result.to_json()
    assert set(data["certificate"]) == {"samples", "agreed", "confidence", "bound", "meaning"}
    assert data["certificate"]["bound"] == result.certificate.bound < result.agreement
    assert ts.Evaluation.from_json(data) == result
    assert str(result).endswith(str(result.certificate))
    assert result.original is not None
    assert result.original.certificate is None
    older = {key: value for key, value in data.items() if key != "certificate"}
    assert ts.Evaluation.from_json(older).certificate is None
    with pytest.raises(StoreError, match="certificate is damaged"):
        ts.Evaluation.from_json({**data, "certificate": {"samples": 3}})


def test_nothing_is_certified_without_an_original_or_where_it_would_be_dishonest() -> None:
    data = [torch.eye(6)]
    assert ts.evaluate(nn.Identity(), data).certificate is None
    assert ts.evaluate(nn.Identity(), data, original=nn.Identity(), confidence=None).certificate is None
    with pytest.raises(InputError, match="confidence"):
        ts.evaluate(nn.Identity(), data, confidence=2.0)

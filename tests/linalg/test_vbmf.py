"""Ranks from the weights: VBMF and the paper's rule."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies

import reference
from tensigma.errors import InputError
from tensigma.linalg import alpha_rank, cp_rank, svd_rank, tucker2_ranks, vbmf_rank


def planted(n: int, m: int, rank: int, noise: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    signal = torch.randn(n, rank, generator=generator) @ torch.randn(rank, m, generator=generator)
    return signal + noise * torch.randn(n, m, generator=generator)


@pytest.mark.parametrize(("n", "m"), [(60, 200), (200, 60), (100, 100)], ids=str)
@pytest.mark.parametrize("rank", [1, 7, 20])
def test_planted_rank_is_found(n, m, rank, seed):
    assert vbmf_rank(planted(n, m, rank, 0.5, seed)) == rank


@pytest.mark.parametrize("noise", [0.5, 3.0, 8.0])
def test_equals_the_twin(seed, noise):
    matrix = planted(40, 90, 6, noise, seed)
    assert vbmf_rank(matrix) == reference.vbmf_rank(matrix.double().numpy())


def test_pure_noise_has_no_rank(seed):
    assert vbmf_rank(torch.randn(50, 120, generator=torch.Generator().manual_seed(seed))) == 0


@hypothesis.given(
    n=strategies.integers(1, 12),
    m=strategies.integers(1, 12),
    seed=strategies.integers(0, 99),
    scale=strategies.integers(-20, 20),
)
@hypothesis.settings(deadline=None, max_examples=60)
def test_transposing_and_scaling_change_nothing(n, m, seed, scale):
    matrix = torch.randn(n, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rank = vbmf_rank(matrix)
    assert 0 <= rank <= min(n, m)
    assert vbmf_rank(matrix.T) == rank
    assert vbmf_rank(matrix * 2.0**scale) == rank


def test_degenerate_matrices():
    assert vbmf_rank(torch.zeros(5, 8)) == 0
    assert vbmf_rank(planted(30, 80, 4, 0.0, 0)) == 4  # no noise at all
    assert vbmf_rank(torch.ones(30, 80)) == 1
    assert vbmf_rank(torch.ones(1, 1)) in (0, 1)
    assert vbmf_rank(torch.ones(1, 9)) in (0, 1)


@pytest.mark.parametrize(
    "matrix", [torch.ones(3), torch.ones(0, 3), torch.full((3, 3), torch.nan)], ids=["1d", "empty", "nan"]
)
def test_refusals(matrix):
    with pytest.raises(InputError):
        vbmf_rank(matrix)


def test_the_papers_table():
    assert alpha_rank(24, 576, 0.8) == 134
    assert alpha_rank(307, 4608, 0.8) == 1167


@pytest.mark.parametrize(
    ("alpha", "expected"), [(0.0, 64), (1.0, 24), (0.5, 44), (1.1, 20), (2.0, 1)], ids=lambda value: str(value)
)
def test_alpha_goes_from_everything_past_vbmf(alpha, expected):
    assert alpha_rank(24, 64, alpha) == expected


def test_alpha_is_not_negative():
    with pytest.raises(InputError, match="0 or more"):
        alpha_rank(3, 5, -0.1)


def test_rules_use_the_right_unfoldings():
    """A kernel with 3 output directions and 5 input directions, in noise."""
    generator = torch.Generator().manual_seed(0)
    core = torch.randn(3, 5, 3, 3, generator=generator)
    outs, ins = torch.randn(40, 3, generator=generator), torch.randn(30, 5, generator=generator)
    kernel = torch.einsum("ta,abhw,sb->tshw", outs, core, ins) + 0.05 * torch.randn(40, 30, 3, 3, generator=generator)
    assert tucker2_ranks(kernel, 1.0) == (3, 5)
    assert svd_rank(kernel, 1.0) == 3
    assert cp_rank(kernel, 1.0) == 5
    assert cp_rank(kernel, 0.0) == 30 * 9  # all entries ÷ the longest mode
    assert cp_rank(kernel, 0.0, joint=True) == 30 * 9
    assert svd_rank(torch.randn(20, 7, generator=generator), 0.0) == 7

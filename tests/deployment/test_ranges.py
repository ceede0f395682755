"""Ranges of activations: counted in one pass, clipped where that loses least."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tensigma.deployment.ranges import RULES, Histogram


def values_like(kind: str, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    normal = torch.randn(45_000, generator=rng)
    outliers = torch.cat([normal, 30 * torch.randn(10, generator=rng)])
    return {
        "normal": normal,
        "heavy": outliers,
        "rectified": outliers.relu(),
        "positive": 5 + torch.rand(5000, generator=rng),
        "constant": torch.full((100,), -2.5),
        "zero": torch.zeros(100),
        "tiny": 1e-20 * normal,
    }[kind]


KINDS = ["normal", "heavy", "rectified", "positive", "constant", "zero", "tiny"]


def counted(values: Tensor, n_parts: int = 1) -> Histogram:
    histogram = Histogram()
    for part in values.tensor_split(n_parts):
        histogram.add(part)
    return histogram


def error_of(values: Tensor, low: float, high: float) -> float:
    """The slow twin: quantise every value to eight bits as ONNX Runtime does, and look."""
    step = (high - low) / 255
    if not step:
        return float(values.double().square().sum())
    zero = round(-low / step)
    integers = (values.double() / step).round().add(zero).clamp(0, 255)
    return float((values.double() - (integers - zero) * step).square().sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES)
def test_ranges_hold_zero_and_stay_within_the_values(kind: str, rule, seed: int) -> None:
    values = values_like(kind, seed)
    low, high = counted(values).clipped(rule)
    assert min(0.0, float(values.min())) <= low <= 0 <= high <= max(0.0, float(values.max()))
    if rule == "minmax":
        assert (low, high) == (min(0.0, float(values.min())), max(0.0, float(values.max())))


@pytest.mark.parametrize("kind", ["normal", "heavy", "rectified"])
@pytest.mark.parametrize("rule", ["p99.99", "p99.9"])
def test_a_percentile_leaves_out_its_share(kind: str, rule, seed: int) -> None:
    values = values_like(kind, seed)
    low, high = counted(values, 3).clipped(rule)
    outside = float(((values < low) | (values > high)).float().mean())
    # Bins are 1/4096 of the whole width, and zeros of a rectified tensor are all on one side.
    assert outside <= 1.2 * (1 - float(rule[1:]) / 100)
    assert outside > 0


@pytest.mark.parametrize("kind", ["normal", "heavy", "rectified", "tiny"])
def test_the_least_error_is_the_least_that_was_tried(kind: str, seed: int) -> None:
    values = values_like(kind, seed)
    histogram = counted(values, 5)
    errors = {rule: error_of(values, *histogram.clipped(rule)) for rule in RULES}
    assert errors["mse"] <= 1.1 * min(errors.values())
    # By brute force over one end and then the other.
    low, high = histogram.clipped("mse")
    tried = [error_of(values, low, share * histogram.high) for share in np.arange(1, 33) / 32]
    tried += [error_of(values, share * histogram.low, high) for share in np.arange(1, 33) / 32]
    assert errors["mse"] <= 1.1 * min(tried)


def test_outliers_are_cut_off() -> None:
    values = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    values[500] = 30.0
    histogram = counted(values, 10)
    assert histogram.high == 30
    assert histogram.clipped("mse")[1] < 15


@pytest.mark.parametrize("kind", KINDS)
def test_parts_give_what_the_whole_gives(kind: str, seed: int) -> None:
    values = values_like(kind, seed)
    # Small values first, so that bins are widened again and again.
    values = values[values.abs().argsort()]
    whole, parts = counted(values), counted(values, 7)
    for rule in RULES:
        if rule == "mse":
            # Near the least error one end is as good as the next.
            assert error_of(values, *parts.clipped(rule)) <= 1.05 * error_of(values, *whole.clipped(rule))
            continue
        scale = max(abs(whole.low), whole.high)
        np.testing.assert_allclose(parts.clipped(rule), whole.clipped(rule), rtol=0, atol=2e-3 * scale)


def test_what_is_no_number_is_left_out() -> None:
    histogram = counted(torch.tensor([1.0, float("nan"), float("-inf"), -0.5]))
    histogram.add(torch.tensor([float("inf")]))
    assert histogram.clipped("minmax") == (-0.5, 1.0)

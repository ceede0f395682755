"""Average precision beside a plain one, box by box, and its limits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from reference import naive_average_precision
from tensigma.running import Detections, average_precision


def some_boxes(n: int, generator: torch.Generator) -> Tensor:
    corners = torch.rand(n, 2, generator=generator, dtype=torch.float64) * 6
    return torch.cat([corners, corners + 1 + 4 * torch.rand(n, 2, generator=generator, dtype=torch.float64)], 1)


def some_detections(n: int, generator: torch.Generator) -> Detections:
    scores = torch.rand(n, generator=generator, dtype=torch.float64)
    return Detections(some_boxes(n, generator), scores, torch.randint(0, 3, (n,), generator=generator))


@pytest.mark.parametrize("iou", [0.1, 0.2, 0.3])
def test_is_that_of_a_plain_loop(seed: int, iou: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    found = [some_detections(n, generator) for n in (9, 0, 12, 5)]
    truth = [some_detections(n, generator) for n in (6, 4, 5, 0)]
    plain_found = [
        list(zip(each.boxes.tolist(), each.scores.tolist(), each.labels.tolist(), strict=True)) for each in found
    ]
    plain_truth = [list(zip(each.boxes.tolist(), each.labels.tolist(), strict=True)) for each in truth]
    expected = naive_average_precision(plain_found, plain_truth, iou)
    assert expected is not None
    assert 0 < expected < 1
    assert average_precision(found, truth, (iou,)) == pytest.approx(expected, abs=1e-12)
    both = average_precision(found, truth, (iou, 0.9))
    rest = naive_average_precision(plain_found, plain_truth, 0.9)
    assert rest is not None
    assert both == pytest.approx((expected + rest) / 2, abs=1e-12)


def test_of_a_detector_by_itself_is_one_and_of_nothing_is_zero(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    found = [some_detections(n, generator) for n in (9, 4)]
    certain = [each.above(0.5) for each in found]
    # Detections below the score are false, but come after all others.
    assert average_precision(found, certain, (0.5, 0.95)) == 1
    nothing = [each.above(2.0) for each in found]
    assert average_precision(nothing, certain) == 0
    assert average_precision(found, nothing) is None
    assert average_precision([], []) is None

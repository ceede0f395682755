"""Random views: images of the same form, made of what was there, the same for the same seed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tensigma as ts
from tensigma.compression import Refine, Views, refine_


def images(n: int = 6) -> Tensor:
    return torch.rand(n, 3, 12, 10, generator=torch.Generator().manual_seed(1))


def test_views_are_images_of_the_same_form_and_differ_by_seed_alone() -> None:
    x = images()
    before = x.clone()
    for seed in range(20):
        view = Views(seed=seed)(x)
        assert view.shape == x.shape
        assert view.dtype == x.dtype
        # What lies between pixels, or between images, is within their range.
        assert view.min() >= x.min() - 1e-5
        assert view.max() <= x.max() + 1e-5
        assert torch.equal(view, Views(seed=seed)(x))
        assert not torch.allclose(view, x)
    assert torch.equal(x, before)
    views = Views()
    assert not torch.equal(views(x), views(x))


def test_flat_images_stay_flat_unless_two_meet() -> None:
    flat = torch.arange(8.0)[:, None, None, None].expand(8, 1, 9, 9).contiguous()
    views, kinds = Views(seed=3), set()
    for _ in range(60):
        view = views(flat)
        values = [len(torch.unique(each.round(decimals=3))) for each in view]
        alone = torch.allclose(view, flat, atol=1e-4)
        mixed = not alone and max(values) == 1
        kinds.add("crops" if alone else "mixed" if mixed else "patches")
        if not alone and not mixed:
            assert max(values) == 2
            assert set(torch.unique(view.round()).tolist()) <= set(range(8))
    assert kinds == {"crops", "mixed", "patches"}


def test_mirrored_and_moved_views_show_a_part_of_the_image() -> None:
    ramp = torch.linspace(0, 1, 32).expand(64, 1, 32, 32).contiguous()
    views = Views(seed=0)
    slopes: list[float] = []
    for _ in range(6):
        for view in views(ramp):
            row = view[0, 0]
            # Of crops alone: others are no straight lines.
            if (row.diff().sign() == row.diff().sign()[0]).all() and torch.allclose(row.diff()[8:24], row.diff()[12]):
                slopes.append(float(row[-1] - row[0]))
    assert min(slopes) < -0.5
    assert max(slopes) > 0.5
    assert max(map(abs, slopes)) <= 1.0


@pytest.mark.parametrize("other", ["text", [torch.zeros(3, 4, 4)], torch.zeros(2, 5), torch.zeros(1, 3, 4, 4).byte()])
def test_other_inputs_stay_as_they_are(other: object) -> None:
    assert Views()(other) is other


def test_one_image_is_enough() -> None:
    views = Views()
    assert all(views(images(1)).isfinite().all() for _ in range(10))


def test_the_loss_is_measured_on_views() -> None:
    """A model that is right on the images themselves and wrong on all others is refined, not kept for being right."""
    torch.manual_seed(0)
    head, other = nn.Linear(360, 4), nn.Linear(360, 4)
    original, small = (nn.Sequential(nn.Flatten(), layer).eval() for layer in (head, other))
    x = images(4)
    with torch.no_grad():
        # The weights nearest to the random ones that answer like the original on these four.
        other.bias.copy_(head.bias)
        other.weight += (torch.linalg.pinv(x.flatten(1)) @ (original(x) - small(x))).T
    torch.testing.assert_close(small(x), original(x), rtol=1e-3, atol=1e-4)
    facts = refine_(
        small,
        original,
        [x],
        Refine(passes=2_000, augment=Views(), learning_rate=1e-3),
        blocks=[],
        answers=ts.Numbers(),
    )
    assert facts["kept"]
    assert facts["augmented"]
    assert facts["loss_after"] < 0.9 * facts["loss_before"]

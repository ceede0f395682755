"""Linear layers of attention: compressed where the model calls them, left dense with the right reason where not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import tensigma as ts

pytestmark = pytest.mark.slow


@pytest.fixture
def slow_path() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def tokens(n: int = 2, width: int = 32) -> list[Tensor]:
    return [torch.randn(8, 6, width, generator=torch.Generator().manual_seed(seed)) for seed in range(n)]


def dense_reasons(report: ts.Report) -> dict[str, str]:
    return {layer.name: layer.reason or "" for layer in report.layers if layer.ranks is None}


@pytest.mark.usefixtures("slow_path")
def test_an_encoder_layer_off_the_fast_path() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, batch_first=True), nn.Linear(32, 5)
    ).eval()
    small, report = ts.compress(model, tokens(), budget=ts.Params(0.7))
    assert {layer.name for layer in report.compressed} >= {"0.linear1", "0.linear2"}
    assert dense_reasons(report)["0.self_attn.out_proj"].startswith("nn.MultiheadAttention reads the weight")
    with torch.no_grad():
        assert (small(tokens()[0]) - model(tokens()[0])).norm() < model(tokens()[0]).norm()
    torch.backends.mha.set_fastpath_enabled(True)
    # Loud, not wrong, where the advice was not followed; hooks would switch the fast path off.
    with pytest.raises(AttributeError, match="weight"), torch.no_grad():
        small(tokens()[0])


class Projections(nn.Module):
    """Attention as transformers has it: a Linear layer for each of query, key, value and output."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_projections_that_are_called_are_compressed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Projections(), nn.Linear(32, 5)).eval()
    _, report = ts.compress(model, tokens(), budget=ts.Params(0.5))
    assert {layer.name for layer in report.compressed} >= {"0.q_proj", "0.k_proj", "0.v_proj", "0.out_proj"}


def test_qkv_of_timm_is_compressed() -> None:
    torch.manual_seed(0)
    model = ts.zoo.load_model("timm:vit_tiny_patch16_224?img_size=32&depth=1&num_classes=5")
    images = [torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))]
    small, report = ts.compress(model, images, recipe=ts.Recipe(ranks=ts.Ranks({"blocks.*": 8})))
    names = {layer.name for layer in report.compressed}
    assert names == {"blocks.0.attn.qkv", "blocks.0.attn.proj", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"}
    assert ts.evaluate(small, images, original=model).answers.startswith("scores of 5 classes")

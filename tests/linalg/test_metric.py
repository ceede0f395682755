"""The metric: norms, roots, damping, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from linalg import problems
from tensigma.errors import InputError, NotPSDError, NumericalWarning, TensigmaError
from tensigma.linalg import Metric
from tensigma.linalg.svd import output_basis


def test_norm_is_the_mean_squared_output(seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(50, 12, generator=generator, dtype=torch.float64)
    weight = torch.randn(5, 12, generator=generator, dtype=torch.float64)
    metric = Metric.from_gram(rows.T @ rows / 50)
    torch.testing.assert_close(metric.norm(weight) ** 2, (rows @ weight.T).square().sum(1).mean())


def test_centred_norm_is_the_variance_of_the_output(seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(50, 12, generator=generator, dtype=torch.float64) + 5
    weight = torch.randn(5, 12, generator=generator, dtype=torch.float64)
    metric = Metric.from_gram(rows.T @ rows / 50, rows.mean(0))
    torch.testing.assert_close(metric.norm(weight) ** 2, (rows @ weight.T).var(0, unbiased=False).sum())


@pytest.mark.parametrize("mean", [False, True])
def test_rows_serve_as_well_as_their_gram(seed, mean):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(7, 12, generator=generator, dtype=torch.float64)
    weight = torch.randn(5, 12, generator=generator, dtype=torch.float64)
    centre = rows.mean(0) if mean else None
    from_rows, from_gram = Metric.from_rows(rows, centre), Metric.from_gram(rows.T @ rows / 7, centre)
    torch.testing.assert_close(from_rows.norm(weight), from_gram.norm(weight))
    torch.testing.assert_close(from_rows.outputs(weight), from_gram.outputs(weight))
    torch.testing.assert_close(from_rows.times(weight), from_gram.times(weight))
    torch.testing.assert_close(from_rows.dense(), from_gram.dense())


@pytest.mark.parametrize("kind", ["cholesky", "eigen"])
@pytest.mark.parametrize("rows", [200, 20], ids=["regular", "singular"])
def test_both_roots_of_the_paper(seed, kind, rows):
    sigma = problems.gram(30, seed, rows=rows)
    metric = Metric.from_gram(sigma)
    root = metric.root(kind)
    torch.testing.assert_close(root @ root.T, sigma, rtol=0, atol=2 * metric.epsilon)
    weight = problems.kernel((4, 30), seed)
    torch.testing.assert_close((weight @ root).norm(), metric.norm(weight), rtol=1e-4, atol=0)


def test_root_of_another_kind_is_refused():
    with pytest.raises(InputError, match="'cholesky' or 'eigen'"):
        Metric.identity(3).root("lu")  # type: ignore[arg-type]


def test_tap_major_reorders_features():
    sigma = problems.gram(12, 0)
    order = [channel * 4 + tap for tap in range(4) for channel in range(3)]
    torch.testing.assert_close(Metric.from_gram(sigma).tap_major(3), sigma[order][:, order])


def test_damping_is_relative_and_reported():
    sigma = problems.gram(12, 0)
    largest = torch.linalg.eigvalsh(sigma)[-1].item()
    metric = Metric.from_gram(sigma, damping=1e-3)
    assert metric.damping == 1e-3
    assert metric.epsilon == pytest.approx(1e-3 * largest, rel=0.05)
    assert "damping=1e-03" in repr(metric)


def test_rounding_that_leaves_a_gram_indefinite_raises_the_damping():
    values = torch.logspace(0, -3, 20, dtype=torch.float64)
    values[-1] = -1e-5
    basis = torch.linalg.qr(problems.kernel((20, 20), 0))[0]
    with pytest.warns(NumericalWarning, match="raised from 1e-06 to 1e-04"):
        metric = Metric.from_gram((basis * values) @ basis.T)
    assert metric.damping == pytest.approx(1e-4)


SIGMA = problems.gram(6, 0)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        pytest.param(lambda: Metric.from_gram(torch.ones(3, 4)), InputError, "square matrix", id="not-square"),
        pytest.param(lambda: Metric.from_gram(torch.ones(3)), InputError, "square matrix", id="vector"),
        pytest.param(lambda: Metric.from_gram(torch.full((3, 3), torch.nan)), InputError, "NaN", id="nan"),
        pytest.param(lambda: Metric.from_gram(torch.full((3, 3), torch.inf)), InputError, "infinite", id="inf"),
        pytest.param(lambda: Metric.from_gram(SIGMA.triu()), NotPSDError, "not symmetric", id="not-symmetric"),
        pytest.param(lambda: Metric.from_gram(-SIGMA), NotPSDError, "negative diagonal", id="negative"),
        pytest.param(
            lambda: Metric.from_gram(torch.tensor([[1.0, 2.0], [2.0, 1.0]])), NotPSDError, "indefinite", id="indefinite"
        ),
        pytest.param(lambda: Metric.from_gram(SIGMA, torch.ones(5)), InputError, "mean", id="mean-shape"),
        pytest.param(lambda: Metric.from_gram(SIGMA, torch.full((6,), torch.nan)), InputError, "mean", id="mean-nan"),
        pytest.param(lambda: Metric.from_gram(SIGMA, damping=-1.0), InputError, r"\[0, 1\)", id="damping"),
        pytest.param(lambda: Metric.from_rows(torch.ones(3)), InputError, "matrix", id="rows-vector"),
        pytest.param(lambda: Metric.from_rows(torch.full((3, 3), torch.nan)), InputError, "NaN", id="rows-nan"),
        pytest.param(lambda: Metric.identity(0), InputError, "at least one", id="identity-empty"),
        pytest.param(lambda: Metric.identity(3).norm(torch.ones(2, 4)), InputError, "3 input features", id="width"),
    ],
)
def test_refusals(make, error, message):
    with pytest.raises(error, match=message) as caught:
        make()
    assert isinstance(caught.value, TensigmaError)


def test_huge_but_finite_entries_are_accepted():
    """A sum that overflows is no sign of a bad entry."""
    metric = Metric.from_gram(torch.diag(torch.full((8,), 3e38)))
    assert metric.norm(torch.ones(1, 8)).item() == pytest.approx((8 * 3e38) ** 0.5, rel=1e-4)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_drawn_towards_the_diagonal_is_the_matrix_written_out(seed, share):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(9, 12, generator=generator, dtype=torch.float64)
    weight = torch.randn(5, 12, generator=generator, dtype=torch.float64)
    gram = rows.T @ rows / 9
    drawn = Metric.from_gram(gram).drawn(share)
    written = Metric.from_gram((1 - share) * gram + share * torch.diag(gram.diagonal()))
    torch.testing.assert_close(drawn.dense(), written.dense())
    torch.testing.assert_close(drawn.times(weight), written.times(weight))
    torch.testing.assert_close(drawn.outputs(weight), written.outputs(weight))
    torch.testing.assert_close(drawn.norm(weight), written.norm(weight))
    torch.testing.assert_close(drawn.tap_major(3), written.tap_major(3))
    torch.testing.assert_close(drawn.to(weight.float()).dense(), written.dense().float())
    torch.testing.assert_close(drawn.observed.dense(), gram)
    assert torch.equal(drawn.dense().diagonal(), gram.diagonal())
    from_rows = Metric.from_rows(rows).drawn(share)
    assert (from_rows.n_rows, from_rows.observed.n_rows) == (None if share else 9, 9)
    for name in ("times", "outputs", "norm", "whiten"):
        torch.testing.assert_close(getattr(from_rows, name)(weight), getattr(written, name)(weight))
    torch.testing.assert_close(from_rows.dense(), written.dense())
    energies, _ = output_basis(weight, from_rows)
    torch.testing.assert_close(energies, output_basis(weight, written)[0], rtol=1e-4, atol=1e-4)
    lengths = gram.diagonal().sqrt()
    squares = (gram / lengths / lengths[:, None]).square().sum().item()
    for metric in (Metric.from_gram(gram), Metric.from_rows(rows)):
        assert metric.correlations() == (12, pytest.approx(squares))


def test_a_share_of_the_diagonal_is_one():
    identity = Metric.identity(3)
    assert identity.drawn(0.5) is identity
    with pytest.raises(InputError, match=r"got 1\.5"):
        Metric.from_gram(torch.eye(3)).drawn(1.5)

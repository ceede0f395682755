"""The fast solvers beside their slow twins: the paper's algorithms as printed, and TensorLy's classical ones."""

from __future__ import annotations

import numpy as np
import pytest
import tensorly
import torch
from tensorly.decomposition import parafac, partial_tucker

import reference
from linalg import problems
from tensigma.linalg import (
    CP,
    SVD,
    CPFactors,
    CPJoint,
    Metric,
    SpatialSVD,
    SpatialSVDFactors,
    TensorTrain,
    TensorTrainFactors,
    Tucker2,
    Tucker2Factors,
    WeightedTucker2,
    cp_elimination,
    output_basis,
    share_lost,
    svd_errors,
)
from tensigma.linalg.problem import Problem

SHAPES = [(10, 8, 3, 3), (16, 6, 3, 3), (6, 14, 2, 3), (9, 7, 4)]
TWO_AXES = [shape for shape in SHAPES if len(shape) == 4]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
two_axes = pytest.mark.parametrize("shape", TWO_AXES, ids=str)


@pytest.fixture(autouse=True)
def _tensorly_in_torch():
    with tensorly.backend_context("pytorch"):
        yield


def problem(shape, seed):
    size = int(np.prod(shape[1:]))
    return problems.kernel(shape, seed), problems.gram(size, seed)


def as_tensors(factors):
    return [torch.from_numpy(factor) for factor in factors]


def test_explicit_and_matrix_free_blocks_agree(seed):
    """The twin of the twin: pseudo-inverses of P and MINRES on PᵀP."""
    weight, sigma = problem((5, 4, 2, 2), seed)
    tucker = reference.hosvd(weight.numpy(), 3, 2)
    rng = np.random.default_rng(seed)
    cp = [rng.standard_normal((n, 4)) for n in weight.shape]
    for algorithm, start in ((reference.tucker2_als_sigma, tucker), (reference.cp_als_sigma, cp)):
        explicit = algorithm(weight.numpy(), sigma.numpy(), start, 2, "explicit")[1]
        matrix_free = algorithm(weight.numpy(), sigma.numpy(), start, 2, "minres")[1]
        np.testing.assert_allclose(explicit, matrix_free, rtol=1e-5)


@pytest.mark.slow
@shapes
@pytest.mark.parametrize("solver", ["varpro", "als"])
def test_tucker2_ends_no_higher_than_the_paper(shape, seed, solver):
    weight, sigma = problem(shape, seed)
    rank_out, rank_in = shape[0] // 2, shape[1] // 2
    start = reference.hosvd(weight.numpy(), rank_out, rank_in)
    _, errors = reference.tucker2_als_sigma(weight.numpy(), sigma.numpy(), start, 20)
    options = Tucker2(
        rank_out, rank_in, solver=solver, init=Tucker2Factors(*as_tensors(start)), max_sweeps=200, tol=1e-6
    )
    assert options.fit(weight, Metric.from_gram(sigma)).error <= errors[-1] * 1.001


@pytest.mark.slow
@shapes
@pytest.mark.parametrize("solver", ["varpro", "als"])
def test_cp_ends_no_higher_than_the_paper(shape, seed, solver):
    weight, sigma = problem(shape, seed)
    rank = 12
    rng = np.random.default_rng(seed)
    start = [rng.standard_normal((n, rank)) for n in shape]
    _, errors = reference.cp_als_sigma(weight.numpy(), sigma.numpy(), start, 20)
    outs, ins, *spatial = as_tensors(start)
    init = CPFactors(outs, ins, tuple(spatial), tuple(shape[2:]))
    fit = CP(rank, solver=solver, init=init, max_sweeps=400, tol=1e-6).fit(weight, Metric.from_gram(sigma))
    assert fit.error <= errors[-1] * 1.001


@pytest.mark.slow
@two_axes
@pytest.mark.parametrize("solver", ["varpro", "als"])
def test_spatial_svd_ends_no_higher_than_alternating_least_squares(shape, seed, solver):
    weight, sigma = problem(shape, seed)
    rank = SpatialSVD.max_ranks(shape)[0] // 3
    start = reference.spatial_svd(weight.numpy(), rank)
    _, errors = reference.multilinear_als_sigma(
        weight.numpy(), sigma.numpy(), reference.SPATIAL_SVD, start, 20, "explicit"
    )
    options = SpatialSVD(rank, solver=solver, init=SpatialSVDFactors(*as_tensors(start)), max_sweeps=500, tol=1e-6)
    assert options.fit(weight, Metric.from_gram(sigma)).error <= errors[-1] * 1.001


@pytest.mark.slow
@two_axes
def test_tensor_train_ends_no_higher_than_alternating_least_squares(shape, seed):
    weight, sigma = problem(shape, seed)
    ranks = (shape[0] // 2, min(shape[0], shape[1]), shape[1] // 2)
    start = reference.tt_svd(weight.numpy(), *ranks)
    _, errors = reference.multilinear_als_sigma(
        weight.numpy(), sigma.numpy(), reference.TENSOR_TRAIN, start, 20, "explicit"
    )
    options = TensorTrain(*ranks, init=TensorTrainFactors(*as_tensors(start)), max_sweeps=500, tol=1e-6)
    assert options.fit(weight, Metric.from_gram(sigma)).error <= errors[-1] * 1.001


@two_axes
def test_spatial_svd_under_the_identity_is_the_plain_svd(shape, seed):
    weight, _ = problem(shape, seed)
    factors = reference.spatial_svd(weight.numpy(), 5)
    expected = torch.from_numpy(np.einsum(reference.SPATIAL_SVD, *factors))
    fit = SpatialSVD(5).fit(weight, Metric.identity(weight[0].numel()))
    torch.testing.assert_close(fit.factors.to_dense(), expected, rtol=1e-4, atol=1e-4)


@two_axes
def test_tensor_train_under_the_identity_is_no_worse_than_tt_svd(shape, seed):
    weight, _ = problem(shape, seed)
    ranks = (shape[0] // 2, min(shape[0], shape[1]), shape[1] // 2)
    metric = Metric.identity(weight[0].numel())
    dense = torch.from_numpy(np.einsum(reference.TENSOR_TRAIN, *reference.tt_svd(weight.numpy(), *ranks)))
    assert TensorTrain(*ranks).fit(weight, metric).error <= metric.relative_error(weight, dense) * 1.001


@pytest.mark.parametrize("shape", [(10, 8, 3, 3), (16, 6, 3, 3), (9, 5, 2, 3)], ids=str)
def test_a_tensor_train_starts_where_tucker2_ends(shape, seed):
    """With all its middle rank a tensor train is Tucker-2."""
    weight, sigma = problem(shape, seed)
    (t, s, h, w), metric = shape, Metric.from_gram(sigma)
    tucker2 = Tucker2(t // 2, s // 2).fit(weight, metric)
    rank_mid = s // 2 * h
    vertical = torch.eye(rank_mid).double().view(rank_mid, s // 2, h)
    horizontal = tucker2.factors.core.reshape(t // 2, rank_mid, w)
    start = TensorTrainFactors(tucker2.factors.out_basis, horizontal, vertical, tucker2.factors.in_basis)
    train = TensorTrain(t // 2, rank_mid, s // 2, init=start).fit(weight, metric)
    assert train.errors[0] == pytest.approx(tucker2.error, rel=1e-5)


@two_axes
def test_a_tensor_train_starts_where_spatial_svd_ends(shape, seed):
    """With all its outer ranks a tensor train is spatial SVD."""
    weight, sigma = problem(shape, seed)
    metric, rank = Metric.from_gram(sigma), SpatialSVD.max_ranks(shape)[0] // 2
    spatial = SpatialSVD(rank).fit(weight, metric)
    outs, ins = (torch.eye(n).double() for n in shape[:2])
    start = TensorTrainFactors(outs, spatial.factors.horizontal, spatial.factors.vertical, ins)
    train = TensorTrain(shape[0], rank, shape[1], init=start).fit(weight, metric)
    assert train.errors[0] == pytest.approx(spatial.error, rel=1e-5)


@shapes
def test_svd_is_the_truncated_svd_of_the_weighted_matrix(shape, seed):
    weight, sigma = problem(shape, seed)
    matrix = weight.flatten(1)
    expected = reference.svd_sigma(matrix.numpy(), sigma.numpy(), 3)
    fit = SVD(3).fit(weight, Metric.from_gram(sigma))
    naive = reference.naive_error(matrix.numpy(), expected, sigma.numpy())
    assert fit.error == pytest.approx(naive, rel=1e-6)
    np.testing.assert_allclose(fit.factors.to_dense().flatten(1).numpy(), expected, rtol=1e-3, atol=1e-4)


@shapes
def test_svd_under_the_identity_is_the_plain_svd(shape, seed):
    weight, _ = problem(shape, seed)
    matrix = weight.flatten(1)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    fit = SVD(3).fit(weight, Metric.identity(matrix.shape[1]))
    torch.testing.assert_close(fit.factors.to_dense().flatten(1), (left[:, :3] * values[:3]) @ right[:3])


@shapes
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_tucker2_under_the_identity_is_no_worse_than_tensorly(shape, seed, dtype):
    weight = problems.kernel(shape, seed, dtype)
    ranks = (shape[0] // 2, shape[1] // 2)
    metric = Metric.identity(weight[0].numel())
    core, factors = partial_tucker(weight, rank=list(ranks), modes=[0, 1], tol=1e-8, n_iter_max=500)[0]
    theirs = metric.relative_error(weight, tensorly.tenalg.multi_mode_dot(core, factors, modes=[0, 1]))
    assert Tucker2(*ranks, tol=1e-6, max_sweeps=200).fit(weight, metric).error <= theirs * 1.001


@pytest.mark.slow
@shapes
def test_cp_under_the_identity_is_within_one_per_cent_of_tensorly(shape):
    """Best of three seeds each: the landscape has many valleys, and each start ends in its own."""
    weight = problems.kernel(shape, 0)
    metric = Metric.identity(weight[0].numel())
    theirs = min(
        metric.relative_error(
            weight,
            tensorly.cp_to_tensor(parafac(weight, 12, n_iter_max=500, tol=1e-7, init="random", random_state=seed)),
        )
        for seed in range(3)
    )
    ours = min(
        CP(12, init="random", seed=seed, max_sweeps=500, tol=1e-7).fit(weight, metric).error for seed in range(3)
    )
    assert ours <= theirs * 1.01


def test_joint_cp_beats_separate_spatial_factors(seed):
    """One spatial factor contains the products of two, so from enough starts its best error is lower."""
    weight, sigma = problem((10, 8, 3, 3), seed)
    metric = Metric.from_gram(sigma)
    joint, apart = CPJoint(12, max_sweeps=300), CP(12, max_sweeps=300)
    assert joint.fit(weight, metric).error < apart.fit(weight, metric).error


def test_weighted_tucker2_matches_exact_sweeps(seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(6, 5, 2, 2, generator=generator, dtype=torch.float64)
    importance = torch.rand(6, 5, 2, 2, generator=generator, dtype=torch.float64) + 0.05
    classical = Tucker2(3, 3).fit(weight, Metric.identity(20)).factors
    state = (classical.out_basis.numpy(), classical.core.numpy(), classical.in_basis.numpy())
    for _ in range(30):
        state = reference.weighted_tucker2_sweep(weight.numpy(), importance.numpy(), *state)
    naive = reference.weighted_error(weight.numpy(), reference.tucker2_dense(*state), importance.numpy())
    fit = WeightedTucker2(3, 3, max_sweeps=300, tol=1e-6).fit(weight, importance)
    dense = fit.factors.to_dense().numpy()
    assert fit.error == pytest.approx(reference.weighted_error(weight.numpy(), dense, importance.numpy()), rel=1e-3)
    assert fit.error <= naive * 1.01


def test_output_weights_are_a_scaling_of_the_rows(seed):
    """AG-LRA in closed form: weights per output channel are a classical problem on scaled rows."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(8, 6, 3, 3, generator=generator, dtype=torch.float64)
    channel = torch.rand(8, generator=generator, dtype=torch.float64) + 0.1
    scaled = channel.view(-1, 1, 1, 1) * weight
    expected = Tucker2(4, 3, tol=1e-7, max_sweeps=300).fit(scaled, Metric.identity(54)).error
    assert WeightedTucker2(4, 3, tol=1e-7, max_sweeps=500).fit(weight, channel).error == pytest.approx(
        expected, rel=5e-3
    )


def test_equal_weights_are_the_classical_problem(seed):
    weight = problems.kernel((8, 6, 3, 3), seed)
    classical = Tucker2(4, 3).fit(weight, Metric.identity(54)).error
    assert WeightedTucker2(4, 3).fit(weight, torch.full_like(weight, 7.0)).error == pytest.approx(classical, rel=1e-3)


class TestFewRows:
    """A wide layer that few rows reach is decomposed by way of the rows; its twin decomposes the whole moment."""

    @staticmethod
    def problem(seed: int, rows: int = 6) -> tuple[torch.Tensor, Metric]:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(40, 60, generator=generator)
        inputs = torch.randn(rows, 60, generator=generator) * torch.linspace(0.2, 3, 60)
        return weight, Metric.from_rows(inputs, inputs.mean(0))

    def test_errors_are_those_of_the_whole_moment(self, seed: int) -> None:
        weight, metric = self.problem(seed)
        whole = share_lost(energies := output_basis(weight, metric)[0], energies.sum())
        assert torch.allclose(svd_errors(weight, metric), whole, atol=1e-5)

    @pytest.mark.parametrize("rank", [1, 3, 5, 20])
    def test_solutions_are_as_good_as_those_of_the_whole_moment(self, seed: int, rank: int) -> None:
        weight, metric = self.problem(seed)
        basis = output_basis(weight, metric)[1][:, :rank].float()
        assert SVD(rank).fit(weight, metric).error <= metric.relative_error(weight, basis @ (basis.T @ weight)) + 1e-5

    @pytest.mark.parametrize("rank", [6, 12, 24])
    def test_directions_that_no_row_sees_have_nearly_the_most_weight(self, seed: int, rank: int) -> None:
        weight, metric = self.problem(seed)
        lost = [
            (weight - (basis @ (basis.T @ weight))).norm().item()
            for basis in (SVD(rank).fit(weight, metric).factors.left, output_basis(weight, metric)[1][:, :rank].float())
        ]
        assert lost[0] <= 1.02 * lost[1]
        basis = SVD(rank).fit(weight, metric).factors.left
        assert torch.allclose(basis.T @ basis, torch.eye(rank), atol=1e-5)

    def test_the_whole_moment_is_decomposed_only_far_beyond_what_rows_see(
        self, seed: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        weight, metric = self.problem(seed)
        real, sizes = torch.linalg.eigh, []

        def noting(matrix: torch.Tensor) -> object:
            sizes.append(len(matrix))
            return real(matrix)

        monkeypatch.setattr(torch.linalg, "eigh", noting)
        svd_errors(weight, metric)
        SVD(5).fit(weight, metric)
        assert max(sizes) == 6
        SVD(6).fit(weight, metric)
        assert max(sizes) < 40
        SVD(30).fit(weight, metric)
        assert max(sizes) == 40


@shapes
def test_cp_by_difference_and_by_residual(shape, seed, monkeypatch):
    """Loss and gradient without the residual are those that the residual gives."""
    weight, _ = problem(shape, seed)
    generator = torch.Generator().manual_seed(seed)
    modes = CP.modes(shape)[1:]
    elimination = cp_elimination.Elimination(Problem(weight, Metric.identity(weight[0].numel())), modes, 5)
    position = elimination.pack([torch.randn(n, 5, generator=generator, dtype=weight.dtype) for n in modes])
    fast = elimination.at(position)
    assert fast.loss > cp_elimination._BY_DIFFERENCE
    monkeypatch.setattr(cp_elimination, "_BY_DIFFERENCE", float("inf"))
    slow = elimination.at(position)
    assert fast.loss == pytest.approx(slow.loss, rel=1e-5)
    assert fast.error == pytest.approx(slow.error, rel=1e-5)
    torch.testing.assert_close(fast.gradient, slow.gradient, rtol=1e-4, atol=1e-5 * slow.gradient.abs().max().item())

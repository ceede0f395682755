"""What every solver says about ranks, whatever its format."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from linalg import problems
from tensigma.linalg import (
    CP,
    SVD,
    CPJoint,
    Deflation,
    Metric,
    Solver,
    SpatialSVD,
    Spectra,
    TensorTrain,
    Tucker2,
    cp,
    option_names,
    rank_names,
)

SOLVERS: list[type[Solver]] = [SVD, Tucker2, CP, CPJoint, Deflation, SpatialSVD, TensorTrain]
SHAPE = (12, 10, 3, 3)
solvers = pytest.mark.parametrize("solver", SOLVERS)


@solvers
def test_names_are_those_of_the_fields(solver):
    ranks = solver.max_ranks(SHAPE)
    assert len(rank_names(solver)) == len(ranks)
    made = solver(**dict(zip(rank_names(solver), ranks, strict=True)))
    assert made == solver(*ranks)
    for name in option_names(solver):
        dataclasses.replace(made, **{name: getattr(made, name)})


def test_joint_is_a_variant_and_no_option():
    assert CPJoint(5).joint
    assert CP(5, joint=True).joint
    assert not CP(5).joint
    assert option_names(CPJoint) == option_names(CP)
    assert CPJoint.variant == ("joint",)
    assert CPJoint.max_ranks((4, 4, 3, 3)) == (16,) != CP.max_ranks((4, 4, 3, 3))
    weight, metric = problems.kernel(SHAPE, 0), problems.metric(90, 0)
    one, other = (solver.fit(weight, metric) for solver in (CPJoint(7), CP(7, joint=True)))
    assert torch.equal(one.factors.to_dense(), other.factors.to_dense())


@solvers
def test_ranks_of_every_rule_can_be_fitted(solver, seed):
    shape = (6, 5, 3, 2)
    weight, metric = problems.kernel(shape, seed), problems.metric(30, seed)
    largest = solver.max_ranks(shape)
    spectra = Spectra.of([(weight, metric)], inputs=solver.reads_inputs)
    chosen = [solver.vbmf_ranks(weight, alpha) for alpha in (0.0, 0.5, 1.0, 1.5)]
    chosen += [solver.energy_ranks(spectra, tail, shape) for tail in (0.9, 0.3, 0.01)]
    for ranks in chosen:
        assert all(1 <= rank <= most for rank, most in zip(ranks, largest, strict=True))
        assert solver(*ranks).fit(weight, metric).error <= 1
    assert chosen[0] == largest


@solvers
def test_more_energy_takes_no_smaller_ranks(solver, seed):
    weight, metric = problems.kernel(SHAPE, seed), problems.metric(90, seed)
    spectra = Spectra.of([(weight, metric)], inputs=True)
    by_tail = [solver.energy_ranks(spectra, tail, SHAPE) for tail in (0.5, 0.1, 0.02)]
    for fewer, more in itertools.pairwise(by_tail):
        assert all(a <= b for a, b in zip(fewer, more, strict=True))


def test_energy_ranks_of_other_formats_cost_at_most_what_tucker2_costs():
    weight, metric = problems.kernel((40, 30, 3, 3), 0), problems.metric(270, 0)
    spectra = Spectra.of([(weight, metric)], inputs=True)
    budget = Tucker2(*Tucker2.energy_ranks(spectra, 0.2, weight.shape), max_sweeps=0).fit(weight, metric)
    others: list[type[SpatialSVD] | type[TensorTrain] | type[CP]] = [CP, CPJoint, SpatialSVD, TensorTrain]
    for solver in others:
        ranks = solver.energy_ranks(spectra, 0.2, weight.shape)
        stored = solver(*ranks, max_sweeps=0).fit(weight, metric).factors.n_params
        assert 0.9 * budget.factors.n_params < stored <= budget.factors.n_params


@solvers
@pytest.mark.parametrize("identity", [False, True], ids=["gram", "identity"])
def test_curves_have_a_grid_of_the_shape_alone_and_fall_with_every_rank(solver, identity, seed):
    weight = problems.kernel(SHAPE, seed)
    metric = Metric.identity(90) if identity else problems.metric(90, seed)
    curve = dict(solver.errors(weight, metric))
    assert list(curve) == [ranks for ranks, _ in solver.errors(torch.ones(SHAPE), Metric.identity(90))]
    largest = solver.max_ranks(SHAPE)
    for ranks, error in curve.items():
        assert all(1 <= rank <= most for rank, most in zip(ranks, largest, strict=True))
        assert 0 <= error <= 1
        for axis in range(len(ranks)):
            others = (*ranks[:axis], *ranks[axis + 1 :])
            smaller = [r for r in curve if (*r[:axis], *r[axis + 1 :]) == others and r[axis] < ranks[axis]]
            assert all(error <= curve[r] + 1e-9 for r in smaller)


@pytest.mark.parametrize("solver", [SVD, Tucker2, Deflation, SpatialSVD, TensorTrain])
def test_curves_of_zero_weights_lose_nothing(solver):
    assert all(error < 1e-9 for _, error in solver.errors(torch.zeros(SHAPE), problems.metric(90, 0)))


@pytest.mark.parametrize("solver", [Tucker2, SpatialSVD, TensorTrain])
@pytest.mark.parametrize("identity", [False, True], ids=["gram", "identity"])
def test_curves_are_a_little_above_where_the_solver_ends(solver, identity, seed):
    weight = problems.kernel(SHAPE, seed)
    metric = Metric.identity(90) if identity else Metric.from_gram(problems.image_gram(10, (3, 3), seed))
    curve = solver.errors(weight, metric)
    for ranks, error in curve[:: max(1, len(curve) // 8)]:
        end, expected = solver(*ranks).fit(weight, metric).error, error**0.5
        assert 0.8 * expected - 1e-3 <= end <= 1.02 * expected + 1e-6


@pytest.mark.parametrize("shape", [(12, 10, 3, 3), (24, 4, 3, 3), (4, 24, 3, 3), (12, 10, 1, 5), (6, 9, 2, 4)], ids=str)
def test_chains_in_the_curve_of_a_tensor_train_waste_no_rank(shape):
    weight = problems.kernel(shape, 0)
    curve = TensorTrain.errors(weight, Metric.identity(weight[0].numel()))
    assert (TensorTrain.max_ranks(shape), 0.0) in [(ranks, round(error, 6)) for ranks, error in curve]
    for (out, mid, into), _ in curve:
        assert mid <= min(into * shape[2], out * shape[3])
        assert into <= mid * shape[2]
        assert out <= mid * shape[3]


def test_a_tensor_train_with_outer_ranks_that_its_middle_cannot_fill():
    """Wasteful, but allowed: the error is that of the chain without the waste."""
    weight, metric = problems.kernel(SHAPE, 0), problems.metric(90, 0)
    wasteful, lean = TensorTrain(12, 1, 10).fit(weight, metric), TensorTrain(3, 1, 3).fit(weight, metric)
    assert wasteful.error == pytest.approx(lean.error, rel=0.05)


def test_only_svd_knows_its_error_from_spectra():
    weight, metric = problems.kernel(SHAPE, 0), problems.metric(90, 0)
    spectra = Spectra.of([(weight, metric)], inputs=True)
    expected = SVD.expected_error(spectra, (5,))
    assert expected == pytest.approx(SVD(5).fit(weight, metric).error, rel=1e-4)
    for solver in SOLVERS[1:]:
        assert solver.expected_error(spectra, solver.max_ranks(SHAPE)) is None


@pytest.mark.slow
@pytest.mark.parametrize("solver", [CP, CPJoint])
def test_a_search_under_a_separable_metric_ends_as_low(solver, seed, monkeypatch):
    shape, rank = (16, 12, 3, 3), 40
    weight, metric = problems.kernel(shape, seed), Metric.from_gram(problems.image_gram(12, (3, 3), seed))
    plain = solver(rank).fit(weight, metric)
    monkeypatch.setattr(cp, "_SMALL", 0)
    wide = solver(rank).fit(weight, metric)
    # Kernels without any structure are the hardest case; those of trained layers end within 2 per cent.
    assert wide.error <= 1.2 * plain.error
    # Factors to start from pass through the search as well.
    again = solver(rank, init=wide.factors).fit(weight, metric)
    assert again.error <= wide.error


@pytest.mark.parametrize("solver", [CP, CPJoint])
def test_the_separable_search_is_exact_where_the_metric_is_separable(solver, monkeypatch):
    weight = problems.kernel((10, 8, 3, 3), 0)
    grams = [problems.gram(n, seed) for seed, n in enumerate((8, 3, 3))]
    roots = [torch.linalg.cholesky(gram) for gram in grams]
    whitened = torch.einsum("tshw,sa,hb,wc->tabc", weight, *roots)
    expected = solver(20, max_sweeps=30).fit(whitened, Metric.identity(72)).error
    monkeypatch.setattr(cp, "_SMALL", 0)
    channels, rows, columns = grams
    metric = Metric.from_gram(torch.kron(channels, torch.kron(rows, columns)))
    found = solver(20, max_sweeps=30).fit(weight, metric).errors[0]
    assert found == pytest.approx(expected, rel=0.02)

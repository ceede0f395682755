"""Factors on grids of few bits, rounded one after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from solving.reference_rounding import composed_by_loops, loss, quadratic_form
from tensigma.calibration import LayerStats
from tensigma.errors import InputError
from tensigma.layers import HALF, Geometry, cost, grid_of, kernels_of, packed_bias_bytes, packed_bytes, to_kernels
from tensigma.linalg import Metric
from tensigma.solving import Solutions, Treatment, method_of, norm_of, solve
from tensigma.solving.chains import Stage, StageProblem, composed
from tensigma.solving.metrics import centred_metrics
from tensigma.solving.rounding import rounded_chain

Draw = Callable[..., Tensor]
T, S = 5, 4
#: Stages of every format, (groups, o, c, h, w).
CHAINS = {
    "dense": [(1, T, S, 3, 2)],
    "svd": [(1, 3, S, 3, 2), (1, T, 3, 1, 1)],
    "tucker2": [(1, 3, S, 1, 1), (1, 2, 3, 3, 2), (1, T, 2, 1, 1)],
    "cp-joint": [(1, 6, S, 1, 1), (6, 1, 1, 3, 2), (1, T, 6, 1, 1)],
    "cp": [(1, 6, S, 1, 1), (6, 1, 1, 3, 1), (6, 1, 1, 1, 2), (1, T, 6, 1, 1)],
    "spatial-svd": [(1, 3, S, 3, 1), (1, T, 3, 1, 2)],
    "tensor-train": [(1, 3, S, 1, 1), (1, 4, 3, 3, 1), (1, 3, 4, 1, 2), (1, T, 3, 1, 1)],
}
PLACES = [(name, place) for name, chain in CHAINS.items() for place in range(len(chain))]


@pytest.fixture(params=range(3), ids="seed{}".format)
def draw(request: pytest.FixtureRequest) -> Draw:
    generator = torch.Generator().manual_seed(request.param)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def _gram(draw: Draw, size: int) -> Tensor:
    rows = draw(4 * size, size) @ draw(size, size)
    return rows.T @ rows / len(rows)


@pytest.mark.parametrize("name", CHAINS)
def test_stages_are_composed_as_layers_would(name: str, draw: Draw) -> None:
    kernels = [draw(*shape) for shape in CHAINS[name]]
    whole = composed([Stage(kernel) for kernel in kernels])
    assert whole is not None
    torch.testing.assert_close(whole, composed_by_loops(kernels))


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_the_problem_of_a_stage_is_that_of_all_its_weights(name: str, place: int, draw: Draw) -> None:
    kernels = [draw(*shape) for shape in CHAINS[name]]
    target, gram = draw(T, S, 3, 2), _gram(draw, S * 6)
    metric = Metric.from_gram(gram, damping=0.0)
    problem = StageProblem([Stage(kernel) for kernel in kernels], place, target, metric)
    form, aim = quadratic_form(kernels, place, target, gram)
    torch.testing.assert_close(problem.hessian(), form)
    refitted = problem.refitted(0.0).flatten()
    torch.testing.assert_close(form @ refitted, aim, rtol=1e-6, atol=1e-6 * aim.abs().max().item())


@pytest.mark.parametrize("bits", [3, 8])
@pytest.mark.parametrize("name", CHAINS)
def test_never_worse_than_every_factor_to_nearest(name: str, bits: int, draw: Draw) -> None:
    stages = [Stage(draw(*shape).float()) for shape in CHAINS[name]]
    whole = composed(stages)
    assert whole is not None
    target, gram = whole + 0.1 * draw(*whole.shape).float(), _gram(draw, S * 6).float()
    metric = Metric.from_gram(gram)
    chain = rounded_chain(stages, target, metric, [bits] * len(stages))
    nearest = []
    for stage in stages:
        rows = stage.kernel.flatten(0, 1).flatten(1)
        scales = rows.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        nearest.append((rows / scales).round().mul(scales).reshape(stage.kernel.shape))
    kernel = composed_by_loops([part.kernel for part in chain])
    reached = loss(target, kernel, gram)
    assert reached <= loss(target, composed_by_loops(nearest), gram) * (1 + 1e-4)
    for part in chain:
        assert part.scales is not None
        integers = part.kernel.flatten(0, 1).flatten(1) / part.scales
        torch.testing.assert_close(integers, integers.round(), atol=1e-3, rtol=0)
        assert -(2 ** (bits - 1)) <= integers.min()
        assert integers.max() <= 2 ** (bits - 1) - 1
        assert torch.equal(part.scales.half().float(), part.scales)


def test_later_factors_make_up_for_earlier_ones(draw: Draw) -> None:
    stages = [Stage(draw(*shape).float()) for shape in CHAINS["cp-joint"]]
    target = composed(stages)
    assert target is not None
    gram = _gram(draw, S * 6).float()
    metric = Metric.from_gram(gram)
    one_by_one = []
    for place, stage in enumerate(stages):
        # Each under its own problem, but none fitted to what the others have become.
        part = rounded_chain([stage], stage.dense(), Metric.identity(stage.dense()[0].numel()), [3])[0]
        one_by_one.append(stage.kernel if place != 0 else part.kernel)
    chain = rounded_chain(stages, target, metric, [3, HALF, HALF])
    kernel = composed_by_loops([part.kernel for part in chain])
    assert loss(target, kernel, gram) < loss(target, composed_by_loops(one_by_one), gram)


def _layer_and_stats() -> tuple[nn.Conv2d, LayerStats]:
    layer = nn.Conv2d(8, 6, 3, padding=1, bias=False)
    images = torch.randn(20, 8, 6, 6).cumsum(1) + 1.0
    patches = torch.nn.functional.unfold(images, 3, padding=1).mT.reshape(-1, 72)
    return layer, LayerStats.from_rows(patches, samples=20)


METHODS = [("dense", ()), ("svd", (4,)), ("tucker2", (4, 4)), ("cp-joint", (8,)), ("tensor-train", (4, 6, 4))]


@pytest.mark.parametrize(("name", "ranks"), METHODS, ids=[name for name, _ in METHODS])
def test_errors_of_a_rounded_layer_are_its_own(name: str, ranks: tuple[int, ...]) -> None:
    layer, stats = _layer_and_stats()
    geometry, method = Geometry.of(layer), method_of(name)
    metric = centred_metrics(geometry, stats)[0].observed
    kernel = kernels_of(layer)[0]
    errors = {}
    for bits in (None, 8, 4):
        treatment = Treatment(
            geometry=geometry, method=method, norm=norm_of("centred"), format=method.format(ranks), bits=bits
        )
        solution = solve(treatment, layer, stats)
        stages = [Geometry.of(module) for module in solution.modules]
        weights = [module.weight.detach() for module in solution.modules if isinstance(module, nn.Conv2d)]
        dense = composed([Stage(to_kernels(*pair)) for pair in zip(weights, stages, strict=True)])
        assert dense is not None
        error = metric.relative_error(kernel, dense)
        assert solution.error == pytest.approx(error, rel=1e-4, abs=1e-5)
        errors[bits] = error
        bias = solution.modules[-1].bias
        moved = (kernel - dense).flatten(1).double() @ stats.mean.flatten().double()
        torch.testing.assert_close(bias.detach().double(), moved, rtol=1e-3, atol=1e-5)  # type: ignore[operator]
        if bits is not None:
            assert [grid_of(module).bits for module in solution.modules] == [bits] * len(solution.modules)  # type: ignore[union-attr]
            packed = sum((packed_bytes(m) or 0) + (packed_bias_bytes(m) or 0) for m in solution.modules)
            assert packed == cost(treatment.format, geometry, (6, 6), bias=True, bits=bits).bytes
    assert errors[8] == pytest.approx(errors[None], abs=0.01)
    assert errors[8] < errors[4]


def test_transposed_convolutions_take_half_precision() -> None:
    layer = nn.ConvTranspose2d(4, 6, 2, stride=2)
    geometry, method = Geometry.of(layer), method_of("dense")
    treatment = Treatment(geometry=geometry, method=method, norm=norm_of("frobenius"), format=method.format(()), bits=4)
    modules = solve(treatment, layer, None).modules
    grid = grid_of(modules[0])
    assert grid is not None
    assert grid.bits == HALF
    assert packed_bytes(modules[0]) == 2 * layer.weight.numel()
    assert cost(treatment.format, geometry, (3, 3), bits=4).bytes == 2 * layer.weight.numel() + 2 * 6


def test_a_rounded_solution_is_read_back_with_its_grids(tmp_path: object) -> None:
    layer, stats = _layer_and_stats()
    method = method_of("svd")
    treatment = Treatment(
        geometry=Geometry.of(layer), method=method, norm=norm_of("centred"), format=method.format((4,)), bits=3
    )
    first, known = Solutions(str(tmp_path)).get_or_solve(treatment, layer, stats, name="c")
    again, cached = Solutions(str(tmp_path)).get_or_solve(treatment, layer, stats, name="c")
    assert (known, cached) == (False, True)
    for ours, theirs in zip(first.modules, again.modules, strict=True):
        assert torch.equal(ours.weight, theirs.weight)  # type: ignore[arg-type]
        assert grid_of(theirs).bits == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("bits", [1, 9, 32, True, 4.5, "4"])
def test_other_bits_are_refused(bits: object) -> None:
    method = method_of("dense")
    with pytest.raises(InputError, match="bits is one of 2, 3, 4, 5, 6, 7, 8, 16"):
        Treatment(
            geometry=Geometry.of(nn.Linear(4, 4)),
            method=method,
            norm=norm_of("sigma"),
            format=method.format(()),
            bits=bits,  # type: ignore[arg-type]
        )

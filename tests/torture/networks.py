"""Random networks through calibrate, plan, compress, save, load and export, and the laws that must hold for each."""

from __future__ import annotations

import random
import shutil
import traceback
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import tensigma as ts
from tensigma.errors import TensigmaError
from tensigma.layers import Geometry, find_layers
from tensigma.solving import METHODS, norm_of
from torture.tally import Tally

_METHODS = ("tucker2", "svd", "cp", "cp-joint", "spatial-svd", "tensor-train")


class Residual(nn.Module):
    """Adds what it computes to its input."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(x)


def random_network(dice: random.Random) -> tuple[nn.Module, Tensor]:
    """A network of a few layers with any geometry, and images for it."""
    torch.manual_seed(dice.randrange(2**31))
    axes = dice.choice((2, 2, 2, 1))
    conv = nn.Conv2d if axes == 2 else nn.Conv1d
    norm = nn.BatchNorm2d if axes == 2 else nn.BatchNorm1d
    channels, size = dice.choice((1, 3, 4)), dice.choice((8, 11, 12))
    images = torch.randn(dice.choice((6, 24)), channels, *(size,) * axes)
    layers: list[nn.Module] = []
    for _ in range(dice.randrange(2, 5)):
        out = dice.choice((4, 6, 8, 12))
        groups = dice.choice([1, 1, 1, *(g for g in (2, 4) if channels % g == 0 and out % g == 0)])
        kernel = tuple(dice.choice((1, 3, 3, 2)) for _ in range(axes))
        options = {
            "stride": dice.choice((1, 1, 2)),
            "padding": dice.choice((0, 1, "same")),
            "dilation": dice.choice((1, 1, 2)),
            "padding_mode": dice.choice(("zeros", "zeros", "reflect", "circular")),
            "bias": dice.random() < 0.6,
            "groups": groups,
        }
        if options["padding"] == "same":
            options["stride"] = 1
        layer: nn.Module = conv(channels, out, kernel, **options)  # type: ignore[arg-type]
        if dice.random() < 0.15:
            transposed = nn.ConvTranspose2d if axes == 2 else nn.ConvTranspose1d
            plain = {key: options[key] for key in ("stride", "dilation", "bias", "groups")}
            layer = transposed(channels, out, kernel, **plain)  # type: ignore[arg-type]
        try:
            with torch.no_grad():
                probe = nn.Sequential(*layers, layer).eval()(images)
        except RuntimeError:
            continue  # a kernel larger than its input
        if min(probe.shape[2:]) < 2:
            continue
        layers += [layer, norm(out)] if dice.random() < 0.5 else [layer]
        layers.append(dice.choice((nn.ReLU(), nn.SiLU(), nn.Identity())))
        channels = out
        if dice.random() < 0.3:
            layers.append(Residual(conv(channels, channels, 3, padding=1)))
    layers += [nn.AdaptiveAvgPool2d(2) if axes == 2 else nn.AdaptiveAvgPool1d(2), nn.Flatten()]
    layers.append(nn.Linear(channels * 2**axes, dice.choice((3, 10))))
    return nn.Sequential(*layers).eval(), images


def torture(n: int, seed: int, folder: Path, tally: Tally, *, export: bool = True) -> None:
    """``n`` random networks."""
    for number in range(n):
        dice = random.Random(f"network {seed} {number}")
        case = f"network {number} of seed {seed}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model, images = random_network(dice)
                _laws(model, images, dice, folder, export=export)
        except AssertionError as error:
            tally.add("a law broken", f"{case}: {error}")
        except TensigmaError as error:
            # Too small to be compressed at all.
            expected = "no layer of" in str(error) or "no plan leaves" in str(error)
            tally.add("refused" if expected else "refused without reason", f"{case}: {error}")
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            tally.add("crashed", f"{case}: {type(error).__name__}: {error!s:.100} ({where.filename}:{where.lineno})")
        else:
            tally.add("held", case)


def _laws(model: nn.Module, images: Tensor, dice: random.Random, folder: Path, *, export: bool) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    _full_rank_changes_nothing(model, images, dice.choice(_METHODS))
    stats = ts.calibrate(model, images.split(5))
    share = dice.choice((0.6, 0.8, 0.95))
    budget = dice.choice((ts.Params(share), ts.Macs(share)))
    plan = ts.plan(model, stats, budget=budget)
    small, report = ts.compress(model, plan, stats, workers=1)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), f"the original changed: {key}"
    _totals(model, small, plan, report, budget, images)
    _errors_are_true(model, small, report, images)
    ts.save(small, folder / "small")
    loaded = ts.load(folder / "small", model)
    for key, value in small.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[key]), f"{key} changed on disk"
    if export:
        # Kept only if it computes what the model computes.
        ts.export(small, folder / "small.pt2", images[:2], format="torch-export")


def _full_rank_changes_nothing(model: nn.Module, images: Tensor, name: str) -> None:
    method, norm = METHODS[name], norm_of("frobenius")
    ranks = {}
    for layer in find_layers(model):
        geometry = layer.geometry
        if layer.reason is not None or geometry is None or geometry.is_pointwise:
            continue
        if method.why_not(geometry, norm) is None:
            ranks[layer.name] = method.max_ranks(geometry.kernel_shape)
    if not ranks:
        return
    plan = ts.plan(
        model, ranks=ts.Ranks(ranks), method=name, norm="frobenius", skip=(), layers=list(ranks), saving="none"
    )
    small, _ = ts.compress(model, plan, workers=1)
    with torch.no_grad():
        expected, actual = model(images), small(images)
    # CP at full rank is exact in theory; its solver comes close.
    tolerance = 0.05 if name.startswith("cp") else 1e-3
    difference = (expected - actual).norm() / expected.norm().clamp_min(1e-12)
    assert difference < tolerance, f"{name} at full rank changes the answers by {difference:.2g}"


def _totals(
    model: nn.Module, small: nn.Module, plan: ts.Plan, report: ts.Report, budget: ts.Params | ts.Macs, images: Tensor
) -> None:
    sizes = [ts.evaluation.size_of(network, images[:1]) for network in (model, small)]
    for planned, reported, actual in zip((plan.before, plan.after), (report.before, report.after), sizes, strict=True):
        assert planned.params == reported.params == actual.params, f"{planned}, {reported}, {actual}"
        assert planned.macs == reported.macs == actual.macs, f"{planned}, {reported}, {actual}"
    field = budget.field
    limit = budget.share * getattr(sizes[0], field)
    assert getattr(sizes[1], field) <= limit, f"{budget} is not kept"
    assert sizes[1].macs is not None
    assert sizes[0].macs is not None
    assert sizes[1].macs <= sizes[0].macs or plan.raises_macs


def _errors_are_true(model: nn.Module, small: nn.Module, report: ts.Report, images: Tensor) -> None:
    inputs: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(row.name).register_forward_hook(
            lambda module, args, output, name=row.name: inputs.__setitem__(name, args[0])
        )
        for row in report.compressed
    ]
    with torch.no_grad():
        model(images)
    for handle in handles:
        handle.remove()
    for row in report.compressed:
        dense, compressed = model.get_submodule(row.name), small.get_submodule(row.name)
        with torch.no_grad():
            y, z = dense(inputs[row.name]).double(), compressed(inputs[row.name]).double()
        axes = [axis for axis in range(y.dim()) if axis != (y.dim() - 1 - Geometry.of(dense).n_spatial)]
        spread = (y - y.mean(axes, keepdim=True)).norm().item()
        error = (y - z).norm().item() / spread if spread > 1e-6 * y.norm().item() else None
        if error is None or row.error is None:
            continue
        # Calibration keeps the moments of single inputs of a transposed convolution. Where its windows overlap, an
        # output is a sum over neighbouring inputs, which are taken to be uncorrelated: there the error is an estimate.
        tolerance = 0.05 if _windows_overlap(Geometry.of(dense)) else 1e-3 + 0.02 * error
        assert abs(error - row.error) < tolerance, f"{row.name}: {row.error:.4f} reported, {error:.4f} true"


def _windows_overlap(geometry: Geometry) -> bool:
    """Whether two inputs of a transposed convolution reach the same output: through two taps of one axis."""
    if geometry.kind != "conv_transpose":
        return False
    return any(
        (tap * dilation) % stride == 0
        for taps, dilation, stride in zip(geometry.kernel_size, geometry.dilation, geometry.stride, strict=True)
        for tap in range(1, taps)
    )

"""Time of a ResNet-18's error curves beside that of its decomposition.

    python benchmarks/curves.py

One layer of every shape that its 3×3 convolutions have, with kernels of a stated spectrum (see material.py) and grams
whose channels fall off as 1/i and whose taps are correlated, as those of images are. Each is planned for half of its
parameters and then solved. Processor time of one thread; totals count every shape as often as the network has it.
Pointwise and Linear layers take no time worth counting. Writes results/benchmark_curves.json.
"""

from __future__ import annotations

import time
from typing import Any

import machine
import material
import torch
from torch import Tensor, nn

import tensigma as ts
from tensigma.layers import fingerprint

#: In-channels, out-channels, size of the map, how often.
SHAPES = (
    (64, 64, 56, 4),
    (64, 128, 56, 1),
    (128, 128, 28, 3),
    (128, 256, 28, 1),
    (256, 256, 14, 3),
    (256, 512, 14, 1),
    (512, 512, 7, 3),
)


def gram(n_in: int) -> Tensor:
    """Channels ⊗ taps, and a tenth of something that is no such product."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(n_in, n_in, generator=generator))[0]
    channels = (basis / torch.arange(1.0, n_in + 1)) @ basis.T
    places = torch.cartesian_prod(torch.arange(3.0), torch.arange(3.0))
    product = torch.kron(channels, torch.exp(-torch.cdist(places, places) / 1.5))
    rows = torch.randn(9 * n_in, 300, generator=generator) * product.diagonal().sqrt()[:, None]
    mixed = product + 0.1 * rows @ rows.T / 300
    return (mixed + mixed.T) / 2


def one_shape(n_in: int, n_out: int, size: int) -> dict[str, Any]:
    layer = nn.Conv2d(n_in, n_out, 3, padding=1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(material.kernel(n_out, n_in))
    model = nn.Sequential(layer)
    own = ts.LayerStats(mean=torch.zeros(9 * n_in), covariance=gram(n_in), count=10**5, input_shape=(n_in, size, size))
    stats = ts.Calibration({"0": own}, fingerprint=fingerprint(model))
    start = time.process_time()
    plan = ts.plan(model, stats, budget=ts.Params(0.5), skip=())
    middle = time.process_time()
    _, report = ts.compress(model, plan, stats)
    end = time.process_time()
    return {
        "chosen": plan["0"].label,
        "curve": middle - start,
        "solution": end - middle,
        "error_expected": plan["0"].error,
        "error": report.layers[0].error,
    }


def main() -> None:
    torch.set_num_threads(1)
    one_shape(16, 16, 8)  # whatever is slow the first time
    rows = []
    for n_in, n_out, size, count in SHAPES:
        rows.append({"in": n_in, "out": n_out, "count": count, **one_shape(n_in, n_out, size)})
        print(rows[-1], flush=True)
    curves, solutions = (sum(row["count"] * row[key] for row in rows) for key in ("curve", "solution"))
    print(f"curves {curves:.1f} s, decomposition {solutions:.1f} s, ratio {curves / solutions:.2f}")
    result = {"curves": curves, "decomposition": solutions, "ratio": curves / solutions, "shapes": rows}
    machine.write("benchmark_curves", result)


if __name__ == "__main__":
    main()

# %% [markdown]
# # What a layer does, not what it weighs
#
# One convolution of a small network for handwritten digits is decomposed twice at the same ranks: so that its *weights*
# are preserved (Frobenius norm), and so that its *outputs on data* are (Σ, the second moment of its inputs).
#
# As a script, `python what_a_layer_does.py [FOLDER]` writes the pictures there. As a notebook, run cell by cell.

# %%
import copy
from itertools import product
from typing import Any

import torch
from drawing import BLUE, GREY, ORANGE, draw_maps, in_percent, keep, panels

import tensigma as ts
from tensigma.experiments import TEST, TRAIN
from tensigma.experiments.demo import train
from tensigma.linalg import CP, Metric, Tucker2
from tensigma.zoo import load_data

# %% [markdown]
# ## A network, and what one of its layers sees
#
# The network learns in a few seconds. Calibration runs images through it, without labels, and keeps the second moment
# Σ = E[u uᵀ] of the patches u that each layer sees. The same from images that nothing else has seen is the judge.

# %%
LAYER = "conv2"
model = train(load_data(TRAIN))
stats, judge = (ts.calibrate(model, load_data(images))[LAYER] for images in (TRAIN, TEST))
weight = model.state_dict()[f"{LAYER}.weight"]
t, s = weight.shape[:2]  # output and input channels

# %% [markdown]
# ## Few directions matter
#
# Along the eigenvectors v of Σ, strongest first: how much of the outputs lies there (λ‖Mv‖²), how much of the inputs
# (λ), how much of the weights (‖Mv‖²)? The Frobenius norm takes care of all directions alike.

# %%
values, vectors = (part.flip(-1) for part in torch.linalg.eigh(stats.gram.double()))
spread = (weight.flatten(1).double() @ vectors).square().sum(0)
energies = {"outputs": values * spread, "inputs": values, "weights": spread}
shares = {what: energy.cumsum(0) / energy.sum() for what, energy in energies.items()}

figure, (left, right) = panels(1, 2, width=8, height=3.1)
left.semilogy(range(1, stats.d + 1), values / values[0], color=BLUE)
left.set(title=f"Eigenvalues of Σ at {LAYER}", xlabel="direction, strongest first", ylabel="eigenvalue ÷ largest")
for (what, share), colour in zip(shares.items(), (ORANGE, BLUE, GREY), strict=True):
    right.plot(range(1, stats.d + 1), share, color=colour, label=f"of the {what}")
enough = int((shares["outputs"] < 0.95).sum()) + 1
right.axvline(enough, color=GREY, linewidth=1, linestyle=":")
held = shares["weights"][enough - 1]
right.set_title(f"{enough} of {stats.d} directions hold 95% of the outputs\nand {held:.0%} of the weights")
right.set(xlabel="number of directions, strongest first", ylabel="share", ylim=(0, 1.03))
in_percent(right.yaxis)
right.legend()
keep(figure, "layer-spectrum.png")

# %% [markdown]
# ## The same ranks, two norms
#
# A solver takes a kernel and a metric. The identity is the classical problem; Σ is the one that knows the data.
# Each result is then measured three ways: how far off are the weights, how far off are the outputs on unseen images,
# and on how many of those does the network still give the answer it gave, with nothing else changed?

# %%
norms = {"Frobenius": Metric.identity(stats.d), "Σ": Metric.from_gram(stats.gram)}
unseen = Metric.from_gram(judge.gram)
solvers: dict[str, list[Any]] = {
    "Tucker-2": [Tucker2(t * part // 8, s * part // 8) for part in (1, 2, 3, 4, 6)],
    "CP": [CP(s * part // 8) for part in (2, 4, 8, 16)],
}
network = copy.deepcopy(model)  # in which this one layer is replaced
trials: dict[tuple[str, str], list[dict[str, Any]]] = {pair: [] for pair in product(solvers, norms)}
for (format, norm), found in trials.items():
    for solver in solvers[format]:
        factors = solver.fit(weight, norms[norm]).factors
        kernel = factors.to_dense()
        network.load_state_dict({f"{LAYER}.weight": kernel}, strict=False)
        trial = {"kernel": kernel, "size": factors.n_params / weight.numel()}
        trial |= {name: metric.relative_error(weight, kernel) for name, metric in norms.items()}
        trial["outputs"] = unseen.relative_error(weight, kernel)
        trial["answers"] = ts.evaluate(network, load_data(TEST), original=model).agreement
        found.append(trial)

figure, axes = panels(1, 3, width=8.6, height=3.3)
titles = {"Frobenius": "Error of the weights", "outputs": "Error of the outputs", "answers": "Answers that stay"}
for axis, (what, title) in zip(axes, titles.items(), strict=True):
    for (format, norm), found in trials.items():
        line, colour = "s--" if format == "CP" else "o-", GREY if norm == "Frobenius" else ORANGE
        sizes, heights = [trial["size"] for trial in found], [trial[what] for trial in found]
        axis.plot(sizes, heights, line, color=colour, label=f"{format}, {norm}")
    axis.set(title=title, ylabel="share of unseen images" if what == "answers" else "relative error", ylim=(0, None))
    axis.set(xlabel="remaining parameters of the layer", xscale="log", xticks=[0.05, 0.1, 0.2, 0.4, 0.8])
    in_percent(axis.xaxis, axis.yaxis)
axes[0].axhline(1, color=GREY, linewidth=1, linestyle=":", label="all weights zero")
axes[0].legend()
keep(figure, "layer-errors.png")

# %% [markdown]
# ## What the next layer gets to see
#
# The output for the first unseen image, Tucker-2 at the second ranks: every eighth channel, none picked. Orange is
# below zero and blue above.

# %%
image, maps = next(iter(load_data(TEST)))[0][:1], []
network.get_submodule(LAYER).register_forward_hook(lambda layer, inputs, output: maps.append(output[0].detach()))
for kernel in (weight, *(trials["Tucker-2", norm][1]["kernel"] for norm in norms)):
    network.load_state_dict({f"{LAYER}.weight": kernel}, strict=False)
    network(image)
rows = [("original", maps[0])]
for norm, own in zip(norms, maps[1:], strict=True):
    rows += [(norm, own), (f"its error\n{(own - maps[0]).norm() / maps[0].norm():.0%}", own - maps[0])]
keep(draw_maps(image[0, 0], rows, range(0, t, t // 8)), "layer-maps.png")

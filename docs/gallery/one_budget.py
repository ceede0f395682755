# %% [markdown]
# # One budget in: the front of all budgets
#
# A budget says how small a network is to be. Which layers, which format and which ranks follow from how much each
# choice harms what the layers do; and once that is known, it is known for every budget.
#
# As a script, `python one_budget.py [FOLDER]` writes the pictures there. As a notebook, run cell by cell.

# %%
from typing import Any

import torch
from drawing import BLUE, FORMATS, GREEN, GREY, PALE, in_percent, keep, panels

import tensigma as ts
from tensigma.experiments import TEST, TRAIN
from tensigma.experiments.demo import train
from tensigma.zoo import load_data

# %% [markdown]
# ## Calibrate, plan, and ask for the front
#
# 400 images without labels are enough here. `front.trade()` has every corner of the trade between size and error; the
# error is that of the layers, as planning expects it, not yet that of the network.

# %%
model = train(load_data(TRAIN))
images, unseen = load_data(f"{TRAIN}&samples=400"), load_data(TEST)
stats = ts.calibrate(model, images)
front = ts.plan(model, stats, budget=ts.Params(0.1)).front()
trade = front.trade(ts.Params)

# %% [markdown]
# ## What the budgets are worth
#
# Four points of the front are carried out in two ways: each layer fitted by itself, and all in sequence, where a layer
# is fitted to the inputs that the smaller layers before it leave, towards the outputs of the original. Agreement with
# the original is measured on images that neither training nor calibration has seen.

# %%
BUDGETS = (0.02, 0.03, 0.05, 0.1)
WAYS: dict[str, dict[str, Any]] = {"each layer by itself": {}, "in sequence": {"data": images}}
plans = {share: front.plan(ts.Params(share)) for share in BUDGETS}
small = {(way, b): ts.compress(model, plans[b], stats, **data)[0] for way, data in WAYS.items() for b in BUDGETS}
found = {which: ts.evaluate(network, unseen, original=model) for which, network in small.items()}

figure, (left, right) = panels(1, 2, width=8, height=3.2)
left.plot([point.share for point in trade], [point.error for point in trade], color=BLUE, label="the front")
left.vlines(BUDGETS, 0, 1, color=GREY, linewidth=1, linestyle=":", label="carried out")
left.set(title=f"{len(trade)} corners, found once", ylabel="expected error of the layers", ylim=(0, 1))
left.set(xscale="log", xticks=[0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1])
for way, colour, marker in zip(WAYS, (GREY, GREEN), "so", strict=True):
    right.plot(BUDGETS, [found[way, share].agreement for share in BUDGETS], color=colour, marker=marker, label=way)
right.set(title="Answers that stay", ylabel=f"share of {found[way, 0.02].samples} unseen images", ylim=(0, 1.03))
right.set(xscale="log", xticks=BUDGETS)
for axis in (left, right):
    axis.set_xlabel("parameters of the network that remain")
    in_percent(axis.xaxis, axis.yaxis)
    axis.legend()
keep(figure, "budget-front.png")

# %% [markdown]
# ## Where the parameters went
#
# Pale: the layer as it was. The first convolution is left dense by default; it has 288 weights.

# %%
figure, axes = panels(2, 2, width=8, height=4.6, sharey=True, sharex=True)
for axis, share in zip(axes.flat, BUDGETS, strict=True):
    for place, entry in enumerate(plans[share].values()):
        axis.barh(place, entry.before.params, color=PALE, height=0.75)
        method = entry.label.split()[0]
        axis.barh(place, entry.after.params, color=FORMATS[method], height=0.45)
        axis.annotate(entry.label, (entry.after.params, place), xytext=(3, 0), textcoords="offset points", va="center")
    axis.set(title=f"budget {share:.0%}", xscale="log", xlim=(100, 300_000))
    axis.set_yticks(range(len(plans[share])), list(plans[share]))
axes[0, 0].invert_yaxis()
figure.supxlabel("parameters of the layer", fontsize=9)
keep(figure, "budget-layers.png")

# %% [markdown]
# ## Why the sequence matters
#
# The output of each layer on unseen images beside that of the original. Errors of layers fitted by themselves pile up;
# in sequence, each makes up for some of what came before.

# %%
batch = torch.cat([images for images, _ in unseen])


def outputs(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What each layer makes of the unseen images, (channel, images × positions)."""
    x, seen = batch, {}
    for name, layer in network.named_children():
        x = layer(x).detach()
        seen[name] = x.transpose(0, 1).flatten(1)
    return {name: seen[name] for name in plans[0.02]}


figure, axes = panels(1, 2, width=8, height=3, sharey=True)
original, drift = outputs(model).values(), {}
for axis, share in zip(axes, (0.03, 0.05), strict=True):
    for way, colour, marker in zip(WAYS, (GREY, GREEN), "so", strict=True):
        pairs = zip(original, outputs(small[way, share]).values(), strict=True)
        drift[way, share] = [((own - y).square().mean(1).sum() / y.var(1).sum()).sqrt().item() for y, own in pairs]
        axis.plot(list(plans[share]), drift[way, share], color=colour, marker=marker, label=way)
    axis.set(title=f"budget {share:.0%}", xlabel="layer", ylim=(0, None))
    in_percent(axis.yaxis)
axes[0].set_ylabel("relative error of its output")
axes[0].legend()
keep(figure, "budget-sequence.png")

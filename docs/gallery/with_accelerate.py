# %% [markdown]
# # A compressed model in a training loop of Hugging Face Accelerate
# Compressed layers are plain `nn.Conv*` and `nn.Linear` layers, so a loop need not know that a model was compressed.

# %%
from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import tensigma as ts
from tensigma.experiments import TEST, TRAIN
from tensigma.experiments.demo import train
from tensigma.zoo import load_data

original = train(load_data(TRAIN))
images, held_out = load_data(f"{TRAIN}&samples=400"), load_data(TEST)

# %% A thirtieth of the parameters, without labels.
small, report = ts.compress(original, images, budget=ts.Params(0.03))
before = ts.evaluate(small, held_out, original=original)

# %% The loop as Accelerate's own guide writes it.
torch.manual_seed(0)
samples = TensorDataset(*(torch.cat(parts) for parts in zip(*load_data(TRAIN), strict=True)))
accelerator = Accelerator(cpu=True)
optimizer = torch.optim.Adam(small.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(small, optimizer, DataLoader(samples, batch_size=64, shuffle=True))
model.train()
for _ in range(10):
    for inputs, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(functional.cross_entropy(model(inputs), labels))
        optimizer.step()

# %% What comes back is the compressed model, as small as before.
tuned = accelerator.unwrap_model(model).eval()
after = ts.evaluate(tuned, held_out, original=original)

# %% [markdown]
# # A compressed model in Lightning
# Compressed layers are plain `nn.Conv*` and `nn.Linear` layers, so a `LightningModule` need not know that a model was
# compressed.

# %%
from __future__ import annotations

import lightning
import torch
from torch import Tensor, nn
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


# %% A module as Lightning's own guide writes it.
class Tuning(lightning.LightningModule):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        inputs, labels = batch
        return functional.cross_entropy(self.network(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


torch.manual_seed(0)
samples = TensorDataset(*(torch.cat(parts) for parts in zip(*images, strict=True)))
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", devices=1, **quiet)
trainer.fit(Tuning(small), DataLoader(samples, batch_size=64, shuffle=True))

# %% What comes back is the compressed model, as small as before.
tuned = small.eval()
after = ts.evaluate(tuned, held_out, original=original)

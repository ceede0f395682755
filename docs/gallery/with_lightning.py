# %% [markdown]
# # A compressed model in a Lightning module
# Compressed layers are plain `nn.Conv*` and `nn.Linear` layers, so a trainer need not know that a model was compressed.

# %%
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import tensigma as ts
from tensigma.experiments import TEST, TRAIN
from tensigma.experiments.demo import train
from tensigma.zoo import import_torchvision, load_data

# Lightning imports torchvision where it is installed; this also works if its build does not fit that of torch.
import_torchvision()
import lightning as L  # noqa: E402

original = train(load_data(TRAIN))
images, held_out = load_data(f"{TRAIN}&samples=400"), load_data(TEST)

# %% A thirtieth of the parameters, without labels.
small, report = ts.compress(original, images, budget=ts.Params(0.03))
before = ts.evaluate(small, held_out, original=original)


# %% The module as Lightning's own guide writes it: a model, a step, an optimizer.
class Classifier(L.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return functional.cross_entropy(self.model(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


# %% Ten epochs with labels.
L.seed_everything(0, verbose=False)
samples = TensorDataset(*(torch.cat(parts) for parts in zip(*load_data(TRAIN), strict=True)))
trainer = L.Trainer(
    max_epochs=10,
    accelerator="cpu",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
classifier = Classifier(small.train())
trainer.fit(classifier, DataLoader(samples, batch_size=64, shuffle=True))

# %% What comes back is the compressed model, as small as before.
tuned = classifier.model.eval()
after = ts.evaluate(tuned, held_out, original=original)

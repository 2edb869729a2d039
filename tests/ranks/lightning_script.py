"""What Trainers of several ranks train, and a script that does: each rank writes its weights."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetero import status
from hetero.integrations.lightning import HeteroStrategy
from tests.ranks.models import Net, Values

RANKS, STEPS, SIZE, CLIP = 2, 5, 4, 0.5
SETTINGS: dict[str, Any] = {"device": "cpu:sim", "hbm": 60_000, "chunk_bytes": 1024}


class Module(LightningModule):
    """Trains a net as users' modules do."""

    def __init__(self, how: str = "automatic") -> None:
        super().__init__()
        self.net = Net()
        self.automatic_optimization = how != "manual"
        self.evictions = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        loss = self.net(batch[0]).pow(2).mean()
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, CLIP, "norm")
        optimizer.step()
        optimizer.zero_grad()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).pow(2).mean(), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def on_train_batch_end(self, *_: Any) -> None:
        if "_hetero_engine" in self.__dict__:
            self.evictions += status(self).evictions

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def samples(number: int = SIZE * RANKS * STEPS, seed: int = 1) -> torch.Tensor:
    return torch.randn(number, 10, generator=torch.Generator().manual_seed(seed))


def loader(data: torch.Tensor, **given: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(data), **{"batch_size": SIZE, **given})


def trainer(root: Path, strategy: Any, **given: Any) -> Trainer:
    """Return a Trainer that says nothing."""
    warnings.simplefilter("ignore")
    quietly = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "gradient_clip_val": CLIP,
        "max_epochs": 1,
    }
    return Trainer(strategy=strategy, default_root_dir=root, **{**quietly, **given})


def on_ranks(root: Path, **given: Any) -> Trainer:
    strategy = HeteroStrategy(**SETTINGS, mesh="world")
    return trainer(root, strategy, **{"devices": RANKS, **given})


def weights_of(module: nn.Module) -> Values:
    return {name: value.clone() for name, value in module.state_dict().items()}


def main(folder: str) -> None:
    torch.manual_seed(0)
    run, module = on_ranks(Path(folder)), Module()
    run.fit(module, loader(samples()))
    torch.save(weights_of(module), f"{folder}/{run.global_rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A Lightning script with hetero against the same script without: every number is the same."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning")

from lightning import Fabric, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

import hetero  # noqa: E402
from hetero.errors import ConfigError  # noqa: E402
from hetero.integrations.lightning import HeteroFabricStrategy, HeteroStrategy  # noqa: E402

HBM = 45_000


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 24)
        blocks = (nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)) for _ in "abcdef")
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(24, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Model(LightningModule):
    """Trains as users' modules do; it remembers what it saw."""

    def __init__(self, how: str = "automatic") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Tied()
        self.how = how
        self.automatic_optimization = how != "manual"
        self.seen: list[float] = []
        self.evictions = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> torch.Tensor:
        (tokens,) = batch
        logits = self(tokens[:, :-1]) if self.how == "manual" else self.net(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        loss = self.loss(batch)
        self.seen.append(loss.item())
        if self.how != "manual":
            return loss
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        self.manual_backward(loss)
        if batch_idx % 2:
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.seen.append(loss.item())
        self.log("val", loss)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.loss(batch).item())

    def on_train_batch_end(self, *_: Any) -> None:
        if "_hetero_engine" in self.__dict__:
            self.evictions += hetero.status(self).evictions

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def loader(seed: int = 1) -> DataLoader[Any]:
    tokens = torch.randint(0, 32, (18, 9), generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(tokens), batch_size=3, shuffle=False)


def trainer(root: Path, strategy: Any = "auto", **given: Any) -> Trainer:
    """Return a Trainer that says nothing."""
    quietly = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "max_epochs": 2,
    }
    return Trainer(strategy=strategy, default_root_dir=root, **{**quietly, **given})


def ours(**settings: Any) -> HeteroStrategy:
    return HeteroStrategy(**{"device": "cpu:sim", "hbm": HBM, "chunk_bytes": 2048, **settings})


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[k], expected[k]) for k in expected)


def fitted(run: Trainer, how: str = "automatic", **given: Any) -> Model:
    model = Model(how)
    run.fit(model, loader(), loader(2), **given)
    return model


HOWS = {
    "automatic": {},
    "accumulated": {"accumulate_grad_batches": 2},
    "norm": {"gradient_clip_val": 0.5},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "bf16-mixed": {"precision": "bf16-mixed", "max_epochs": 1},
    "manual": {},
}


@pytest.mark.parametrize("how", HOWS)
def test_a_module_gives_the_same_numbers(how: str, tmp_path: Path) -> None:
    expected = fitted(trainer(tmp_path, **HOWS[how]), how)

    model = fitted(trainer(tmp_path, ours(), **HOWS[how]), how)

    assert model.seen == expected.seen
    assert len(set(model.seen)) > 10
    assert model.evictions > 6
    assert_equal(model.state_dict(), expected.state_dict())

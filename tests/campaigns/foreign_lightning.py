"""Lightning: checkpoints that are loaded without a Trainer, generators, names in logs."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner.tuning import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hetero.integrations.lightning import HeteroStrategy
from tests.campaigns.harness import Case, Side
from tests.integrations.models import Tied

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Model(LightningModule):
    """Tied weights, a buffer under two names, dropout, and hyperparameters of its own."""

    def __init__(self, blocks: int, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.batch_size = 2
        self.net = Tied(blocks)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("scale", torch.full((24,), 0.5))
        self.register_buffer("again", self.scale)
        self.schedules = False
        self.seen: list[float] = []

    def training_step(self, batch: Any, _: int) -> Tensor:
        (tokens,) = batch
        logits = self.drop(self.net(tokens[:, :-1]))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.seen.append(loss.item())
        return loss

    def train_dataloader(self) -> Any:
        tokens = torch.randint(0, 32, (12, 9), generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(tokens), batch_size=self.batch_size)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        if not self.schedules:
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


Program = Callable[[Side, Callable[..., Trainer], Path], None]


def lightning(program: Program, side: Side) -> None:
    """Run a program in a directory of its own, with Trainers of this side."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program(side, partial(trainer, side, folder), Path(folder))


def trainer(side: Side, folder: str, **given: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
    quiet = {"accelerator": "cpu", "logger": False, "default_root_dir": folder, **quiet}
    ours = side.settings and HeteroStrategy(chunk_bytes=1024, **side.settings)
    return Trainer(strategy=ours or "auto", **{**quiet, **given})


def fresh(seed: int = 0, blocks: int = 3) -> Model:
    torch.manual_seed(seed)
    return Model(blocks)


def record(side: Side, name: str, model: Model) -> None:
    side.record(f"{name}: losses", model.seen)
    for key, value in model.state_dict().items():
        side.record(f"{name}: {key}", value)


def a_checkpoint_is_loaded_without_a_trainer(side: Side) -> None:
    def program(side: Side, new: Callable[..., Trainer], folder: Path) -> None:
        saving = ModelCheckpoint(folder, save_last=True)
        run = new(callbacks=[saving])
        run.fit(fresh())
        for path in (saving.best_model_path, folder / "last.ckpt"):
            found = Model.load_from_checkpoint(path)
            record(side, "loaded", found)
            side.record("hyperparameters", found.hparams.blocks, found.hparams.lr)
        record(side, "on a device", Model.load_from_checkpoint(path, map_location="cpu", lr=0.5))
        side.record("still its own", int(found.net.embed.weight is found.net.head.weight))

    lightning(program, side)


def a_run_goes_on_with_the_generators_of_its_process(side: Side) -> None:
    def program(side: Side, new: Callable[..., Trainer], folder: Path) -> None:
        run = new(max_epochs=2, enable_checkpointing=False)
        run.fit(fresh())
        run.save_checkpoint(folder / "a.ckpt")
        again = fresh(7)
        run = new(max_epochs=3, enable_checkpointing=False)
        run.fit(again, ckpt_path=folder / "a.ckpt", weights_only=False)
        record(side, "gone on", again)
        side.record("drawn", torch.rand(3))

    lightning(program, side)


def learning_rates_and_batch_sizes_are_found(side: Side) -> None:
    """Both train for a while and load what they saved before."""

    def program(side: Side, new: Callable[..., Trainer], folder: Path) -> None:
        model = fresh()
        run = new(max_epochs=2, enable_checkpointing=False)
        tuner = Tuner(run)
        found: Any = tuner.lr_find(model, num_training=6, min_lr=1e-3, max_lr=1e-1)
        side.record("rates", found.results["lr"], found.results["loss"])
        tuner.scale_batch_size(model, steps_per_trial=1, max_trials=2, init_val=2)
        side.record("found", model.lr, model.batch_size)
        run.fit(model)
        record(side, "fitted", model)

    lightning(program, side)


def rates_are_logged(schedules: bool, side: Side) -> None:
    def program(side: Side, new: Callable[..., Trainer], folder: Path) -> None:
        monitor = LearningRateMonitor("step", log_momentum=True)
        model = fresh()
        model.schedules = schedules
        logger = CSVLogger(folder)
        run = new(callbacks=[monitor], logger=logger, log_every_n_steps=1, max_steps=3)
        run.fit(model)
        for name, values in sorted(monitor.lrs.items()):
            side.record(f"monitor {name}", values)
        side.record(f"logged {sorted(run.callback_metrics)}", *run.callback_metrics.values())

    lightning(program, side)


def rates_are_logged_with_a_schedule(side: Side) -> None:
    rates_are_logged(True, side)


def rates_are_logged_without_one(side: Side) -> None:
    rates_are_logged(False, side)


SIM = {"device": "cpu:sim", "hbm": 56_000}
CASES = [
    Case(a_checkpoint_is_loaded_without_a_trainer, SIM),
    Case(a_run_goes_on_with_the_generators_of_its_process, SIM),
    Case(learning_rates_and_batch_sizes_are_found, {**SIM, "hbm": 96_000}),
    Case(rates_are_logged_with_a_schedule, SIM),
    Case(rates_are_logged_without_one, SIM),
]

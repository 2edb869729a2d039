"""Trainers of transformers: several over one model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import hetero
from tests.campaigns.harness import Case, Side
from tests.integrations.trainers import built, history, llama


def trainer(side: Side, folder: str, model: nn.Module, **given: Any) -> Any:
    """Return a stock Trainer over the tiny data, or ours under the side's budget."""
    if side.settings is None:
        return built(transformers.Trainer, Path(folder), model, **given)
    ours = {"chunk_bytes": 1024, **side.settings}
    return built(hetero.trainer(transformers.Trainer), Path(folder), model, hetero=ours, **given)


def in_a_folder(program: Callable[[Side, str], None], side: Side) -> None:
    with tempfile.TemporaryDirectory() as folder:
        program(side, folder)


def record_run(side: Side, name: str, ran: Any) -> None:
    """Write down a log, the weights and the optimizer's states."""
    for row in history(ran):
        side.record(f"{name}: {sorted(row)}", *(row[key] for key in sorted(row)))
    side.record_all(name, ran.model, getattr(ran.optimizer, "optimizer", ran.optimizer))


def one_trains_and_another_evaluates(side: Side) -> None:
    def program(side: Side, folder: str) -> None:
        first = trainer(side, folder, llama(2), max_steps=3)
        first.train()
        second = trainer(side, folder, first.model)
        side.record("loss", second.evaluate()["eval_loss"])
        side.record("loss", first.evaluate()["eval_loss"])
        record_run(side, "first", first)

    in_a_folder(program, side)


def two_train_in_turns(side: Side) -> None:
    """Each goes on with its own optimizer's states, from the other's weights."""

    def program(side: Side, folder: str) -> None:
        first = trainer(side, folder, llama(2), max_steps=3)
        first.train()
        second = trainer(side, folder, first.model, max_steps=2, optim="sgd")
        second.train()
        record_run(side, "second", second)
        side.record("loss", first.evaluate()["eval_loss"])
        first.train()
        record_run(side, "first", first)

    in_a_folder(program, side)


def a_model_is_released_with_the_optimizer_of_its_trainer(side: Side) -> None:
    """A loop of the user's own goes on, and a Trainer after that."""

    def program(side: Side, folder: str) -> None:
        first = trainer(side, folder, llama(2), max_steps=3)
        first.train()
        model, optimizer = first.model, first.optimizer.optimizer
        if not side.is_plain:
            model, optimizer = hetero.release(model, first.optimizer)
        side.train(model, optimizer, lambda m, n: m(**batch(n)).loss, steps=2)
        first.train()
        record_run(side, "again", first)

    in_a_folder(program, side)


def batch(number: int) -> dict[str, Any]:
    rows = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(number))
    return {"input_ids": rows, "labels": rows}


class Remembers(nn.Module):
    """Keeps the order of its data in a buffer that grows, and loads one of any length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 64)
        self.register_buffer("order", torch.empty(0, dtype=torch.long))
        self.loads = 0

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        self.loads += 1
        self.order = state_dict["order"].clone()
        return super().load_state_dict(state_dict, strict)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        logits = self.head(x)
        if self.training:
            self.order = torch.cat([self.order, input_ids[:, 0].detach().clone()])
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def a_run_is_resumed_by_the_models_own_method(side: Side) -> None:
    def program(side: Side, folder: str) -> None:
        saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
        first = trainer(side, folder, Remembers(), **saving)
        first.train()
        record_run(side, "first", first)
        again = trainer(side, folder, Remembers(), **saving)
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        record_run(side, "again", again)
        side.record("loads", again.model.loads)

    in_a_folder(program, side)


SIM = {"device": "cpu:sim", "hbm": 340_000}
CASES = [
    Case(one_trains_and_another_evaluates, SIM),
    Case(two_train_in_turns, SIM),
    Case(a_model_is_released_with_the_optimizer_of_its_trainer, SIM),
    Case(a_run_is_resumed_by_the_models_own_method, {**SIM, "hbm": 60_000}),
]

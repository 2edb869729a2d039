"""Trainers of transformers: several over one model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import hetero
from tests.campaigns.harness import Case, Side
from tests.integrations.trainers import HBM, built, history, llama


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


SIM = {"device": "cpu:sim", "hbm": HBM}
CASES = [
    Case(one_trains_and_another_evaluates, SIM),
    Case(two_train_in_turns, SIM),
    Case(a_model_is_released_with_the_optimizer_of_its_trainer, SIM),
]

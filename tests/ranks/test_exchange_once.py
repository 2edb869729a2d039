"""Gradients that ranks exchange once a step: those of a rank add up first, then rank by rank."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import hetero
from hetero.errors import ConfigError
from hetero.parallel.anatomy import result_of
from hetero.parallel.splitting import call_of, split
from hetero.recipes.learners import digest
from hetero.recipes.optimizers import factor_of, optimizer_of
from hetero.recipes.task import demo
from hetero.recipes.train import train
from hetero.status import status
from hetero.testing.ranks import run_ranks
from tests.ranks.test_split import SETTINGS, in_whole, loss_of, made, stepped
from tests.ranks.test_stage_norms import words
from tests.ranks.test_train import by_rank, options
from tests.ranks.test_train_stages import same

MICRO_BATCHES, STEPS, COPIES = 4, 3, 2


def on_stages(rank: int, kind: str, schedule: str) -> tuple[dict[str, torch.Tensor], int]:
    mesh = {"pp": 2, "dp_shard": COPIES}
    found = split(made(kind), mesh, schedule, batch=words(0, 0)[:1])
    optimizer = torch.optim.AdamW(found.stages.parameters(), lr=1e-2)
    settings = {**SETTINGS, "hbm": 260 * 1024, "mesh": mesh}
    stages, optimizer = hetero.prepare(found.stages, optimizer, **settings)
    running = found.schedule(MICRO_BATCHES, loss_of, exchange="step")
    for number in range(STEPS):
        stepped(found, running, words(number, rank % COPIES))
        optimizer.step()
        optimizer.zero_grad()
    return in_whole(stages), status(stages).evictions


def in_one(kind: str, exchange: str) -> dict[str, torch.Tensor]:
    """Train the whole model by plain torch, with the sums of either exchange."""
    model = made(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    params = list(model.parameters())
    for number in range(STEPS):
        parts = [words(number, copy).chunk(MICRO_BATCHES) for copy in range(COPIES)]
        once = exchange == "step"
        local: list[list[torch.Tensor]] = [[] for _ in range(COPIES)]
        for i, copy in itertools.product(range(MICRO_BATCHES), range(COPIES)):
            loss = loss_of(result_of(model(parts[copy][i], **call_of(model))), parts[copy][i])
            grads = list(torch.autograd.grad(loss, params))
            known = local[copy]
            local[copy] = [a.add_(b) for a, b in zip(known, grads, strict=True)] if known else grads
            if not once or i == MICRO_BATCHES - 1:
                for param, grad in zip(params, local[copy], strict=True):
                    grad = grad * (1 / COPIES)
                    param.grad = grad if param.grad is None else param.grad.add_(grad)
                local[copy] = []
        for param in params:
            param.grad.div_(MICRO_BATCHES)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "schedule"), [("gpt", "1F1B"), ("llama", "Interleaved1F1B")])
def test_pipelines_exchange_what_their_micro_batches_add_up_to(kind: str, schedule: str) -> None:
    theirs, other = in_one(kind, "step"), in_one(kind, "pass")
    assert any(not torch.equal(theirs[name], other[name]) for name in theirs)

    seen = set()
    for mine, evictions in run_ranks(4, on_stages, kind, schedule):
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
        assert evictions >= 3
        seen |= mine.keys()
    assert seen == theirs.keys()


def at_no_time(rank: int) -> str:
    found = split(nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))), {"pp": 1}, batch=ones())
    with pytest.raises(ConfigError, match="exchange='never'") as error:
        found.schedule(2, loss_of, exchange="never")
    return error.value.advice


def ones() -> torch.Tensor:
    return torch.ones(1, 4)


def test_another_exchange_is_refused() -> None:
    assert run_ranks(1, at_no_time) == ["use one of 'pass', 'step'"]


# -- hetero train ----------------------------------------------------------------------------------

FIELDS: dict[str, Any] = {"steps": 4, "exchange": "step"}


def by_torch(folder: Path, n_ranks: int) -> tuple[list[float], str]:
    """Train the demo with torch alone: sums of each rank's passes, then the mean over ranks."""
    given = options(folder, **FIELDS)
    task = demo(given)
    optimizer, params = optimizer_of(task.model, given), list(task.model.parameters())
    scheduler = LambdaLR(optimizer, factor_of(given, given.steps))
    losses = []
    for _ in range(given.steps):
        batches = [next(task.batches) for _ in range(given.accumulate)]
        found = [0.0] * len(batches)
        for rank in range(n_ranks):
            local: list[torch.Tensor] = []
            for at in range(rank, len(batches), n_ranks):
                loss = task.loss(batches[at], torch.device("cpu")) * (n_ranks / len(batches))
                found[at] = loss.item() / n_ranks
                grads = list(torch.autograd.grad(loss, params))
                local = [a.add_(b) for a, b in zip(local, grads, strict=True)] if local else grads
            for param, grad in zip(params, local, strict=True):
                grad = grad * (1 / n_ranks)
                param.grad = grad if param.grad is None else param.grad.add_(grad)
        nn.utils.clip_grad_norm_(params, given.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(sum(found))
    return losses, digest(task.model)


def test_ranks_of_hetero_train_exchange_once_a_step(tmp_path: Path) -> None:
    expected = by_torch(tmp_path, 2)

    for result in run_ranks(2, by_rank, tmp_path / "ranks", {**FIELDS, "mesh": "dp_shard=2"}):
        assert (list(result.losses), result.weights_sha256) == expected


@pytest.mark.slow
def test_pipelines_of_hetero_train_exchange_once_a_step(tmp_path: Path) -> None:
    shares = run_ranks(2, by_rank, tmp_path / "shares", {**FIELDS, "mesh": "dp_shard=2"})[0]

    for result in run_ranks(4, by_rank, tmp_path / "ranks", {**FIELDS, "mesh": "pp=2,dp_shard=2"}):
        assert same(result, shares)


def test_a_run_does_not_go_on_with_another_exchange(tmp_path: Path) -> None:
    train(options(tmp_path, steps=1))

    with pytest.raises(ConfigError, match="exchange was pass and is step"):
        train(options(tmp_path, **{**FIELDS, "resume": True}))

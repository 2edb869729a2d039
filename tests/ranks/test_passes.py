"""Backward passes that do not give every gradient, or that fail, and the sums over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero import StateError
from hetero.api import prepare_tuned
from hetero.config import Config
from hetero.testing.ranks import outcomes, run_ranks
from hetero.train.engine.tuning import Tuning
from tests.ranks import models
from tests.ranks.models import Found, Run, assert_same, found

STEPS = 3


class Nine(nn.Module):
    """Weights of one bucket, of which a pass may leave out every second one."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(0.2 * torch.randn(5, 7)) for _ in range(9))
        self.uses_all = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, weight in enumerate(self.weights):
            if number % 2 == 0 or self.uses_all:
                x = x + x @ weight.T @ weight
        return x.pow(2).mean()


def built() -> tuple[Nine, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Nine()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def loss_of(model: Nine, step: int, number: int, rank: int) -> torch.Tensor:
    model.uses_all = number == 0
    seed = torch.Generator().manual_seed(100 * step + 10 * number + rank)
    out: torch.Tensor = model(torch.randn(4, 7, generator=seed))
    return out


def by_hand(n_ranks: int) -> Found:
    model, optimizer = built()
    params = list(model.parameters())
    for step in range(STEPS):
        for number in range(2):
            for rank in range(n_ranks):
                loss = loss_of(model, step, number, rank)
                grads = torch.autograd.grad(loss, params, allow_unused=True)
                for param, grad in zip(params, grads, strict=True):
                    if grad is not None:
                        grad = grad * (1 / n_ranks)
                        param.grad = grad if param.grad is None else param.grad.add_(grad)
        optimizer.step()
        optimizer.zero_grad()
    return found(model, optimizer, [])


def by_ranks(rank: int, settings: dict[str, Any]) -> Found:
    model, plain = built()
    model, optimizer = hetero.prepare(model, plain, mesh="world", **settings)
    for step in range(STEPS):
        for number in range(2):
            loss_of(model, step, number, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = found(model, optimizer, [])
    hetero.release(model, optimizer)
    return state


@pytest.mark.parametrize("n_ranks", [2, pytest.param(3, marks=pytest.mark.campaign(seconds=1))])
def test_a_gradient_that_a_later_pass_leaves_out_keeps_its_sum(n_ranks: int) -> None:
    expected = by_hand(n_ranks)
    for each in run_ranks(n_ranks, by_ranks, {"device": "cpu:sim", "hbm": 100_000}):
        assert_same(each, expected)


# -- passes that fail ----------------------------------------------------------------------------

RUN = Run(settings={"device": "cpu:sim", "hbm": 60_000, "chunk_bytes": 1024})


class Fails:
    """A hook that raises when a tensor's gradient comes, while it is armed."""

    armed = False

    def __call__(self, grad: torch.Tensor) -> None:
        if self.armed:
            raise ValueError("planted")


def fails_and_goes_on(rank: int, run: Run, at: int, retains: bool) -> Found:
    """Each pass fails once when backward comes to block ``at``; it is made again."""
    model, plain = models.built(run)
    fails = Fails()

    def watch(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fails)

    model.blocks[at].register_forward_hook(watch)
    config = Config.load(mesh="world", **run.settings)
    model, optimizer = prepare_tuned(model, plain, config, Tuning(one_sided=run.one_sided))
    norms = []
    for step in range(run.steps):
        loss = models.loss_of(model, run, step, rank)
        fails.armed = True
        with pytest.raises(ValueError, match="planted"):
            loss.backward(retain_graph=retains)
        fails.armed = False
        optimizer.zero_grad()
        if not retains:
            loss = models.loss_of(model, run, step, rank)
        loss.backward()
        norms.append(float(optimizer.clip_grad_norm_(run.clip)))
        optimizer.step()
        optimizer.zero_grad()
    state = found(model, optimizer, norms)
    hetero.release(model, optimizer)
    return state


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("retains", [True, False], ids=["same-graph", "new-forward"])
@pytest.mark.parametrize("one_sided", [True, False], ids=["read", "gathered"])
@pytest.mark.parametrize("at", [0, 3])
def test_a_pass_that_failed_leaves_nothing_to_the_next(
    at: int, one_sided: bool, retains: bool
) -> None:
    run = replace(RUN, one_sided=one_sided)
    expected = models.by_torch(run, 2)
    for each in run_ranks(2, fails_and_goes_on, run, at, retains):
        assert_same(each, expected)


def uses_what_failed(rank: int, use: str) -> None:
    model, plain = models.built(RUN)
    fails = Fails()
    model, optimizer = hetero.prepare(model, plain, mesh="world", **RUN.settings)
    model.blocks[1].register_forward_hook(lambda m, i, out: out.register_hook(fails) and None)
    fails.armed = True
    with pytest.raises(ValueError, match="planted"):
        models.loss_of(model, RUN, 0, rank).backward()
    fails.armed = False
    if use == "a pass":
        models.loss_of(model, RUN, 0, rank).backward()
    else:
        optimizer.step()


@pytest.mark.parametrize("use", ["a pass", "a step"])
def test_gradients_of_a_pass_that_failed_must_be_taken_away(use: str) -> None:
    for each in outcomes(2, uses_what_failed, use):
        assert isinstance(each.error, StateError) and "zero_grad" in str(each.error), each.text

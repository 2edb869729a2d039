"""Backward passes that do not give every gradient, or that fail, and the sums over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.testing.ranks import run_ranks
from tests.ranks.models import Found, assert_same, found

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


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_a_gradient_that_a_later_pass_leaves_out_keeps_its_sum(n_ranks: int) -> None:
    expected = by_hand(n_ranks)
    for each in run_ranks(n_ranks, by_ranks, {"device": "cpu:sim", "hbm": 100_000}):
        assert_same(each, expected)

"""Gradients that a program sets by itself, where autograd would have added to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.api import status
from hetero.train.gradients.slot import LazyGrad

D, STEPS = 32, 5


class Product(torch.autograd.Function):
    """A product whose backward gives the weight its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, owner: nn.Linear) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.owner = owner
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        mine = grad.t() @ x
        if ctx.owner.weight.grad is None:
            ctx.owner.weight.grad = mine
        else:
            ctx.owner.weight.grad += mine
        return grad @ weight, None, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(Product.apply(x, self.linear.weight, self.linear))


def trained(*, clips: bool, dtype: torch.dtype, **settings: Any) -> list[torch.Tensor]:
    """Train in two micro-batches a step; return the weights."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Block() for _ in range(8))).to(dtype)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if settings:
        model, optimizer = hetero.prepare(model, optimizer, **settings)
    for step in range(STEPS):
        torch.manual_seed(step)
        for _ in range(2):
            x = torch.randn(4, D, dtype=dtype).requires_grad_()
            model(x).float().square().mean().backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if settings:
            assert all(isinstance(p.grad, LazyGrad) for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert not settings or status(model).evictions >= 3
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_backward_assigns_go_home_with_plain_bits(
    clips: bool, dtype: torch.dtype
) -> None:
    settings = {"device": "cpu:sim", "hbm": 7 * dtype.itemsize * 1024, "chunk_bytes": 1024}
    theirs = trained(clips=clips, dtype=dtype)
    mine = trained(clips=clips, dtype=dtype, **settings)

    assert all(torch.equal(a, b) for a, b in zip(theirs, mine, strict=True))


def paged(**settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(4)))
    settings = {"device": "cpu:sim", "hbm": 24 * 1024, "chunk_bytes": 1024, **settings}
    return hetero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), **settings)


def test_a_gradient_that_is_held_counts_as_it_is_at_the_step() -> None:
    model, optimizer = paged()
    weight = model[0][0].weight
    before = weight.detach().clone()
    held = torch.zeros(D, D)
    weight.grad = held
    model(torch.randn(4, D))  # gradients that are not held would go home
    held += 1
    optimizer.step()

    assert torch.equal(weight.detach(), before - 0.5)


def test_a_gradient_that_is_set_between_passes_is_added_to() -> None:
    model, optimizer = paged()
    weight = model[0][0].weight
    before = weight.detach().clone()
    weight.grad = torch.ones(D, D)
    model(torch.randn(4, D))
    assert isinstance(weight.grad, LazyGrad)
    weight.grad += 1
    optimizer.step()

    assert torch.equal(weight.detach(), before - 1)

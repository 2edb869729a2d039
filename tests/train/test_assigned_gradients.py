"""Gradients that a program sets by itself, where autograd would have added to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import hetero
from hetero.api import engine_of
from hetero.status import status
from hetero.train.gradients.slot import LazyGrad
from tests.equivalence.blocks import OneMatrix

D, STEPS = 32, 5


def by_hand(model: nn.Module, x: torch.Tensor) -> None:
    """Go backward as a program does that takes gradients apart from their addition."""
    params = list(model.parameters())
    edges = [get_gradient_edge(param) for param in params]  # of tensors it would fetch all at once
    grads = torch.autograd.grad(model(x).float().square().mean(), edges)
    for param, grad in zip(params, grads, strict=True):
        if param.grad is None:
            param.grad = grad
        else:
            param.grad += grad


def by_halves(model: nn.Module, x: torch.Tensor) -> None:
    """Go backward as torch's zero bubble schedules do: inputs first, weights later."""
    x.requires_grad_()
    loss = model(x).float().square().mean()
    _, groups = stage_backward_input([loss], None, [x], model.parameters())
    stage_backward_weight(model.parameters(), groups)


def trained(
    backward: Callable[[nn.Module, torch.Tensor], None],
    *,
    clips: bool,
    dtype: torch.dtype,
    **settings: Any,
) -> list[torch.Tensor]:
    """Train in two micro-batches a step; return the weights."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(OneMatrix(D) for _ in range(8))).to(dtype)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if settings:
        model, optimizer = hetero.prepare(model, optimizer, **settings)
    for step in range(STEPS):
        torch.manual_seed(step)
        for _ in range(2):
            backward(model, torch.randn(4, D, dtype=dtype))
        if settings and backward is by_halves:  # the last ones go home with the next events
            assert sum(isinstance(p.grad, LazyGrad) for p in model.parameters()) >= 6
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    assert not settings or status(model).evictions >= 3
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backward", [by_hand, by_halves])
def test_gradients_that_a_program_assigns_go_home_with_plain_bits(
    backward: Callable[[nn.Module, torch.Tensor], None], clips: bool, dtype: torch.dtype
) -> None:
    n_units = 11 if backward is by_hand else 7  # which has all gradients at once
    hbm = n_units * dtype.itemsize * 1024
    settings = {"device": "cpu:sim", "hbm": hbm, "chunk_bytes": 1024}
    theirs = trained(backward, clips=clips, dtype=dtype)
    mine = trained(backward, clips=clips, dtype=dtype, **settings)

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


def test_a_gradient_whose_base_is_held_counts_as_it_is_at_the_step() -> None:
    model, optimizer = paged()
    weight = model[0][0].weight
    before = weight.detach().clone()
    base = torch.zeros(D, D)
    weight.grad = base.t()
    model(torch.randn(4, D))
    base += 1
    optimizer.step()

    assert torch.equal(weight.detach(), before - 0.5)


def test_the_half_of_a_pass_that_is_for_weights_alone_is_measured() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(OneMatrix(D) for _ in range(8)))
    settings = {"device": "cpu:sim", "hbm": 28 * 1024, "chunk_bytes": 1024}
    model, _ = hetero.prepare(model, torch.optim.SGD(model.parameters()), **settings)
    by_halves(model, torch.randn(1, D))

    seen = engine_of(model).residence.fitting.meter.seen_bytes()
    assert seen > D * D * 4  # a weight's gradient; all else is 2 KiB


Act = Callable[[Any, Any, Callable[[int], None]], None]


def scales_what_it_holds(model: Any, optimizer: Any, backward: Callable[[int], None]) -> None:
    """Look at gradients through views, and let a second pass add to the same objects."""
    held = [param.grad for param in model.parameters()]
    torch.cat([grad.view(-1) for grad in held]).norm()
    backward(1)
    for grad in held:
        grad.div_(2)


def scales_data_that_it_holds(model: Any, optimizer: Any, backward: Callable[[int], None]) -> None:
    held = [param.grad.data for param in model.parameters()]
    for grad in held:
        grad.numpy().sum()
    backward(1)
    for grad in held:
        grad.div_(2)


def shares_one(model: Any, optimizer: Any, backward: Callable[[int], None]) -> None:
    first, second = model[0][0].weight, model[1][0].weight
    second.grad = first.grad
    first.grad.mul_(2)


def shares_one_and_clips(model: Any, optimizer: Any, backward: Callable[[int], None]) -> None:
    first, second = model[0][0].weight, model[1][0].weight
    second.grad = first.grad.detach()
    clip = getattr(optimizer, "clip_grad_norm_", None)  # torch's own has none
    (clip or (lambda most: nn.utils.clip_grad_norm_(model.parameters(), most)))(1e-3)


def shares_one_to_which_a_pass_adds(
    model: Any, optimizer: Any, backward: Callable[[int], None]
) -> None:
    first, second = model[0][0].weight, model[1][0].weight
    second.grad = first.grad
    first.grad.view(-1)
    backward(1)
    second.grad.mul_(2)


@pytest.mark.parametrize(
    "act",
    [
        scales_what_it_holds,
        scales_data_that_it_holds,
        shares_one,
        shares_one_and_clips,
        shares_one_to_which_a_pass_adds,
    ],
)
def test_gradients_that_are_held_or_shared_are_one_tensor_each(act: Act) -> None:
    def trained(optimizer: Any, model: Any) -> list[torch.Tensor]:
        def backward(number: int) -> None:
            x = torch.randn(4, D, generator=torch.Generator().manual_seed(number))
            model(x).square().mean().backward()

        for _ in range(3):
            backward(0)
            act(model, optimizer, backward)
            optimizer.step()
            optimizer.zero_grad()
        return [value.clone() for value in model.state_dict().values()]

    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(4)))
    expected = trained(torch.optim.SGD(plain.parameters(), lr=0.5), plain)
    found = trained(*paged(hbm=40 * 1024)[::-1])

    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))

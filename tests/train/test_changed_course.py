"""Programs that go on otherwise after units were proven to be computed again with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

import hetero

D, STEPS, CHANGED = 32, 6, 3
HBM = 50_000
Loss = Callable[[int], torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = weight_norm(nn.Linear(D, D)), nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


def makes_weights_once(model: nn.Sequential, loss: Loss, number: int) -> torch.Tensor:
    with parametrize.cached():
        found = loss(number)
        found.backward()
    return found


def rounds_what_is_saved(model: nn.Sequential, loss: Loss, number: int) -> torch.Tensor:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.bfloat16() if tensor.dim() == 3 else tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor.float()):
        found = loss(number)
    found.backward()
    return found


def freezes_before_backward(model: nn.Sequential, loss: Loss, number: int) -> torch.Tensor:
    found = loss(number)
    model[1].requires_grad_(False)
    found.backward()
    model[1].requires_grad_(True)
    return found


def thaws_before_backward(model: nn.Sequential, loss: Loss, number: int) -> torch.Tensor:
    model[1].requires_grad_(False)
    found = loss(number)
    model[1].requires_grad_(True)
    found.backward()
    return found


def trained(act: Any, **settings: Any) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Block() for _ in range(4)), nn.LayerNorm(D))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if settings:
        model, optimizer = hetero.prepare(model, optimizer, **settings)

    def loss(number: int) -> torch.Tensor:
        x = torch.randn(2, 7, D, generator=torch.Generator().manual_seed(number))
        found: torch.Tensor = model(x).square().mean()
        return found

    recomputed, losses = 0, []
    for number in range(STEPS):
        if number < CHANGED:
            found = loss(number)
            found.backward()
        else:
            found = act(model, loss, number)
        losses.append(found.detach())
        optimizer.step()
        optimizer.zero_grad()
        if settings and number == CHANGED - 1:
            recomputed = [*hetero.status(model).policies.values()].count("recompute")
    return [*losses, *(value.clone() for value in model.state_dict().values())], recomputed


@pytest.mark.parametrize(
    "act",
    [
        makes_weights_once,
        rounds_what_is_saved,
        freezes_before_backward,
        thaws_before_backward,
    ],
)
def test_a_program_may_change_its_course(act: Any) -> None:
    """Units that were computed again ended it in a StateError, under the default activations."""
    expected, _ = trained(act)
    found, recomputed = trained(act, device="cpu", hbm=HBM, chunk_bytes=256)

    assert recomputed
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))

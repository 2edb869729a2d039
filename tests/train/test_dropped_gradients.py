"""Gradients that a program takes away while their copies are on their way home."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import hetero
from hetero.device import CpuDevice, SimDevice
from tests.equivalence.blocks import DTYPES, SOME, WIDTH, Run


def another_pass(run: Run) -> None:
    """The first unit alone is used again: its other gradient is summed, in fp32 for a master."""
    first = run.model.blocks[0]
    first.weight.grad = None
    x = torch.ones(2, WIDTH, dtype=first.weight.dtype)
    hetero.backward(first(x).float().square().sum())


def another_value(run: Run) -> None:
    """The program sets gradients of its own."""
    for param in run.model.parameters():
        param.grad = None
        param.grad = torch.full_like(param, 0.01)


def another_batch(run: Run) -> None:
    """The batch was a bad one, and is left out."""
    run.optimizer.zero_grad()
    run.backward(99)


def states_are_read(run: Run) -> None:
    """To read them all updates are waited for, after which homes of gradients are freed."""
    run.optimizer.zero_grad()
    run.optimizer.state_dict()


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("then", [another_pass, another_value, another_batch, states_are_read])
def test_what_follows_waits_for_their_copies(then: Callable[[Run], None], precision: str) -> None:
    """Homes are written again, or freed, after the copies have landed. ``lazy=0``: none lands
    before it is waited for."""
    devices = CpuDevice(), SimDevice(seed=1, checked=True, lazy=0.0)
    plain, run = (
        Run(device, SOME // 2, homes_on_hbm=False, precision=precision, activations="recompute")
        for device in devices
    )
    for each in (plain, run):
        for number in range(6):
            each.backward(number)
            if number >= 2:  # until then the device holds no gradients on their way
                then(each)
            each.optimizer.step()
            each.optimizer.zero_grad()
    assert run.bits() == plain.bits()

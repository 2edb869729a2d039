"""Backward runs in a thread of the device, and not in the program's: our hooks work there."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from hetero.train.gradients.slot import LazyGrad
from tests.emulator import fake
from tests.equivalence.blocks import UNITS, Run


@pytest.fixture(autouse=True)
def without_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_PARANOID", "0")


def test_gradients_leave_while_backward_goes_on_in_its_own_thread(watched: None) -> None:
    """The bits would be right without that: `step` takes home what is still on the device."""
    run = Run(fake.device(), homes_on_hbm=False)
    params = list(run.model.parameters())
    left: list[tuple[threading.Thread, int]] = []

    def look(grad: torch.Tensor) -> None:
        here = [p for p in params if p.grad is not None and type(p.grad) is not LazyGrad]
        left.append((threading.current_thread(), len(here)))

    params[0].register_hook(look)  # of the unit that backward comes to last
    for number in range(3):
        run.backward(number)
        assert all(type(param.grad) is LazyGrad for param in params)
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert all(thread is not threading.main_thread() for thread, _ in left)
    assert max(here for _, here in left) <= 4 < 2 * UNITS  # of the last unit, and the one before


def test_an_addend_of_the_device_s_thread_is_added_at_home(watched: None) -> None:
    """No Python frame started that thread: the addition is autograd's all the same."""
    run = Run(fake.device(), homes_on_hbm=False)
    params: list[Any] = list(run.model.parameters())
    run.backward(0)
    run.backward(1)
    assert all(param.grad.slot.summed for param in params)

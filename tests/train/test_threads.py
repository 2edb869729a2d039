"""One thread at a time uses a model: another one is told, and disturbs nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.errors import StateError
from tests.equivalence.harness import same, values

WIDTH = 24


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))


def calls(model: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(x)


def calls_a_unit(model: Any, x: torch.Tensor) -> Any:
    return model[4](x)


def reads(model: Any, x: torch.Tensor) -> Any:
    return float(model[5][0].weight.norm())


def gathers(model: Any, x: torch.Tensor) -> Any:
    with hetero.gathered(model):
        return x


@pytest.mark.parametrize("use", [calls, calls_a_unit, reads, gathers], ids=lambda f: f.__name__)
@pytest.mark.parametrize("device", ["cpu", "cpu:sim"])
def test_a_second_thread_is_refused_while_a_forward_runs(
    device: str, use: Callable[[Any, torch.Tensor], Any]
) -> None:
    plain, twin = net(), net()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer: Any = torch.optim.SGD(twin.parameters(), lr=0.1)
    model, optimizer = hetero.prepare(twin, optimizer, device=device, hbm="16KiB", chunk_bytes=256)
    x = torch.randn(3, WIDTH)
    with ThreadPoolExecutor(1) as other:

        def meanwhile(*_: Any) -> None:
            with pytest.raises(StateError, match="two threads use the model"):
                other.submit(use, model, x).result()

        for number in range(4):
            hook = model[2][0].register_forward_hook(meanwhile)
            for m, o in ((plain, reference), (model, optimizer)):
                m(x).square().mean().backward()
                o.step()
                o.zero_grad()
            hook.remove()
            same(values(plain), values(model), f"step {number}")
        other.submit(use, model, x).result()  # the first one is done with it


def test_threads_that_take_turns_train_as_one() -> None:
    plain, twin = net(), net()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer: Any = torch.optim.SGD(twin.parameters(), lr=0.1)
    given = {"device": "cpu:sim", "hbm": "16KiB", "chunk_bytes": 256}
    model, optimizer = hetero.prepare(twin, optimizer, **given)
    turn = threading.Lock()

    def step(m: Any, o: Any) -> None:
        with turn:
            m(torch.ones(3, WIDTH)).square().mean().backward()
            o.step()
            o.zero_grad()

    with ThreadPoolExecutor(3) as threads:
        for m, o in ((plain, reference), (model, optimizer)):
            for done in [threads.submit(step, m, o) for _ in range(6)]:
                done.result()
    same(values(plain), values(model), "weights")

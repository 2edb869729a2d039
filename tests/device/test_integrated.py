"""A CUDA device whose memory is a part of RAM."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import hetero
from hetero.config import Config, HostLimit
from hetero.train.engine.blueprint import draw
from hetero.train.engine.budget import available
from tests.emulator import fake

MIB = 2**20


def device(monkeypatch: pytest.MonkeyPatch, *, is_integrated: bool) -> Any:
    """Return a device of a machine with 8 MiB of free RAM."""
    made = fake.device(is_integrated=int(is_integrated))
    monkeypatch.setattr(made, "host_limit", lambda: HostLimit(8 * MIB, "a test"))
    return made


def build() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))


def train(on: Any) -> list[torch.Tensor]:
    """Train a few steps and return the weights."""
    gc.collect()
    model = build()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = hetero.prepare(model, optimizer, device=on, hbm=300_000)
    for number in range(3):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(number))
        model(x.to(fake.PLACE)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    hetero.release(model, optimizer)
    return [param.detach().cpu().clone() for param in model.parameters()]


def ram_for_homes(on: Any) -> int:
    model, config = build(), Config.load(hbm=300_000)
    held = sum(param.nbytes for param in model.parameters())  # moved home
    return available(model, config, on, draw(model, None, config, on), 0).host - held


def test_what_hbm_takes_of_one_ram_the_homes_have_not(
    emulator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ram_for_homes(device(monkeypatch, is_integrated=False)) == 8 * MIB
    assert ram_for_homes(device(monkeypatch, is_integrated=True)) == 8 * MIB - 300_000


def test_streams_order_the_copies_within_one_ram(
    watched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = train(device(monkeypatch, is_integrated=False))
    together = train(device(monkeypatch, is_integrated=True))

    assert all(map(torch.equal, together, apart))

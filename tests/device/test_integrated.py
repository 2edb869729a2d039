"""A CUDA device whose memory is a part of RAM."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import hetero
from hetero.api import engine_of
from hetero.config import Config, HostLimit
from hetero.device import memory
from hetero.train.engine.blueprint import draw
from hetero.train.engine.budget import available
from hetero.types import Tier
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


@pytest.mark.parametrize(("ram", "free"), [(48, 48), (100, 64), (4, 8)])
def test_files_in_the_page_cache_leave_one_ram_free(
    emulator: None, monkeypatch: pytest.MonkeyPatch, ram: int, free: int
) -> None:
    """The driver says what is in no use at all: after a checkpoint was read, almost nothing."""
    monkeypatch.setattr(fake.cuda(), "mem_get_info", lambda place: (8 * MIB, 64 * MIB))
    monkeypatch.setattr(memory, "host_limit", lambda: HostLimit(ram * MIB, "a test"))
    monkeypatch.setattr(fake.cuda(), "fraction", 2.0)
    one, apart = (fake.device(is_integrated=i, total_memory=64 * MIB) for i in (1, 0))
    assert one.memory.free_bytes() == free * MIB
    assert apart.memory.free_bytes() == 8 * MIB


def test_streams_order_the_copies_within_one_ram(
    watched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = train(device(monkeypatch, is_integrated=False))
    together = train(device(monkeypatch, is_integrated=True))

    assert all(map(torch.equal, together, apart))


def large() -> Any:
    """Return a model whose states fit in the RAM, but not 1.5 times in the device's part."""
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(20)))


@pytest.mark.parametrize("settings", [{}, {"host": "6MiB"}, {"hbm": "1MiB"}])
def test_homes_and_frames_divide_one_ram_by_themselves(
    watched: None, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    """By default HBM is all that the device has, which would leave none for homes."""
    gc.collect()
    plain, model = fake.on_device(large()), large()
    steps: Any = torch.optim.AdamW(plain.parameters(), lr=0.1, foreach=False)
    ours: Any = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    one = fake.device(is_integrated=1, total_memory=8 * MIB)
    monkeypatch.setattr(fake.cuda(), "mem_get_info", lambda place: (8 * MIB, 8 * MIB))
    monkeypatch.setattr(one, "host_limit", lambda: HostLimit(8 * MIB - held(model), "a test"))
    model, ours = hetero.prepare(model, ours, device=one, **settings)
    for number in range(3):
        x = torch.randn(4, 128, generator=torch.Generator().manual_seed(number)).to(fake.PLACE)
        for net, optimizer in ((plain, steps), (model, ours)):
            net(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    ledger = engine_of(model).setup.ledger
    hbm = ledger.budgets[Tier.HBM]
    assert hbm is not None and 0 < hbm + ledger.peak(Tier.HOST) <= 8 * MIB
    assert all(map(torch.equal, model.state_dict().values(), on_cpu(plain)))


def held(model: torch.nn.Module) -> int:
    return sum(param.nbytes for param in model.parameters())


def on_cpu(model: torch.nn.Module) -> list[torch.Tensor]:
    return [param.detach().cpu() for param in model.parameters()]

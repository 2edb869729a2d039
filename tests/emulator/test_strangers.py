"""On CUDA the allocator counts everything: what is not the model's is no activation."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import nn

import hetero
from hetero.api import engine_of
from tests.emulator import fake


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)))


def test_other_models_and_tensors_on_the_device_take_nothing_of_a_budget(watched: None) -> None:
    teacher = fake.on_device(net())  # 130 KB, and a budget of 300 KB
    others = [torch.zeros(1_000_000, device=fake.PLACE)]
    plain, model = net(), net()
    plain_steps = torch.optim.SGD(plain.parameters(), lr=0.1)
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    device = fake.device()
    model, steps = hetero.prepare(model, steps, device=device, hbm=300_000, chunk_bytes=4096)
    reference = hetero.prepare(net(), device=device, hbm=200_000, chunk_bytes=4096)
    for number in range(6):
        if number == 2:
            others.append(torch.zeros(500_000, device=fake.PLACE))
        if number == 4:
            others.clear()
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(number))
        left = plain(x).square().mean()
        found = model(x.to(fake.PLACE))
        with torch.no_grad():
            target, same = teacher(x.to(fake.PLACE)), reference(x.to(fake.PLACE))
        assert torch.equal(target, same)
        right = found.square().mean()
        assert torch.equal(left, right.cpu())
        for loss, optimizer in ((left, plain_steps), (right, steps)):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert hetero.status(model).activation_bytes < 150_000


def test_a_model_that_is_collected_in_another_s_step_takes_nothing_of_its_budget(
    watched: None,
) -> None:
    """It was there at the allocator's peak, and is not when that is read."""
    device = fake.device()
    models = [net(), net()]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hetero.prepare(model, optimizer, device=device, hbm=300_000, chunk_bytes=4096)
    first, left = models[0], weakref.ref(models.pop())
    x = torch.randn(16, 64).to(fake.PLACE)

    def collect(*_: object) -> None:
        gc.collect()
        assert left() is None

    assert left() is not None
    first[3].register_forward_hook(collect)
    del model, optimizer
    first(x).square().mean().backward()
    residence: Any = engine_of(first).residence
    assert residence.fitting.meter.seen_bytes() < 100_000

"""CudaDevice's lanes, on an emulated device: the order of copies, memory and its end."""

from __future__ import annotations

import torch

import hetero
from tests.emulator import fake


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6)))


def train(steps: int = 3, parts: int = 1, **settings: object) -> torch.nn.Module:
    """Train a few steps on the emulated device; each step has ``parts`` backward passes."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = hetero.prepare(
        model, optimizer, device=fake.device(), hbm=100_000, chunk_bytes=1024, **settings
    )
    for number in range(steps):
        for part in range(parts):
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * number + part))
            model(x.to(model[0].weight.device)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_gradients_that_add_up_come_down_without_the_host_waiting_for_each(watched: None) -> None:
    train(parts=2)

    assert not [what for what in fake.copies() if "asynchronous" in what and "pageable" in what]

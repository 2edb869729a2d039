"""CudaDevice's lanes, on an emulated device: the order of copies, memory and its end."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import hetero
from tests.emulator import fake


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6)))


def prepared(**settings: Any) -> Any:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"device": fake.device(), "hbm": 100_000, "chunk_bytes": 1024, **settings}
    return hetero.prepare(model, optimizer, **settings)


def train(steps: int = 3, parts: int = 1, **settings: Any) -> torch.nn.Module:
    """Train a few steps on the emulated device; each step has ``parts`` backward passes."""
    model, optimizer = prepared(**settings)
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


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("until", ["forward", "backward", "step"])
@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_a_model_that_goes_without_release_leaves_no_copy_without_memory(
    watched: None, until: str, activations: str, seed: int
) -> None:
    fake.start(seed)
    abandon(until, activations)
    gc.collect()
    torch.ones(1, device=fake.PLACE, requires_grad=True).sum().backward()  # its thread lets go
    gc.collect()

    assert fake.pinned_bytes() == 0


def abandon(until: str, activations: str) -> None:
    """Train, and leave in the middle of the third step."""
    model, optimizer = prepared(activations=activations, hbm=300_000)
    for number in range(3):
        loss = model(torch.randn(64, 32).to(fake.PLACE)).pow(2).mean()
        if number == 2 and until == "forward":
            return
        loss.backward()
        if number == 2 and until == "backward":
            return
        optimizer.step()
        optimizer.zero_grad()

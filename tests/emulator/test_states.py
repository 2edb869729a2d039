"""States of an optimizer on CUDA: on the CPU while updates run there, on the device in torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetero
from tests.emulator import fake

Make = Callable[[Any], torch.optim.Optimizer]
HBM = 60_000


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))


def step(model: nn.Module, optimizer: Any, number: int) -> Tensor:
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(number))
    loss = model(x.to(next(model.parameters()).device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().cpu()


def adafactor(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=0.01)


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=True)


def prepared(model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
    return hetero.prepare(model, optimizer, device=fake.device(), hbm=HBM, chunk_bytes=1024)


def places(optimizer: Any) -> set[tuple[str, str]]:
    states = optimizer.state.values()
    return {(k, v.device.type) for s in states for k, v in s.items() if isinstance(v, Tensor)}


@pytest.mark.parametrize(
    "make", [adafactor, pytest.param(fused, marks=pytest.mark.campaign(seconds=1))]
)
def test_a_checkpoint_of_an_optimizer_goes_on(watched: None, make: Make, tmp_path: Path) -> None:
    first, again = net(), net()
    model, optimizer = prepared(first, make(first.parameters()))
    for number in range(2):
        step(model, optimizer, number)
    hetero.save_checkpoint(tmp_path, model, optimizer)
    other, loaded = prepared(again, make(again.parameters()))
    hetero.load_checkpoint(tmp_path, other, loaded)
    for number in range(2, 4):
        assert torch.equal(step(model, optimizer, number), step(other, loaded, number))


@pytest.mark.parametrize("make", [adafactor, fused])
def test_an_optimizer_that_stepped_on_the_device_is_prepared_and_released(
    watched: None, make: Make
) -> None:
    plain, model = net(), fake.on_device(net())
    plain_steps, steps = make(plain.parameters()), make(model.parameters())
    give_states(plain_steps)
    give_states(steps)
    before = places(steps)
    ours, optimizer = prepared(model, steps)
    for number in range(3):
        assert torch.equal(step(ours, optimizer, number), step(plain, plain_steps, number))
    model, steps = hetero.release(ours, optimizer)
    assert places(steps) == before
    assert {param.device for param in model.parameters()} == {torch.device(fake.PLACE)}


@pytest.mark.parametrize("make", [adafactor, fused])
def test_a_released_optimizer_steps_where_its_parameters_are(watched: None, make: Make) -> None:
    model = net()
    ours, optimizer = prepared(model, make(model.parameters()))
    step(ours, optimizer, 0)
    model, steps = hetero.release(ours, optimizer)
    assert {place for _, place in places(steps)} == {"cpu"}
    step(model, steps, 1)


def give_states(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer the states that it has after a step on the device: its kernels there are
    not emulated."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            twin = nn.Parameter(param.detach().cpu().clone())
            like = type(optimizer)([twin], **{k: group[k] for k in ("lr",)})
            twin.grad = torch.ones_like(twin)
            like.step()
            on_device = group.get("fused")
            optimizer.state[param] = {
                k: v.to(param.device) if v.dim() or on_device else v
                for k, v in like.state[twin].items()
            }


def test_updates_of_homes_in_ram_keep_denormals_as_kernels_of_a_device_do(watched: None) -> None:
    """`torch.set_flush_denormal` is of the CPU alone: no kernel of CUDA asks for it."""

    def trained(prepare: bool) -> list[Tensor]:
        model = net()
        for param in model.parameters():
            param.data.zero_()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-38, foreach=False)
        if prepare:
            model, optimizer = prepared(model, optimizer)
        else:
            model = fake.on_device(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-38, foreach=False)
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.25)
        torch.set_flush_denormal(prepare)
        try:
            optimizer.step()
        finally:
            torch.set_flush_denormal(False)
        return [param.detach().cpu() for param in model.parameters()]

    found, expected = trained(True), trained(False)
    assert all(0 < abs(value.flatten()[0].item()) < 1e-37 for value in expected)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))

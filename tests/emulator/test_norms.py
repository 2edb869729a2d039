"""Norms of gradients on a device whose kernels for lists round otherwise than those for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.train.engine.tuning import Tuning
from hetero.train.gradients.slot import LazyGrad
from tests.emulator import fake

WIDTH = 32


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def alone(model: Any, optimizer: Any) -> list[Tensor]:
    return [p.grad.norm() for p in model.parameters()]


def by_hand(model: Any, optimizer: Any) -> list[Tensor]:
    norms = [torch.norm(p.grad.detach(), 2.0) for p in model.parameters()]
    total = torch.norm(torch.stack(norms), 2.0)
    for p in model.parameters():
        p.grad.detach().mul_(1e-2 / (total + 1e-6))
    return [total]


def clipped(model: Any, optimizer: Any) -> list[Tensor]:
    return [nn.utils.clip_grad_norm_(model.parameters(), 1e-2)]


def one_by_one(model: Any, optimizer: Any) -> list[Tensor]:
    return [nn.utils.clip_grad_norm_(model.parameters(), 1e-2, foreach=False)]


def twice(model: Any, optimizer: Any) -> list[Tensor]:
    """Log the norms after a clip, next to the loss: they are on its device."""
    before = clipped(model, optimizer)
    after = torch.stack([torch.ones((), device=fake.PLACE), *alone(model, optimizer)])
    again = nn.utils.clip_grad_norm_(model.parameters(), 5e-3)
    return [*before, after, again]


def optimizers_own(model: Any, optimizer: Any) -> list[Tensor]:
    clip = getattr(optimizer, "clip_grad_norm_", None)
    return clipped(model, optimizer) if clip is None else [clip(1e-2)]


READS = [alone, by_hand, clipped, one_by_one, twice, optimizers_own]


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel for lists give the next number up, for plain torch and hetero alike."""
    plain = torch._foreach_norm

    def moved(grads: list[Tensor], ord: float = 2, dtype: Any = None) -> list[Tensor]:
        norms = plain(grads, ord, dtype=dtype)
        at_home = isinstance(grads[0], LazyGrad)  # the kernel runs below this call, and comes here
        return norms if at_home else [torch.nextafter(norm, norm + 1) for norm in norms]

    monkeypatch.setattr(torch, "_foreach_norm", moved)
    monkeypatch.setattr("hetero.internals._norms", moved)


@pytest.mark.parametrize("read", READS, ids=lambda read: read.__name__)
@pytest.mark.parametrize("homes_on_hbm", [False, True])
def test_a_norm_has_the_bits_of_the_kernel_that_plain_torch_uses(
    watched: None, apart: None, read: Callable[..., list[Tensor]], homes_on_hbm: bool
) -> None:
    def run(model: nn.Module, optimizer: Any) -> list[Tensor]:
        found: list[Tensor] = []
        for number in range(3):
            x = torch.full((2, WIDTH), 1.0 + number, device=fake.PLACE)
            model(x).square().mean().backward()
            found += [norm.cpu() for norm in read(model, optimizer)]
            optimizer.step()
            optimizer.zero_grad()
        return [*found, *(value.detach().cpu() for value in model.state_dict().values())]

    plain = fake.on_device(net())
    wanted = run(plain, torch.optim.SGD(plain.parameters(), lr=0.1, foreach=False))
    model: Any = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    config = Config.load(device=fake.device(), hbm=48_000, chunk_bytes=256)
    tuning = Tuning(homes_on_hbm=None if homes_on_hbm else False)
    model, optimizer = prepare_tuned(model, optimizer, config, tuning)
    assert engine_of(model).residence.name == "paged"
    assert all(map(torch.equal, run(model, optimizer), wanted))

"""Operations on lists of all gradients: as torch's, and the device never holds all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetero
from hetero.train.gradients.slot import LazyGrad
from tests.emulator import fake

N, WIDTH = 12, 64


def clip(grads: list[Tensor], params: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(params, 0.01, foreach=True)


def norms(grads: list[Tensor], params: list[nn.Parameter]) -> None:
    total = torch.stack(torch._foreach_norm(grads, 1)).sum()
    torch._foreach_mul_(grads, 1 / (1 + total))


def powers(grads: list[Tensor], params: list[nn.Parameter]) -> None:
    torch._foreach_add_(grads, grads, alpha=0.5)
    torch._foreach_mul_(grads, [1 + i / 8 for i in range(len(grads))])
    torch._foreach_abs_(grads)


def train(change: Callable[[list[Any], list[Any]], None], *, plain: bool) -> list[Tensor]:
    torch.manual_seed(2)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(N)))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    if plain:
        fake.on_device(model)
    else:
        device = fake.device()
        model, optimizer = hetero.prepare(model, optimizer, device=device, hbm=160_000)
    params = list(model.parameters())
    for number in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        model(x.to(fake.PLACE)).square().mean().backward()
        grads = [param.grad for param in params]
        assert plain or all(type(grad) is LazyGrad for grad in grads)
        fake.load().reset_peak()
        before = fake.allocated_bytes()
        change(grads, params)
        taken = fake.cuda().max_memory_allocated() - before
        assert plain or taken < sum(grad.nbytes for grad in grads) // 3
        optimizer.step()
        optimizer.zero_grad()
    return [value.detach().cpu().clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("change", [clip, norms, powers], ids=lambda f: f.__name__)
def test_a_list_of_gradients_comes_one_by_one(
    change: Callable[[list[Any], list[Any]], None], watched: None
) -> None:
    plain, found = train(change, plain=True), train(change, plain=False)
    assert all(map(torch.equal, plain, found))


def test_lists_of_other_lengths_are_torch_s_error(watched: None) -> None:
    model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = hetero.prepare(model, optimizer, device=fake.device(), hbm=20_000, chunk_bytes=256)
    model(torch.ones(2, 8, device=fake.PLACE)).sum().backward()
    with pytest.raises(RuntimeError):
        torch._foreach_add_([p.grad for p in model.parameters()], [torch.ones(8)])

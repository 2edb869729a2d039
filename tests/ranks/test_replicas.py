"""Processes that each have a whole model average as torch's DistributedDataParallel does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("accelerate")

from accelerate import Accelerator

from hetero.integrations.accelerate import HeteroAccelerator
from hetero.testing.ranks import run_ranks
from tests.ranks.models import Net
from tests.ranks.test_accelerate import started

PLUGIN = {"device": "cpu:sim", "hbm": 60_000, "chunk_bytes": 1024}
WIDTH = 10
Loss = Callable[[Tensor], Tensor]


def usual(accelerator: Any, model: Any, batch: Tensor, loss: Loss) -> None:
    accelerator.backward(loss(model(batch)))


def evaluated_between(accelerator: Any, model: Any, batch: Tensor, loss: Loss) -> None:
    """As preference trainers do, whose reference is the model without its adapters."""
    made = model(batch)
    with torch.no_grad():
        target = model(batch / 2)
    accelerator.backward(loss(made - target))


def plain_backward(accelerator: Any, model: Any, batch: Tensor, loss: Loss) -> None:
    loss(model(batch)).backward()


def without_gradients(accelerator: Any, model: Any, batch: Tensor, loss: Loss) -> None:
    """Gradients of an input are none of the model's."""
    given = batch.clone().requires_grad_()
    made = model(given)
    (grad,) = torch.autograd.grad(loss(made), given, retain_graph=True)
    loss(made * (1 + grad.detach().mean())).backward()


def accumulated(accelerator: Any, model: Any, batch: Tensor, loss: Loss) -> None:
    with accelerator.no_sync(model):
        accelerator.backward(loss(model(batch)))
    with torch.no_grad():
        model(batch)
    loss(model(batch * 2)).backward()


def accumulated_plainly(accelerator: Any, model: Any, batch: Tensor, loss: Loss) -> None:
    with accelerator.no_sync(model):
        loss(model(batch)).backward()
    accelerator.backward(loss(model(batch * 2)))


WAYS = (
    usual,
    evaluated_between,
    plain_backward,
    without_gradients,
    accumulated,
    accumulated_plainly,
)


def trained(rank: int, kind: str, way: Callable[..., None]) -> dict[str, Tensor]:
    started()
    stock = kind == "stock"
    accelerator = (
        Accelerator(cpu=True) if stock else HeteroAccelerator(hetero_plugin=PLUGIN, cpu=True)
    )
    torch.manual_seed(0)
    model: Any = Net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(3):
        dice = torch.Generator().manual_seed(10 * step + rank)
        way(accelerator, model, torch.randn(4, WIDTH, generator=dice), lambda y: y.square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    found = {k: v.clone() for k, v in accelerator.unwrap_model(model).state_dict().items()}
    accelerator.free_memory()
    return found


def all_of(rank: int) -> list[tuple[str, list[str]]]:
    """Return the ways that differ, and in what."""
    found = []
    for way in WAYS:
        plain, ours = (trained(rank, kind, way) for kind in ("stock", "ours"))
        found.append((way.__name__, [k for k in plain if not torch.equal(plain[k], ours[k])]))
    return found


def test_gradients_are_averaged_where_torch_averages_them() -> None:
    """A forward without gradients before backward cancelled the average, and `loss.backward()` was
    never followed by one: each rank went its own way."""
    for found in run_ranks(2, all_of):
        assert found == [(way.__name__, []) for way in WAYS]


def test_torchs_backward_is_its_own_again_after_the_model_is_let_go() -> None:
    def let_go(rank: int) -> bool:
        before = torch.autograd._engine_run_backward
        trained(rank, "ours", usual)
        return torch.autograd._engine_run_backward is before

    assert run_ranks(2, let_go) == [True, True]

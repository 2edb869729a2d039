"""One of several ranks on emulated devices, started as torchrun does: ``-m tests.emulator.rank``.

It trains in plain torch with the micro-batches of all ranks, then as one of them, and fails unless
weights are the same bits and nothing was found on the device.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hetero.api import engine_of, prepare_tuned, release
from hetero.config import Config
from hetero.memory.extent import PinUse
from hetero.parallel import node
from hetero.train.engine.engine import Engine
from tests.emulator import fake
from tests.emulator.harness import assert_no_pageable_copies
from tests.ranks.models import Net

STEPS = 4


def built() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(1000 * step + rank)
    out: torch.Tensor = model(torch.randn(5, 10, generator=dice).to(fake.PLACE))
    return out.pow(2).mean()


def by_torch(n_ranks: int, max_norm: float | None) -> dict[str, torch.Tensor]:
    model = fake.on_device(built()[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    params = list(model.parameters())
    for step in range(STEPS):
        for rank in range(n_ranks):
            grads = torch.autograd.grad(loss_of(model, step, rank), params)
            for param, grad in zip(params, grads, strict=True):
                grad = grad * (1 / n_ranks)
                param.grad = grad if param.grad is None else param.grad.add_(grad)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(params, max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


def assert_shares_are_locked(engine: Engine) -> None:
    """Weights are copied up from where ranks keep them, and not through stages."""
    device: Any = engine.setup.device
    for bucket in engine.setup.buckets:
        home = engine.setup.store.homes["param", bucket.id]
        for _, part in home.parts(0, bucket.numel, PinUse.READ):
            assert device._locked.holds(part.view(torch.uint8)), bucket.id


def main(settings: dict[str, Any]) -> None:
    fake.load()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    expected = by_torch(dist.get_world_size(), settings.get("max_grad_norm"))
    fake.start()
    model, plain = built()
    if isinstance(settings.get("mesh"), dict):  # with a copy on each machine
        copy = dist.get_rank() // settings["mesh"]["dp_shard"]
        node.machine = lambda: f"machine {copy}"
    given = {"mesh": "world", **settings}
    config = Config.load(device=fake.device(), timeout_seconds=60.0, **given)
    _, optimizer = prepare_tuned(model, plain, config, None)
    for step in range(STEPS):
        loss_of(model, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    counts = engine_of(model).setup.stats.counts
    assert counts["evict"] + counts["discard"], counts
    weights = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    for name, value in expected.items():
        assert torch.equal(value, weights[name]), name
    assert_no_pageable_copies()
    if config.pinned is None:
        assert_shares_are_locked(engine_of(model))
    assert engine_of(model).setup.device.locked_bytes() <= (config.pinned or 2**30)
    release(model, optimizer)
    fake.stop()
    assert not fake.found(), "\n".join(map(repr, fake.found()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

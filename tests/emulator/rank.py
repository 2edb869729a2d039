"""One of several ranks on emulated devices, started as torchrun does: ``-m tests.emulator.rank``.

It trains with the micro-batches of all ranks, in plain torch (with masters or codes: as one rank of
hetero), then as one of them, and fails unless weights are the same bits, the host waited only where
it may, and nothing was found on the device.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hetero
from hetero.api import engine_of, prepare_tuned, release
from hetero.config import Config
from hetero.memory.extent import PinUse
from hetero.parallel import node
from hetero.train.engine.engine import Engine
from hetero.train.engine.tuning import Tuning
from hetero.train.gradients import crossing
from hetero.types import Lane
from tests.emulator import fake, nccl
from tests.emulator.harness import assert_no_pageable_copies
from tests.emulator.stalls import (
    ALWAYS,
    CLIPPING_RANKS,
    FROM_DISK,
    OFFLOADING,
    RANKS,
    STAGED,
    Place,
    unexpected,
)
from tests.ranks.models import Net

STEPS = 4
crossing.LEAST_PART = 256  # gradients of small buckets leave in many parts, as those of large ones
Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """What ranks do."""

    settings: dict[str, Any] = field(default_factory=dict)
    machines: Sequence[int] = ()
    """Of each rank; none: all are on one."""
    frozen: Sequence[int] = ()
    """Blocks without gradients."""
    width: int = 24
    n_blocks: int = 4
    on_hbm: bool = False
    """Whether homes have to be on HBM in the end."""
    rows: Sequence[int] = (5,)
    """Of batches: each rank goes through them, one further than the rank before it."""
    gathers: bool = False
    """Whether ranks do not read each other's shares, but gather them."""

    @property
    def is_exact(self) -> bool:
        """Whether plain torch has its bits."""
        return not self.settings.keys() & {"precision", "frozen"}

    @property
    def places(self) -> set[Place]:
        """Where the host may wait for the device in a step."""
        found = ALWAYS | RANKS
        if "max_grad_norm" in self.settings:
            found |= CLIPPING_RANKS | ({STAGED} if self.gathers else set())
        if self.settings.get("activations") == "offload":
            found |= OFFLOADING
        if "nvme" in self.settings:
            found |= {FROM_DISK}
        if "pinned" in self.settings:
            found |= {STAGED}
        return found


def built(case: Case) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(case.width, case.n_blocks)
    for number in case.frozen:
        model.blocks[number].requires_grad_(False)
    return model, optimizer_of(model)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, foreach=False)


def batch_of(case: Case, step: int, rank: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(1000 * step + rank)
    rows = case.rows[(step + rank) % len(case.rows)]
    return torch.randn(rows, 10, generator=dice).to(fake.PLACE)


def loss_of(model: nn.Module, case: Case, step: int, rank: int) -> torch.Tensor:
    out: torch.Tensor = model(batch_of(case, step, rank))
    return out.pow(2).mean()


def by_torch(case: Case, n_ranks: int) -> Values:
    model = fake.on_device(built(case)[0])
    optimizer, max_norm = optimizer_of(model), case.settings.get("max_grad_norm")
    params = [param for param in model.parameters() if param.requires_grad]
    for step in range(STEPS):
        for rank in range(n_ranks):
            grads = torch.autograd.grad(loss_of(model, case, step, rank), params)
            for param, grad in zip(params, grads, strict=True):
                grad = grad * (1 / n_ranks)
                param.grad = grad if param.grad is None else param.grad.add_(grad)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(params, max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return values_of(model)


def by_one_rank(case: Case, n_ranks: int) -> Values:
    """Right for powers of two."""
    model, plain = built(case)
    given = {**case.settings, "mesh": {"dp_replicate": n_ranks}}
    config, alone = Config.load(device=fake.device(), **given), Tuning(averages=True)
    _, optimizer = prepare_tuned(model, plain, config, alone)
    for step in range(STEPS):
        for rank in range(n_ranks):
            hetero.backward(loss_of(model, case, step, rank) / n_ranks)
        optimizer.step()
        optimizer.zero_grad()
    weights = values_of(model)
    release(model, optimizer)
    return weights


def values_of(model: nn.Module) -> Values:
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


def assert_shares_are_locked(engine: Engine) -> None:
    """Weights are copied up from where ranks keep them, and not through stages."""
    device: Any = engine.setup.device
    for bucket in engine.setup.buckets:
        home = engine.setup.store.homes["param", bucket.id]
        if home.on_device:
            continue
        for _, part in home.parts(0, home.items(0, bucket.numel).stop, PinUse.READ):
            assert device._locked.holds(part.view(torch.uint8)), bucket.id


def fetch_what_no_unit_uses(engine: Any) -> None:
    """Fetch one bucket after another into the same frames: nothing reads them in between."""
    manager = engine.residence.manager
    manager.evict_all()
    for bucket in engine.setup.buckets[:4]:
        assert manager.prefetch(bucket.id, 0)
        manager.evict(bucket.id)


def place(case: Case, rank: int) -> None:
    """Be on the machine of a rank."""
    nccl.install()
    if case.machines:
        node.machine = lambda: f"machine {case.machines[rank]}"


def train(case: Case, rank: int) -> tuple[nn.Module, Any]:
    """Train as one of the ranks; return the model and its optimizer."""
    model, plain = built(case)
    given = {"mesh": "world", "timeout_seconds": 60.0, **case.settings}
    config = Config.load(device=fake.device(), **given)
    _, optimizer = prepare_tuned(model, plain, config, None)
    for step in range(STEPS):
        batch = batch_of(case, step, rank)
        fake.forget_stalls()
        hetero.backward(model(batch).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def main(case: Case) -> None:
    fake.load()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    place(case, rank)
    expected = (by_torch if case.is_exact else by_one_rank)(case, n_ranks)
    fake.start()
    model, optimizer = train(case, rank)
    engine = engine_of(model)
    waits = unexpected(fake.stalls(), case.places)
    if len(case.rows) == 1:  # else steps are not as they were planned
        assert not waits, "\n".join(map(repr, waits))
    stats = engine.setup.stats
    assert stats.counts["evict"] + stats.counts["discard"], stats.counts
    assert engine.setup.store.is_gathered == case.gathers
    assert bool(stats.n_bytes[Lane.GATHER]) == case.gathers
    assert engine.setup.store.places.on_hbm or not case.on_hbm
    fetch_what_no_unit_uses(engine)
    weights = values_of(model)
    for name, value in expected.items():
        assert torch.equal(value, weights[name]), name
    assert_no_pageable_copies()
    pinned = engine.setup.config.pinned
    if pinned is None and not engine.setup.config.nvme:
        assert_shares_are_locked(engine)
    assert engine.setup.device.locked_bytes() <= (pinned or 2**30)
    release(model, optimizer)
    fake.stop()
    assert not fake.found(), "\n".join(map(repr, fake.found()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Case(**json.loads(sys.argv[1])))

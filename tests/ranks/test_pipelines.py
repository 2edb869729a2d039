"""Stages of torch's pipelines, each prepared by itself."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

import hetero
from hetero.api import status
from hetero.testing.ranks import free_port, run_ranks

D, RANKS, STAGES, MICRO_BATCHES, STEPS = 32, 2, 4, 4, 3
HBM = 44 * 1024
STAGES_OF = {
    "ScheduleZBVZeroBubble": [[0, 3], [1, 2]],
    "ScheduleInterleavedZeroBubble": [[0, 2], [1, 3]],
}
"""Of each rank."""


class Block(nn.Module):
    """A unit of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(*(Block() for _ in range(8))) for _ in range(STAGES)]


def trained(rank: int, kind: str, is_prepared: bool, port: int) -> tuple[list[Any], bool]:
    """Train this rank's stages; return their weights, and whether one of them pages."""
    dist.destroy_process_group()  # ranks that share no model are prepared one by one
    models, optimizers = [], []
    for index in STAGES_OF[kind][rank]:
        model = stages()[index]
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if is_prepared:
            settings = {"device": "cpu:sim", "chunk_bytes": 1024, "activations": "keep"}
            model, optimizer = hetero.prepare(model, optimizer, hbm=HBM, **settings)
        models.append(model)
        optimizers.append(optimizer)
    address = f"tcp://127.0.0.1:{port}"
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", address, limit, world_size=RANKS, rank=rank)
    there = [
        PipelineStage(model, index, STAGES, torch.device("cpu"))
        for model, index in zip(models, STAGES_OF[kind][rank], strict=True)
    ]
    schedule = getattr(schedules, kind)(there, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    for number in range(STEPS):
        torch.manual_seed(number)
        x, target = torch.randn(4 * MICRO_BATCHES, D), torch.randn(4 * MICRO_BATCHES, D)
        is_last = STAGES - 1 in STAGES_OF[kind][rank]
        schedule.step(*[x] * (rank == 0), **({"target": target} if is_last else {}))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pages = [status(model).evictions > 0 for model in models] if is_prepared else []
    weights = [value.clone() for model in models for value in model.state_dict().values()]
    return weights, any(pages)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STAGES_OF)
def test_zero_bubble_schedules_give_prepared_stages_the_bits_of_plain_ones(kind: str) -> None:
    plain, ours = (run_ranks(RANKS, trained, kind, p, free_port()) for p in (False, True))

    for (theirs, _), (mine, pages) in zip(plain, ours, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(theirs, mine, strict=True))
        assert pages

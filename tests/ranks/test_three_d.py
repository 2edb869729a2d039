"""Pipelines of stages whose tensors ranks divide, and of whose parts other ranks keep shares."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import hetero
from hetero.parallel.splitting import split
from hetero.parallel.tensor import parallelize
from hetero.status import status
from hetero.testing.ranks import run_ranks
from tests.ranks.test_split import SETTINGS, WORDS, loss_of, made, stepped

SIZES, AXES = (2, 2, 2), ("pp", "dp_shard", "tp")
MICRO_BATCHES, STEPS = 2, 3


def words(number: int, share: int) -> torch.Tensor:
    torch.manual_seed(100 * number + share)
    return torch.randint(0, WORDS, (MICRO_BATCHES, 4))


def local(value: torch.Tensor) -> torch.Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach().clone()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def along_all(rank: int, activations: str) -> tuple[dict[str, torch.Tensor], int]:
    """Train as one of eight ranks; return this one's parts of weights, by whole names."""
    mesh = init_device_mesh("cpu", SIZES, mesh_dim_names=AXES)
    found = split(made("gpt"), mesh, "1F1B", batch=words(0, 0)[:1])
    parallelize(found.stages, mesh["tp"])
    settings = {**SETTINGS, "mesh": mesh, "hbm": 150 * 1024, "activations": activations}
    stages, optimizer = hetero.prepare(found.stages, optimizer_of(found.stages), **settings)
    schedule = found.schedule(MICRO_BATCHES, loss_of)
    for number in range(STEPS):
        stepped(found, schedule, words(number, mesh.get_local_rank("dp_shard")))
        optimizer.step()
        optimizer.zero_grad()
    (stage,) = stages
    parts = {stage.in_whole(name): local(value) for name, value in stage.state_dict().items()}
    return parts, status(stages).evictions


def along_one(rank: int) -> dict[str, torch.Tensor]:
    """Train the whole model in plain torch as one of the two ranks of its tensors, micro-batch
    after micro-batch, then share after share; return this one's parts of weights."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model: Any = made("gpt")
    parallelize(model, mesh)
    optimizer, params = optimizer_of(model), list(model.parameters())
    for number in range(STEPS):
        parts = [words(number, share).chunk(MICRO_BATCHES) for share in range(2)]
        for i, share in itertools.product(range(MICRO_BATCHES), range(2)):
            ids = parts[share][i]
            loss = loss_of(model(ids), ids)
            for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
                if isinstance(grad, DTensor):
                    grad = grad.redistribute(placements=param.placements)
                grad = grad * (1 / 2)
                param.grad = grad if param.grad is None else param.grad.add_(grad)
        for param in params:
            param.grad.div_(MICRO_BATCHES)
        optimizer.step()
        optimizer.zero_grad()
    return {name: local(value) for name, value in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["offload", "recompute"])
def test_eight_ranks_along_three_axes_train_as_the_two_of_a_tensor(activations: str) -> None:
    theirs = run_ranks(2, along_one)

    seen = set()
    for rank, (mine, evictions) in enumerate(run_ranks(8, along_all, activations)):
        expected = theirs[rank % 2]
        assert all(torch.equal(value, expected[name]) for name, value in mine.items())
        assert evictions >= 3
        seen |= mine.keys()
    assert seen == theirs[0].keys()

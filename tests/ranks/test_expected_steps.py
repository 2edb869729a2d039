"""The first step of a pipeline is known from its schedule before it begins."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import hetero
from hetero.api import engine_of
from hetero.parallel.pipeline import visits_of
from hetero.status import status
from hetero.testing.ranks import run_ranks
from hetero.train.access.expected import expected
from tests.equivalence.blocks import OneMatrix
from tests.ranks.test_pipelines import (
    BLOCKS,
    HBM,
    RANKS,
    SETTINGS,
    STAGES_OF,
    D,
    batch,
    optimizer_of,
    scheduled,
    stepped,
)

STEPS = 3


class Wide(nn.Module):
    """A unit as large as four others: frames for it hold some of these."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, 4 * D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)).unflatten(-1, (4, D)).sum(-2)


class Seen(NamedTuple):
    """What a rank saw."""

    expected: tuple[Any, ...]
    """Accesses."""
    made: list[tuple[Any, ...]]
    """Accesses of each step."""
    fetches: list[int]
    misses: list[int]


def trained(rank: int, kind: str) -> Seen:
    of_rank = STAGES_OF[kind]
    model: Any = nn.ModuleList()
    for index in of_rank[rank]:
        torch.manual_seed(index)
        ends = [Wide() if i == 0 else OneMatrix(D) for i in range(BLOCKS[index])]
        model.append(nn.Sequential(*ends))
    settings = {**SETTINGS, "hbm": 2 * HBM[len(model)], "activations": "keep"}
    model, optimizer = hetero.prepare(model, optimizer_of(model, "sgd"), **settings)
    schedule = scheduled(kind, model, rank)
    residence: Any = engine_of(model).residence
    blueprint = residence.setup.blueprint
    trace = expected(visits_of(schedule), blueprint.units, blueprint.needs)
    found = Seen(trace.accesses, [], [], [])
    for number in range(STEPS):
        stepped(schedule, rank, batch(number, 0))
        found.made.append(tuple(residence.runtime.fetches.train.seen))
        optimizer.step()
        optimizer.zero_grad()
        found.fetches.append(status(model).fetches)
        found.misses.append(status(model).misses)
    hetero.release(model, optimizer)
    return found


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("kind", list(STAGES_OF))
def test_a_step_makes_the_accesses_that_its_schedule_says(kind: str) -> None:
    for rank, seen in enumerate(run_ranks(RANKS, trained, kind)):
        assert seen.made == [seen.expected] * STEPS, rank
        assert seen.misses[0] <= 0.6 * seen.fetches[0], rank  # of which each was one

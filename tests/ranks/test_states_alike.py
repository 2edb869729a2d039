"""Ranks whose states of an optimizer differ, and parameters that are thawed after `prepare`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.errors import DivergenceError, OutOfMemory, StateError
from hetero.testing.ranks import Died, outcomes

WIDTH = 16


def prepared(frozen: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    for param in model[:frozen].parameters():
        param.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    given = {"device": "cpu:sim", "hbm": "24KiB", "chunk_bytes": 256, "timeout_seconds": 20.0}
    return hetero.prepare(model, optimizer, mesh="world", **given)


def backward(model: Any, number: int, rank: int) -> None:
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(2 * number + rank))
    model(x).square().mean().backward()


def resets(optimizer: Any, fresh: Any) -> None:
    optimizer.load_state_dict(fresh)


def forgets_one(optimizer: Any, fresh: Any) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][1]].clear()


def counts_anew(optimizer: Any, fresh: Any) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][1]]["step"].fill_(100)


Change = Callable[[Any, Any], None]


def alone(rank: int, change: Change) -> None:
    model, optimizer = prepared()
    fresh = copy.deepcopy(optimizer.state_dict())
    for number in range(3):
        backward(model, number, rank)
        if number == 2 and rank == 1:
            change(optimizer, fresh)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("change", [resets, forgets_one, counts_anew], ids=lambda f: f.__name__)
def test_a_state_that_one_rank_changes_alone_is_told_on_all(change: Change) -> None:
    for each in outcomes(2, alone, change):
        assert isinstance(each, Died) and isinstance(each.error, DivergenceError), each
        assert "the state of '0.0." in str(each.error)


def test_a_lack_of_memory_goes_to_other_processes_as_it_is() -> None:
    error = OutOfMemory("no room", tier="HBM", advice="buy some", needed_bytes=5)
    found = pickle.loads(pickle.dumps(error))
    assert str(found) == str(error) and found.what == "no room"
    assert (found.tier, found.advice, found.needed_bytes) == ("HBM", "buy some", 5)


def thaws(rank: int) -> None:
    model, optimizer = prepared(frozen=1)
    backward(model, 0, rank)
    optimizer.step()
    optimizer.zero_grad()
    for param in model[0].parameters():
        param.requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    backward(model, 1, rank)


def test_a_parameter_that_is_thawed_on_ranks_is_refused_by_name() -> None:
    for each in outcomes(2, thaws):
        assert isinstance(each, Died) and isinstance(each.error, StateError), each
        assert "was frozen when the model was prepared" in str(each.error)

"""Errors on a mesh of two axes name ranks of the world, and of those that left the first one."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

import hetero
from hetero.errors import DivergenceError, RankLost
from hetero.parallel.splitting import split
from hetero.testing.ranks import Died, outcomes
from tests.ranks.tensor_models import TIGHT, TensorRun, built, train
from tests.ranks.test_farewell import be_killed, raises
from tests.ranks.test_split import SETTINGS, WORDS, loss_of, made, stepped

TENSORS, STAGES = {"dp_shard": 2, "tp": 2}, {"pp": 2, "dp_shard": 2}
RUN = TensorRun(steps=1, dp=2)
PLANTED = raises(ValueError("planted"))


def leaves(rank: int, first: int, act: Callable[[], None]) -> None:
    """Train tensors that ranks divide and share; one rank leaves between two steps."""
    model, plain = built(RUN)
    model, optimizer = hetero.prepare(model, plain, **{**TIGHT, "mesh": TENSORS})
    train(model, optimizer, RUN, dp=rank // 2)
    if rank == first:
        act()
    train(model, optimizer, RUN, first=1, dp=rank // 2)


@pytest.mark.parametrize(
    ("first", "act", "told"),
    [(1, PLANTED, "ValueError: planted"), (2, be_killed, "it was killed, or its machine left")],
    ids=["raises", "killed"],
)
def test_all_groups_of_a_mesh_name_the_rank_that_left_first(
    first: int, act: Callable[[], None], told: str
) -> None:
    for rank, end in enumerate(outcomes(4, leaves, first, act)):
        assert isinstance(end, Died)
        if rank == first:
            continue
        assert isinstance(end.error, RankLost), end.text
        said = str(end.error)
        assert said.startswith(f"rank {rank} of 4 waits for "), said
        assert f"in vain: rank {first} left ({told})" in said
        assert re.findall(r"rank (\d) left", said) == [str(first)]
        assert set(re.findall(r" bucket \d+ of rank (\d)", said)) <= {str(rank ^ 2)}
        assert f"of rank {first}" in end.error.advice


def steps_otherwise(rank: int) -> None:
    """Train stages of which ranks share each; one rank has another learning rate in a step."""
    torch.manual_seed(0)
    words = torch.randint(0, WORDS, (2, 4))
    found = split(made("gpt"), STAGES, "1F1B", batch=words[:1])
    plain = torch.optim.SGD(found.stages.parameters(), lr=0.1)
    _, optimizer = hetero.prepare(
        found.stages, plain, **{**SETTINGS, "hbm": 300 * 1024, "mesh": STAGES}
    )
    schedule = found.schedule(2, loss_of)
    for step in range(2):
        stepped(found, schedule, words)
        if step == 0 and rank == 2:
            optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()
        optimizer.zero_grad()


def test_settings_that_differ_are_those_of_ranks_of_the_world() -> None:
    for rank, end in enumerate(outcomes(4, steps_otherwise)):
        assert isinstance(end, Died) and isinstance(end.error, DivergenceError), end
        assert isinstance(end.error, RankLost) == (rank < 2), end.text
        second, third = re.findall(r"rank (\d): ([\d.]+)", str(end.error))
        assert (second, third) == (("2", "0.5"), ("3", "0.1"))

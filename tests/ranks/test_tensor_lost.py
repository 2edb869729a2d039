"""A rank that is lost inside of a collective of a tensor parallel model is an error of ours on the
others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed._functional_collectives as collectives

import hetero
from hetero.errors import OutOfMemory, RankLost
from hetero.parallel.lost import TensorRanks
from hetero.testing.rank_faults import happen
from hetero.testing.ranks import Died, outcomes, run_ranks
from tests.ranks.tensor_models import TIGHT, TensorRun, built, train

RUN = TensorRun(steps=2, clip=0.05)
SAID = {"killed": "it was killed", "memory": "OutOfMemory: planted", "error": "Planted: planted"}


class Counted:
    """Counts the waits for collectives, and brings about a fault at one of them."""

    def __init__(self, wait: Callable[[Any], Any], at: int, how: str) -> None:
        self.n_waits = 0
        self._wait, self._at, self._how = wait, at, how

    def __call__(self, tensor: Any) -> Any:
        self.n_waits += 1
        if self.n_waits - 1 == self._at:
            happen(self._how)
        return self._wait(tensor)


def trained(rank: int, run: TensorRun, at: int, how: str, victim: int) -> int:
    """Train; return how many waits there were. The fault comes at one of the victim."""
    model, plain = built(run)
    model, optimizer = hetero.prepare(model, plain, **{**TIGHT, "timeout_seconds": 20.0})
    counted = Counted(collectives.wait_tensor, at if rank == victim else -1, how)
    collectives.wait_tensor = counted  # of this process alone
    train(model, optimizer, run, lambda _, most: optimizer.clip_grad_norm_(most))
    return counted.n_waits


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("how", ["killed", "memory", "error"])
@pytest.mark.parametrize(
    ("style", "optimizer"),
    [("tp", "adamw"), ("sequence", "adamw"), ("vocabulary", "sgd"), ("tp", "lamb")],
)
def test_a_rank_that_is_lost_in_a_collective_is_named_on_the_others(
    style: str, optimizer: str, how: str, part: int
) -> None:
    """In sums, gathers and scatters, of forward and backward, of a loss over divided words, of a
    norm, of a step: at every eighth of a run's waits."""
    run = replace(RUN, style=style, optimizer=optimizer)
    most = min(run_ranks(2, trained, run, -1, how, 1))
    assert most > 16
    first, second = outcomes(2, trained, run, most * part // 8, how, 1)
    assert isinstance(first, Died) and isinstance(second, Died)
    assert isinstance(first.error, RankLost), first.text
    assert "rank 1 left" in str(first.error) and SAID[how] in str(first.error)
    assert first.error.advice
    if how == "memory":
        assert isinstance(second.error, OutOfMemory)


def other_errors(rank: int) -> None:
    model, plain = built(RUN)
    own = collectives.wait_tensor
    model, optimizer = hetero.prepare(model, plain, **TIGHT)
    assert collectives.wait_tensor is not own
    with pytest.raises(RuntimeError, match="of the user's") as caught:
        TensorRanks.ask_why(next(iter(following())), RuntimeError("of the user's"), 0.0)
        raise RuntimeError("of the user's")
    assert not isinstance(caught.value, RankLost)
    hetero.release(model, optimizer)
    assert collectives.wait_tensor is own


def following() -> Any:
    from hetero.parallel import lost

    return lost._following


def test_torchs_wait_is_its_own_again_after_release() -> None:
    run_ranks(2, other_errors)

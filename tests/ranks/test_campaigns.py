"""Drawn faults and divergences of one rank: all ranks are told, or none is wrong."""

from __future__ import annotations

import pytest

from hetero.testing import rank_divergence, rank_faults

PATIENCE_SECONDS = 6.0
"""Of a rank that waits for another one: a busy machine may hold one up for the bench's 1.5 s."""


@pytest.mark.campaign(seconds=5)
@pytest.mark.parametrize("number", range(rank_faults.N_KINDS))
def test_a_fault_of_one_rank_ends_all_and_spares_the_last_checkpoint(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_faults, "TIMEOUT_SECONDS", PATIENCE_SECONDS)
    fault = rank_faults.drawn(number)
    assert rank_faults.outcome_of(fault).wrong == "", fault


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("number", range(rank_divergence.N_KINDS))
def test_ranks_that_diverge_are_all_told_or_all_right(number: int) -> None:
    plan = rank_divergence.drawn(number)
    assert rank_divergence.found(plan).wrong == "", plan

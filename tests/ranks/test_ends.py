"""What the test harness of ranks tells of one whose process ended."""

from __future__ import annotations

import ctypes
import os
import signal

import pytest

from hetero.testing.ranks import Died, outcomes, run_ranks


def by_fault(rank: int) -> int:
    if rank == 1:
        ctypes.string_at(0)
    return rank


def by_signal(rank: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return rank


def test_a_rank_that_a_fault_ends_tells_where() -> None:
    first, last = outcomes(2, by_fault)
    assert first == 0
    assert isinstance(last, Died) and last.error is None
    assert last.text.startswith("killed: SIGSEGV")
    assert "in by_fault" in last.text
    with pytest.raises(AssertionError, match=r"rank 1: killed: SIGSEGV(.|\n)*in by_fault"):
        run_ranks(2, by_fault)


def test_a_rank_that_is_killed_tells_by_what() -> None:
    first, last = outcomes(2, by_signal)
    assert first == 0
    assert last == Died(None, "killed: SIGTERM")

"""What the test harness of ranks tells of one whose process ended."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal

import pytest
import torch.distributed as dist

from hetero.testing.ranks import Died, outcomes, run_ranks


def by_fault(rank: int) -> int:
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
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


class Cycle:
    """Garbage that goes when the collector comes."""

    def __init__(self, group: object) -> None:
        self.group = group
        self.me = self


def collects(rank: int) -> int:
    gc.collect()
    return rank


def test_a_rank_leaves_its_parents_garbage_alone() -> None:
    """A group's end would wait for threads that only the parent has."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    Cycle(dist.group.WORLD)
    dist.destroy_process_group()
    try:
        assert run_ranks(2, collects) == [0, 1]
    finally:
        gc.collect()

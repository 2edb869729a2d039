"""A replica's state, its dirty chunks, and who may leave."""

from __future__ import annotations

import pytest
import torch

from hetero.device import CpuDevice
from hetero.errors import StateError
from hetero.memory.chunk import CopyTable
from hetero.memory.layout import ParamSpec, build_layout
from hetero.memory.replica import APART, Replica
from hetero.types import CopyState


def make_replica(start: int = 0) -> Replica:
    spec = ParamSpec("p", 0, (99,), (1,), torch.float32, True)
    bucket = build_layout([spec], ["u"], 64).buckets[0]  # seven chunks of 16
    return Replica(
        bucket, start, CpuDevice().arena(bucket.n_bytes).carve(0, bucket.n_bytes), CopyTable(1)
    )


def resident() -> Replica:
    replica = make_replica()
    replica.move(CopyState.FILLING, "fetch")
    replica.move(CopyState.CLEAN, "ready")
    return replica


def test_neighbouring_dirty_chunks_are_one_run() -> None:
    replica = resident()
    replica.write(98, 99)
    replica.write(0, 33)

    assert replica.dirty_runs() == [slice(0, 48), slice(96, 112)]
    assert replica.state is CopyState.DIRTY


def test_a_write_of_no_elements_is_none() -> None:
    replica = resident()
    replica.write(5, 5)

    assert replica.state is CopyState.CLEAN and not replica.is_news


@pytest.mark.parametrize(
    ("state", "why"),
    [(CopyState.ABSENT, "discard"), (CopyState.FILLING, "undo"), (CopyState.CLEAN, "recode")],
)
def test_what_ends_being_dirty_has_no_dirty_chunks(state: CopyState, why: str) -> None:
    replica = resident()
    replica.write(0, 40)
    replica.move(state, why)

    assert not replica.dirty


def test_a_flush_that_failed_leaves_the_chunks_dirty() -> None:
    replica = resident()
    replica.write(0, 40)
    replica.move(CopyState.FLUSHING, "flush")
    assert len(replica.dirty) == 3
    replica.move(CopyState.DIRTY, "fail")

    assert len(replica.dirty) == 3


def test_what_is_not_resident_is_not_written() -> None:
    with pytest.raises(StateError, match="ABSENT -> DIRTY"):
        make_replica().write(0, 1)


def test_pins_and_views_hold_a_replica() -> None:
    replica = resident()
    assert replica.may_leave
    replica.pins += 1
    assert not replica.may_leave
    replica.pins -= 1
    view = replica.views[0].detach()
    assert replica.leased and not replica.may_leave
    del view
    assert replica.may_leave


def test_one_with_memory_of_its_own_stands_apart() -> None:
    assert make_replica(APART).is_apart and not make_replica().is_apart


def test_what_may_have_been_written_grows_until_no_view_is_left() -> None:
    replica, everything = resident(), [slice(0, 99)]
    replica.show([])
    replica.exposed = True
    assert replica.seen_runs == []
    replica.show([0])
    assert replica.seen_runs == everything
    replica.show(None)
    replica.show([])  # a view of any parameter may still be there
    assert replica.seen_runs == everything
    replica.exposed = False  # settled
    replica.show([])
    assert replica.seen_runs == []

"""A home as the manager knows it: updates, exposure, read-ahead and digests."""

from __future__ import annotations

import pytest
import torch

from hetero.device import SimDevice
from hetero.errors import StateError, TransferError
from hetero.events import EventLog
from hetero.memory.chunk import CopyTable
from hetero.memory.homecopy import HomeCopy
from hetero.memory.homestore import HomeStore
from hetero.memory.layout import ParamSpec, build_layout
from hetero.memory.ledger import Ledger
from hetero.types import CopyState, Kind, Tier


class Job:
    """Work that is done when it is waited for, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.done = False
        self.error = error

    def wait(self) -> None:
        self.done = True
        if self.error is not None:
            raise self.error


def make_copy(*, checked: bool = True) -> HomeCopy:
    specs = [ParamSpec(f"p{i}", 0, (16,), (1,), torch.float32, True) for i in range(2)]
    bucket = build_layout(specs, ["u"], 64).buckets[0]
    store = HomeStore(SimDevice(), Ledger({}))
    home = store.get(Kind.PARAM, "param", bucket)
    table = CopyTable(1, what="bucket")
    return HomeCopy(bucket, home, unit="u", table=table, pool=store.pool, checked=checked)


def state(copy: HomeCopy) -> CopyState:
    return copy._table.state(0, Tier.HOST)


def test_an_update_is_waited_for_and_leaves_the_home_clean() -> None:
    copy, job = make_copy(), Job()
    copy.begin_update(job)

    assert state(copy) is CopyState.FILLING
    assert copy.is_busy(resident=True)
    copy.finish_update(EventLog())
    assert job.done and copy.update is None
    assert state(copy) is CopyState.CLEAN
    assert not copy.is_busy(resident=False)


def test_a_home_in_ram_asks_nothing_of_the_disk() -> None:
    copy = make_copy()
    copy._pool = None
    assert not copy.is_busy(resident=False)


def test_an_update_that_failed_stays_and_is_raised_again() -> None:
    copy = make_copy()
    copy.begin_update(Job(ValueError("lost")))

    for _ in range(2):
        with pytest.raises(ValueError, match="lost"):
            copy.finish_update(EventLog())
    assert state(copy) is CopyState.FILLING
    copy.end_update("fail")
    assert state(copy) is CopyState.CLEAN


def test_an_early_update_is_refused_before_its_step() -> None:
    copy = make_copy()
    copy.begin_update(Job())
    copy.is_early = True

    with pytest.raises(StateError, match="weights of unit 'u'"):
        copy.finish_update(EventLog())
    assert copy.is_busy(resident=True)


def test_two_updates_at_once_are_an_error_with_moves() -> None:
    copy = make_copy()
    copy.begin_update(Job())

    with pytest.raises(StateError, match="bucket 0 on HOST: FILLING -> FILLING") as caught:
        copy.begin_update(Job())
    assert caught.value.moves


def test_what_is_written_to_exposed_tensors_is_found_segment_by_segment() -> None:
    copy = make_copy()
    second = copy.bucket.segments[1]
    copy.home.view(second).add_(1)
    assert copy.changed() == []
    copy.expose()
    assert copy.changed() == []
    alias = copy.home.view(second).detach()
    alias.add_(1)

    assert copy.changed() == [second]
    copy.rewritten()
    assert copy.exposed is not None and copy.changed() == []
    del alias
    copy.rewritten()
    assert copy.exposed is None


def test_a_home_that_changed_by_itself_is_found_out_unless_it_is_exposed() -> None:
    copy = make_copy()
    copy.note_digest()
    copy.check_digest()
    copy.home.part(slice(0, 1)).fill_(3.0)

    with pytest.raises(TransferError, match="changed, and hetero did not"):
        copy.check_digest()
    copy.expose()
    copy.check_digest()


def test_without_checks_no_digest_is_kept() -> None:
    copy = make_copy(checked=False)
    copy.note_digest()
    copy.home.part(slice(0, 1)).fill_(3.0)

    copy.check_digest()

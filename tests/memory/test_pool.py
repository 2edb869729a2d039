"""The pool against plain arrays: budgets, order, faults, threads, forks.

[Note: turns]  `Turns` takes the place of the pool's condition: where a thread would wait, transfers
are carried out one at a time, in an order that a seed draws. A program of one thread then has only
one outcome, and waiting for what nobody will do is an error at once.
"""

from __future__ import annotations

import errno
import faulthandler
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hetero.device import Slab, map_slab
from hetero.errors import (
    BudgetError,
    ChunkCorrupt,
    DiskFull,
    DiskReadError,
    DiskWriteError,
    ForkedProcessError,
    StateError,
    StorageError,
)
from hetero.events import EventLog
from hetero.io import ALIGN, IO, Folder, align_up, aligned_buffer
from hetero.jobs import Job, Worker
from hetero.memory import pool as pool_module
from hetero.memory.extent import Extent, Extents, PinSpan, PinUse, Request
from hetero.memory.ledger import Ledger
from hetero.memory.nvme import Executor, Nvme, Urgent, Work
from hetero.memory.pool import HUGE_PAGE, Pool, open_pool
from hetero.testing.faults import FaultPlan
from hetero.types import CopyState, Kind, Lane, Tier

T = TypeVar("T")
NUMEL = ALIGN  # elements of an extent
HANGS_SECONDS = 600  # what takes so long has hung: a busy machine imports torch for a minute
Array = npt.NDArray[Any]
ABSENT, FILLING, CLEAN, DIRTY, FLUSHING = CopyState


class Home(NamedTuple):
    """A home on disk, and its elements: they mean something while they are pinned."""

    extents: Extents
    array: Array

    def needs(self, start: int, end: int, use: PinUse) -> Iterator[tuple[Extent, PinUse]]:
        return self.extents.needs(start, end, use)

    def span(self, first: int, end: int | None = None, use: PinUse = PinUse.READ) -> PinSpan:
        """Return whole extents [first, end), one by default."""
        end = first + 1 if end is None else end
        return PinSpan(self, first * NUMEL, min(end * NUMEL, len(self.array)), use)

    def request(self, first: int, end: int | None = None, use: PinUse = PinUse.READ) -> Request:
        return Request([self.span(first, end, use)])


class Late:
    """Keeps what is to be done until it is asked to do some of it."""

    def __init__(self, seed: int | None = None) -> None:
        self.todo: list[Work] = []
        self.random = None if seed is None else random.Random(seed)

    def submit(self, lane: Lane, n_bytes: int, work: Work, urgent: Urgent) -> None:
        self.todo.append(work)

    def step(self) -> bool:
        """Do one thing, the first or a drawn one; False where there is nothing to do."""
        if not self.todo:
            return False
        self.todo.pop(0 if self.random is None else self.random.randrange(len(self.todo)))()
        return True

    def finish(self) -> None:
        while self.step():
            pass

    close = finish


class Turns(threading.Condition):
    """Where a thread would wait, something is carried out; see [Note: turns]."""

    def __init__(self, late: Late) -> None:
        super().__init__()
        self.late = late

    def until(self, happened: Callable[[], bool], seconds: float | None = None) -> bool:
        while not happened():
            if not self.late.step():
                assert seconds is not None, "no thread will ever wake this one"
                return False
        return True


def make_pool(
    disk: Path, n_extents: int, *, io: IO | None = None, executor: Executor | None = None
) -> Pool:
    """Return a pool of so many extents of one byte an element."""
    nvme = Nvme([Folder.open(disk, io)], 0, ledger=Ledger({}), log=EventLog())
    pool = Pool(nvme, n_extents * NUMEL, extent_numel=NUMEL, n_threads=2, executor=executor)
    if isinstance(executor, Late):
        pool._changed = turns = Turns(executor)
        pool._wait = turns.until
    return pool


def make_home(pool: Pool, n_extents: float, dtype: str = "u1") -> Home:
    item, numel = np.dtype(dtype).itemsize, int(n_extents * NUMEL)
    slab = map_slab(align_up(numel * item), huge=False)
    extents = pool.adopt(Kind.STATE, slab, numel * item, item, "a home")
    assert slab.mapping is not None
    return Home(extents, np.frombuffer(slab.mapping, dtype, numel))


def state(pool: Pool, extent: Extent) -> CopyState:
    return pool.cache.table.state(extent.id, Tier.HOST)


def states(pool: Pool, home: Home) -> list[CopyState]:
    return [state(pool, extent) for extent in home.extents.all]


def resident(pool: Pool, home: Home) -> list[int]:
    return [i for i, found in enumerate(states(pool, home)) if found is not ABSENT]


def fill(pool: Pool, home: Home, value: int | None = None) -> None:
    """Write every extent: ``value``, or its own number from 1 on."""
    for i in range(len(home.extents.all)):
        with pool.pin(home.request(i, use=PinUse.FRESH)):
            home.array[i * NUMEL : (i + 1) * NUMEL] = i + 1 if value is None else value


def seen(pool: Pool, home: Home) -> list[int]:
    """Return the one number that each extent holds, or -1 where it holds several."""
    found = []
    for i in range(len(home.extents.all)):
        with pool.pin(home.request(i)):
            part = home.array[i * NUMEL : (i + 1) * NUMEL]
            found.append(int(part[0]) if (part == part[0]).all() else -1)
    return found


def touch(pool: Pool, home: Home, *which: int, use: PinUse = PinUse.READ) -> None:
    for i in which:
        with pool.pin(home.request(i, use=use)):
            pass


def flushed(pool: Pool, home: Home) -> None:
    """Bring everything down: no extent stays dirty, and none in memory."""
    with pool._changed:
        pool._flush(pool.n_bytes)
    pool.drain()
    with pool._changed:
        assert pool.cache.evict(pool.n_bytes, ())
    assert not resident(pool, home)


@pytest.fixture
def watchdog() -> Iterator[None]:
    """End the run with every thread's stack where it hangs."""
    faulthandler.dump_traceback_later(HANGS_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def late() -> Late:
    return Late()


# -- what is in memory, and for how long ---------------------------------------------------------


def test_a_home_larger_than_the_pool_keeps_every_number_within_the_budget(disk: Path) -> None:
    pool = make_pool(disk, 5)
    home = make_home(pool, 30.3, "f4")
    wanted = np.random.default_rng(0).random(len(home.array), "f4")
    for i in range(31):
        with pool.pin(home.request(i, use=PinUse.FRESH)):
            home.array[i * NUMEL : (i + 1) * NUMEL] = wanted[i * NUMEL : (i + 1) * NUMEL]
        assert pool.cache.used <= pool.n_bytes
    for i in random.Random(0).choices(range(31), k=100):
        with pool.pin(home.request(i, use=PinUse.WRITE)):
            part = slice(i * NUMEL, (i + 1) * NUMEL)
            assert np.array_equal(home.array[part], wanted[part])
            home.array[part] += 1
            wanted[part] += 1
        assert pool.cache.used <= pool.n_bytes
    moved = pool.nvme.take_counts()

    assert moved[Lane.READ] > 20 * 4 * NUMEL and moved[Lane.WRITE] > 30 * 4 * NUMEL
    assert pool.cache.peak == pool.n_bytes // (4 * NUMEL) * 4 * NUMEL
    pool.close()


def test_the_extent_that_was_used_longest_ago_leaves_first(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 3, executor=late)
    home = make_home(pool, 5)
    fill(pool, home)
    flushed(pool, home)

    touch(pool, home, 0, 1, 2, 0)
    touch(pool, home, 3)
    assert resident(pool, home) == [0, 2, 3]
    touch(pool, home, 4)
    assert resident(pool, home) == [0, 3, 4]


def test_evicting_a_clean_extent_moves_no_bytes(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 3, executor=late)
    home = make_home(pool, 6)
    fill(pool, home)
    flushed(pool, home)
    touch(pool, home, 0, 1, 2)
    pool.nvme.take_counts()

    touch(pool, home, 3, 4, 5)

    assert pool.nvme.take_counts() == {Lane.READ: 3 * NUMEL}


def test_what_is_all_going_to_be_written_is_not_read(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 6, executor=late)
    home = make_home(pool, 5)
    fill(pool, home)
    flushed(pool, home)
    pool.nvme.take_counts()

    with pool.pin(Request([PinSpan(home, 10, 4 * NUMEL, PinUse.FRESH)])):
        home.array[10 : 4 * NUMEL] = 9

    assert pool.nvme.take_counts()[Lane.READ] == NUMEL  # the first extent is written in part
    flushed(pool, home)
    assert seen(pool, home) == [-1, 9, 9, 9, 5]
    assert list(home.array[8:12]) == [1, 1, 9, 9]


def test_the_last_extent_is_whole_where_the_home_ends(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 3, executor=late)
    home = make_home(pool, 2.5, "f4")
    end = len(home.array)

    assert Request([PinSpan(home, 2 * NUMEL, end, PinUse.FRESH)]).needs == {
        home.extents.all[2]: PinUse.FRESH
    }
    assert Request([PinSpan(home, 0, 0)]).needs == {}
    with pool.pin(Request([])):
        assert pool.cache.used == 0


def test_two_uses_of_one_extent_in_a_request_read_it_and_write_it(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 3, executor=late)
    home = make_home(pool, 2)
    fill(pool, home, 7)
    flushed(pool, home)

    with pool.pin(Request([home.span(0), PinSpan(home, 0, NUMEL, PinUse.FRESH)])):
        assert home.array[5] == 7
        home.array[5] = 8

    assert states(pool, home)[0] is DIRTY


def test_two_requests_may_hold_one_extent_for_different_uses(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 2, executor=late)
    home = make_home(pool, 4)
    fill(pool, home)
    flushed(pool, home)

    with ExitStack() as stack:
        stack.enter_context(pool.pin(home.request(0)))
        with pool.pin(home.request(0, use=PinUse.WRITE)):
            home.array[0] = 99
        touch(pool, home, 1, 2, 3)
        assert resident(pool, home) == [0, 3]
        assert home.array[0] == 99

    flushed(pool, home)
    touch(pool, home, 0)
    assert home.array[0] == 99 and home.array[1] == 1


def test_what_was_never_written_is_zero_and_is_not_read(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 2, executor=late)
    home = make_home(pool, 4)

    assert seen(pool, home) == [0, 0, 0, 0]
    assert not pool.nvme.take_counts()


def test_a_discarded_home_is_zero_and_costs_nothing(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 3, executor=late)
    home, other = make_home(pool, 4), make_home(pool, 1)
    fill(pool, home)
    with pool.pin(other.request(0, use=PinUse.FRESH)):
        other.array[:] = 5
    moved = pool.nvme.take_counts()[Lane.WRITE]

    pool.discard(home.extents)

    assert pool.cache.used <= NUMEL
    assert seen(pool, home) == [0, 0, 0, 0]
    assert pool.nvme.take_counts()[Lane.READ] == 0 and moved <= 4 * NUMEL
    assert seen(pool, other) == [5]


def test_discarding_waits_for_what_is_on_its_way(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 4, executor=late)
    home = make_home(pool, 3)
    fill(pool, home)
    with pool._changed:
        pool._flush(2 * NUMEL)
    assert states(pool, home).count(FLUSHING) >= 2

    pool.discard(home.extents)

    assert states(pool, home) == [ABSENT] * 3
    assert seen(pool, home) == [0, 0, 0]


def test_what_is_pinned_is_not_discarded(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 3, executor=late)
    home = make_home(pool, 2)
    fill(pool, home)

    with pool.pin(home.request(1)):
        with pytest.raises(StateError, match="pinned"):
            pool.discard(home.extents)
        assert home.array[NUMEL] == 2

    assert seen(pool, home) == [1, 2]


def test_a_home_on_the_device_is_refused(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 3, executor=late)
    slab = map_slab(NUMEL)
    slab.mapping = None

    with pytest.raises(BudgetError, match="on the device"):
        pool.adopt(Kind.STATE, slab, NUMEL, 1, "a state")


# -- memory of the system ------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("extent_bytes", [64 * 2**10, 2 * 2**20], ids=["small", "huge"])
def test_evicted_extents_give_their_memory_back_to_the_system(
    disk: Path, monkeypatch: pytest.MonkeyPatch, extent_bytes: int
) -> None:
    monkeypatch.setattr(pool_module, "paranoid", lambda: False)  # poison takes memory
    n_bytes, mib = 64 * 2**20, 2**20
    nvme = Nvme([Folder.open(disk)], n_bytes, ledger=Ledger({}), log=EventLog())
    pool = Pool(nvme, 8 * mib, extent_numel=extent_bytes)
    slab = map_slab(n_bytes, huge=False)
    home = Home(pool.adopt(Kind.STATE, slab, n_bytes, 1, "x"), slab.block.numpy())
    before, most = resident_bytes(), 0
    for use in (PinUse.FRESH, PinUse.WRITE, PinUse.READ):
        for start in range(0, n_bytes, extent_bytes):
            with pool.pin(Request([PinSpan(home, start, start + extent_bytes, use)])):
                if use is not PinUse.READ:
                    home.array[start : start + extent_bytes] = 1 + use
            most = max(most, resident_bytes() - before)
        assert pool.cache.used <= pool.n_bytes
    pool.discard(home.extents)

    assert 4 * mib < most <= 8 * mib + 4 * mib
    assert resident_bytes() - before <= 4 * mib
    pool.close()


def paging(array: Array) -> list[str]:
    """Return how each MiB of memory is paged: "hg" in huge pages, "nh" in small ones."""
    found, flags = [], ""
    rows = Path("/proc/self/smaps").read_text().splitlines()
    mib, begin = 2**20, array.ctypes.data
    for row in rows:
        if not row.split(" ")[0].endswith(":"):
            start, end = (int(x, 16) for x in row.split(" ")[0].split("-"))
        elif row.startswith("VmFlags:"):
            flags = next((flag for flag in ("hg", "nh") if flag in row.split()), "")
            found += [flags] * len(range(max(start, begin), min(end, begin + array.nbytes), mib))
    return found


def slab_at(n_bytes: int, past: int) -> Slab:
    """Return a slab that begins ``past`` bytes behind a border of huge pages."""
    mapping = map_slab(n_bytes + 2 * HUGE_PAGE, huge=False)
    first = -mapping.block.data_ptr() % HUGE_PAGE + past
    return Slab(n_bytes, mapping.block[first : first + n_bytes], mapping.mapping)


@pytest.mark.parametrize(
    ("extent_bytes", "past", "wanted"),
    [
        (HUGE_PAGE, 0, ["hg"] * 8 + ["nh"]),
        (HUGE_PAGE // 2, 0, ["nh"] * 9),  # a page of two extents would stay when one of them goes
        (HUGE_PAGE, HUGE_PAGE // 2, ["nh"] * 9),
    ],
    ids=["aligned", "small", "astride"],
)
def test_no_huge_page_belongs_to_two_extents(
    disk: Path, extent_bytes: int, past: int, wanted: list[str]
) -> None:
    n_bytes = 9 * 2**20
    nvme = Nvme([Folder.open(disk)], n_bytes, ledger=Ledger({}), log=EventLog())
    pool = Pool(nvme, 2 * HUGE_PAGE, extent_numel=extent_bytes)
    slab = slab_at(n_bytes, past)
    home = Home(pool.adopt(Kind.STATE, slab, n_bytes, 1, "x"), slab.block.numpy())

    assert paging(home.array) in (wanted, [""] * 9)  # a system may have none

    numbers = np.random.default_rng(0).integers(0, 256, n_bytes, np.uint8)
    for use in (PinUse.FRESH, PinUse.READ):
        for start in range(0, n_bytes, extent_bytes):
            part = slice(start, min(start + extent_bytes, n_bytes))
            with pool.pin(Request([PinSpan(home, part.start, part.stop, use)])):
                if use is PinUse.FRESH:
                    home.array[part] = numbers[part]
                assert np.array_equal(home.array[part], numbers[part])
    pool.close()


# -- room ----------------------------------------------------------------------------------------


def test_a_request_larger_than_the_pool_is_refused_with_the_bytes(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 3, executor=late)
    home = make_home(pool, 4)

    with pytest.raises(BudgetError, match="16 KiB") as failure, pool.pin(home.request(0, 4)):
        pass

    assert failure.value.tier == "HOST" and failure.value.needed_bytes == 4 * NUMEL
    assert "raise host= by 4 KiB" in failure.value.advice
    assert pool.cache.used == 0 and not any(extent.pins for extent in home.extents.all)


def test_who_holds_too_much_to_get_more_is_told_at_once(disk: Path, watchdog: None) -> None:
    pool = make_pool(disk, 3)
    home = make_home(pool, 6)
    fill(pool, home)

    with pool.pin(home.request(0, 2, PinUse.WRITE)):
        with pytest.raises(BudgetError, match="8 KiB are pinned"), pool.pin(home.request(2, 4)):
            pass
        touch(pool, home, 5)

    assert seen(pool, home) == [1, 2, 3, 4, 5, 6]
    pool.close()


def test_who_holds_some_gets_more_at_the_cost_of_what_was_read_ahead(
    disk: Path, late: Late
) -> None:
    pool = make_pool(disk, 6, executor=late)
    home = make_home(pool, 12)
    fill(pool, home)
    flushed(pool, home)
    pool.ahead([home.request(6), home.request(7)])
    late.finish()
    assert resident(pool, home) == [6, 7]

    with pool.pin(home.request(0, 2)), pool.pin(home.request(2, 6)):
        assert resident(pool, home) == [0, 1, 2, 3, 4, 5]


def test_a_thread_that_waits_for_room_goes_on_when_another_lets_go(
    disk: Path, watchdog: None
) -> None:
    pool = make_pool(disk, 3)
    home = make_home(pool, 6)
    fill(pool, home)
    with ThreadPoolExecutor(1) as other:
        with pool.pin(home.request(0, 2)):
            waits = other.submit(touch, pool, home, 4)
            two = other.submit(lambda: touch_both(pool, home))
            waits.result()
            time.sleep(0.05)
            assert not two.done()
        two.result()
    assert pool.cache.used <= pool.n_bytes
    pool.close()


def touch_both(pool: Pool, home: Home) -> None:
    with pool.pin(home.request(2, 4)):
        pass


def test_a_thread_that_is_interrupted_while_it_waits_holds_nothing(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 3, executor=late)
    home = make_home(pool, 5)
    fill(pool, home)
    flushed(pool, home)

    def interrupt(happened: Callable[[], bool], seconds: float | None = None) -> bool:
        raise KeyboardInterrupt

    waits, pool._wait = pool._wait, interrupt
    with pytest.raises(KeyboardInterrupt), pool.pin(home.request(0, 3, PinUse.WRITE)):
        pass
    pool._wait = waits

    assert not any(extent.pins for extent in home.extents.all)
    late.finish()
    assert seen(pool, home) == [1, 2, 3, 4, 5]


def test_what_is_being_written_can_be_read_but_not_changed(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 3, executor=late)
    home = make_home(pool, 1)
    fill(pool, home)
    with pool._changed:
        pool._flush(NUMEL)

    with pool.pin(home.request(0)):
        assert states(pool, home) == [FLUSHING] and home.array[0] == 1
    with pool.pin(home.request(0, use=PinUse.WRITE)):
        assert states(pool, home) == [CLEAN]


# -- read ahead, write behind --------------------------------------------------------------------


def test_announced_requests_are_read_in_order_as_far_as_the_window_goes(
    disk: Path, late: Late
) -> None:
    pool = make_pool(disk, 9, executor=late)
    home = make_home(pool, 12)
    fill(pool, home)
    flushed(pool, home)
    requests = [home.request(i) for i in (7, 2, 9, 4, 0)]

    pool.ahead(requests)

    assert resident(pool, home) == [2, 7, 9]
    assert not any(pool.ready(request) for request in requests)
    late.step()
    assert [pool.ready(request) for request in requests] == [True, False, False, False, False]
    with pool.pin(requests[0]):
        pass
    assert resident(pool, home) == [2, 4, 7, 9]


def test_what_is_in_memory_and_announced_stays_until_it_is_used(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 6, executor=late)
    home = make_home(pool, 12)
    fill(pool, home)
    flushed(pool, home)
    touch(pool, home, 0, 1)
    pool.ahead([home.request(0), home.request(1)])
    pool.nvme.take_counts()

    touch(pool, home, 2, 3, 4, 5, 6, 7, 8)
    assert {0, 1} <= set(resident(pool, home))
    touch(pool, home, 0, 1)
    assert pool.nvme.take_counts()[Lane.READ] == 7 * NUMEL
    touch(pool, home, 9, 10, 11, 2, 3, 4)
    assert not {0, 1} & set(resident(pool, home))


def test_what_was_used_since_it_was_announced_is_not_read_again(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 3, executor=late)
    home = make_home(pool, 9)
    fill(pool, home)
    flushed(pool, home)
    pool.ahead([home.request(i) for i in (0, 1, 2)])
    touch(pool, home, 2)  # by another request, as a prefetch does
    touch(pool, home, 5, 6, 7, 0, 1)
    pool.nvme.take_counts()
    touch(pool, home, 1)

    assert 2 not in resident(pool, home)
    assert not late.todo and not pool.nvme.take_counts()


def test_a_request_larger_than_the_window_is_read_when_nothing_else_is_kept(
    disk: Path, late: Late
) -> None:
    pool = make_pool(disk, 9, executor=late)
    home = make_home(pool, 20)
    fill(pool, home)
    flushed(pool, home)
    pool.ahead([home.request(0), home.request(2, 9), home.request(10)])
    assert resident(pool, home) == [0]

    touch(pool, home, 0)
    assert resident(pool, home) == [0, 2, 3, 4, 5, 6, 7, 8]
    with pool.pin(home.request(2, 9)):
        late.finish()
    assert 10 in resident(pool, home)


def test_a_request_larger_than_the_pool_does_not_hold_up_the_others(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 3, executor=late)
    home = make_home(pool, 9)
    fill(pool, home)
    flushed(pool, home)

    pool.ahead([home.request(0, 4), home.request(5)])

    assert resident(pool, home) == [5]


def test_what_nobody_comes_for_does_not_hold_up_reading_ahead_for_ever(
    disk: Path, late: Late
) -> None:
    pool = make_pool(disk, 6, executor=late)
    home = make_home(pool, 40)
    fill(pool, home)
    flushed(pool, home)
    pool.ahead([home.request(0), home.request(1)])  # the whole window, and never pinned
    asked = [home.request(i) for i in range(2, 40)]
    pool.ahead(asked)
    found = []
    for request in asked:
        late.finish()
        found.append(pool.ready(request))
        with pool.pin(request):
            pass

    assert not any(found[:3])
    assert all(found[-20:])


def test_what_is_for_later_is_read_when_nothing_is_left_to_read_ahead(
    disk: Path, late: Late
) -> None:
    pool = make_pool(disk, 6, executor=late)
    home = make_home(pool, 20)
    fill(pool, home)
    flushed(pool, home)
    pool.ahead([home.request(i) for i in (0, 1, 2)])  # one more than the window holds
    pool.later([home.request(i) for i in (10, 11, 12)])
    assert resident(pool, home) == [0, 1]

    touch(pool, home, 0)
    late.finish()
    assert {1, 2, 10, 11} <= set(resident(pool, home))
    pool.nvme.take_counts()
    pool.ahead([home.request(i) for i in (10, 11)])
    touch(pool, home, 10, 11)
    assert not pool.nvme.take_counts()


def test_what_is_for_later_gives_way_to_a_pin_the_last_of_it_first(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 6, executor=late)
    home = make_home(pool, 20)
    fill(pool, home)
    flushed(pool, home)
    pool.later([home.request(i) for i in (10, 11)])
    late.finish()
    assert resident(pool, home) == [10, 11]

    with pool.pin(home.request(0, 5)):
        assert resident(pool, home) == [0, 1, 2, 3, 4, 10]
        with pool.pin(home.request(5)):
            assert resident(pool, home) == [0, 1, 2, 3, 4, 5]


def test_what_is_announced_for_later_anew_takes_the_place_of_the_old(
    disk: Path, late: Late
) -> None:
    pool = make_pool(disk, 3, executor=late)
    home = make_home(pool, 20)
    fill(pool, home)
    flushed(pool, home)
    pool.later([home.request(i) for i in (0, 1, 2)])
    pool.later([home.request(i) for i in (0, 7)])
    late.finish()
    assert resident(pool, home) == [0]

    touch(pool, home, 0)
    late.finish()
    assert resident(pool, home) == [0, 7]


def test_a_request_again_is_without_what_was_only_read(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 6, executor=late)
    home = make_home(pool, 6)
    spans = [home.span(0), home.span(1, use=PinUse.WRITE), home.span(2, use=PinUse.FRESH)]

    again = Request(spans).again()

    extents = home.extents.all
    assert again.needs == {extents[1]: PinUse.WRITE, extents[2]: PinUse.WRITE}
    assert again.n_bytes == 2 * NUMEL


def test_reading_ahead_stands_still_while_somebody_waits_for_room(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 6, executor=late)
    home = make_home(pool, 20)
    fill(pool, home)
    flushed(pool, home)
    touch(pool, home, 4, 5, use=PinUse.WRITE)
    pool.nvme.take_counts()
    with pool.pin(home.request(0, 4)):
        pool.ahead([home.request(14), home.request(15)])
        with pool.pin(home.request(10, 12)):  # what it waits for is not given away meanwhile
            assert resident(pool, home) == [0, 1, 2, 3, 10, 11]
            assert pool.nvme.take_counts() == {Lane.READ: 6 * NUMEL, Lane.WRITE: 2 * NUMEL}
    assert {14, 15} <= set(resident(pool, home))


def test_dirty_extents_are_written_before_their_room_is_needed(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 9, executor=late)
    home = make_home(pool, 9)
    for i in range(9):
        touch(pool, home, i, use=PinUse.FRESH)
        assert states(pool, home).count(DIRTY) <= 3
    assert states(pool, home) == [FLUSHING] * 6 + [DIRTY] * 3
    late.finish()
    assert states(pool, home) == [CLEAN] * 6 + [DIRTY] * 3


def test_a_scan_finds_its_extents_in_memory(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 12, executor=late)
    home = make_home(pool, 60)
    fill(pool, home)
    flushed(pool, home)
    requests = [home.request(i, use=PinUse.WRITE) for i in range(60)]
    pool.ahead(requests)
    for request in requests:
        for _ in range(2):  # a drive that is as fast as who asks: a read and a write for each
            late.step()
        assert pool.ready(request)
        with pool.pin(request):
            pass


# -- reads that fail -----------------------------------------------------------------------------


def check_nothing_is_held(pool: Pool, home: Home) -> None:
    assert not any(extent.pins for extent in home.extents.all)
    assert pool.cache.used <= pool.n_bytes


def test_a_read_that_fails_is_told_and_the_next_who_asks_tries_again(
    disk: Path, late: Late
) -> None:
    plan = FaultPlan()
    pool = make_pool(disk, 3, io=plan, executor=late)
    home = make_home(pool, 6)
    fill(pool, home)
    flushed(pool, home)
    plan.fail_at("read", 1, errno.EIO, times=None)

    for _ in range(3):
        with pytest.raises(DiskReadError) as failure, pool.pin(home.request(0, 3)):
            pass
        assert failure.value.errno == errno.EIO and failure.value.op == "read"
        check_nothing_is_held(pool, home)
    assert plan.fired >= 3

    plan.clear()
    assert seen(pool, home) == [1, 2, 3, 4, 5, 6]


def test_a_read_that_fails_once_is_nobodys_business(disk: Path, late: Late) -> None:
    plan = FaultPlan()
    pool = make_pool(disk, 3, io=plan, executor=late)
    home = make_home(pool, 6)
    fill(pool, home)
    plan.fail_at("read", plan.seen["read"] + 2, errno.EIO)

    assert seen(pool, home) == [1, 2, 3, 4, 5, 6]
    assert plan.fired == 1


def test_a_read_ahead_that_fails_is_tried_again_by_who_needs_it(disk: Path, late: Late) -> None:
    plan = FaultPlan()
    pool = make_pool(disk, 9, io=plan, executor=late)
    home = make_home(pool, 9)
    fill(pool, home)
    flushed(pool, home)
    plan.fail_at("read", plan.seen["read"], errno.EIO, times=2)
    request = home.request(0)

    pool.ahead([request])
    late.finish()

    assert plan.fired == 2 and states(pool, home)[0] is ABSENT
    with pool.pin(request):
        assert home.array[0] == 1


def test_a_read_ahead_that_fails_while_it_is_waited_for_is_read_again(
    disk: Path, late: Late
) -> None:
    plan = FaultPlan()
    pool = make_pool(disk, 9, io=plan, executor=late)
    home = make_home(pool, 9)
    fill(pool, home)
    flushed(pool, home)
    plan.fail_at("read", plan.seen["read"], errno.EIO, times=2)  # a read tries twice by itself
    request = home.request(0)

    pool.ahead([request])
    with pool.pin(request):  # the read that was begun ahead is carried out in here, and fails
        assert home.array[0] == 1

    assert plan.fired == 2
    check_nothing_is_held(pool, home)


def test_a_failure_beside_what_was_to_be_written_anew_loses_nothing(disk: Path, late: Late) -> None:
    """What is pinned FRESH was not read: its memory must not pass for its content."""
    plan = FaultPlan()
    pool = make_pool(disk, 4, io=plan, executor=late)
    home, other = make_home(pool, 3), make_home(pool, 1)
    fill(pool, home)
    fill(pool, other, 9)
    flushed(pool, home)
    flushed(pool, other)
    plan.fail_at("read", plan.seen["read"], errno.EIO, times=2)

    with (
        pytest.raises(DiskReadError),
        pool.pin(Request([home.span(0, 3, PinUse.FRESH), other.span(0)])),
    ):
        pass

    assert plan.fired == 2
    assert seen(pool, home) == [1, 2, 3] and seen(pool, other) == [9]


def test_bytes_that_are_not_what_was_written_are_never_shown(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 3, executor=late)
    home = make_home(pool, 4)
    fill(pool, home)
    flushed(pool, home)
    ((fd, _),) = pool.nvme.open_files()
    slot, block = home.extents.all[1].slot, aligned_buffer(NUMEL)
    os.preadv(fd, [block], slot.offset)
    block[77] ^= 4
    os.pwritev(fd, [block], slot.offset)

    for _ in range(2):
        with pytest.raises(ChunkCorrupt, match="generation 1"), pool.pin(home.request(0, 3)):
            pass
        check_nothing_is_held(pool, home)
    block[77] ^= 4
    os.pwritev(fd, [block], slot.offset)
    assert seen(pool, home) == [1, 2, 3, 4]


# -- writes that fail ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_a_write_that_fails_keeps_the_only_copy_and_tells_who_needs_room(
    disk: Path, late: Late, number: int
) -> None:
    plan = FaultPlan()
    pool = make_pool(disk, 3, io=plan, executor=late)
    home = make_home(pool, 6)
    plan.fail_at("write", 0, number, times=None)
    touch(pool, home, 0, 1, 2, use=PinUse.WRITE)
    with pool.pin(home.request(0, 3, PinUse.WRITE)):
        home.array[: 3 * NUMEL] = 7

    for attempt in range(1, 5):
        kind = DiskFull if number == errno.ENOSPC else DiskWriteError
        with pytest.raises(kind), pool.pin(home.request(3)):
            pass
        check_nothing_is_held(pool, home)
        assert plan.seen["write"] <= 4 * attempt + 4  # and not again and again
    assert plan.fired >= 4
    assert states(pool, home)[:3] == [DIRTY] * 3

    plan.clear()
    assert seen(pool, home) == [7, 7, 7, 0, 0, 0]


def test_with_threads_too_a_write_that_fails_for_ever_is_told_and_not_repeated_for_ever(
    disk: Path, watchdog: None
) -> None:
    plan = FaultPlan()
    pool = make_pool(disk, 3, io=plan)
    home = make_home(pool, 6)
    plan.fail_at("write", 0, errno.ENOSPC, times=None)  # the pool writes behind
    with pool.pin(home.request(0, 3, PinUse.WRITE)):
        home.array[: 3 * NUMEL] = 7

    for _ in range(20):
        with pytest.raises(DiskFull), pool.pin(home.request(3)):
            pass
    pool.drain()
    assert 20 <= plan.fired <= 200

    plan.clear()
    assert seen(pool, home) == [7, 7, 7, 0, 0, 0]
    pool.close()


class BadSpot(IO):
    """Writes to one place fail for ever."""

    def __init__(self, offset: int) -> None:
        self.offset, self.fired = offset, 0

    def call(self, op: str, act: Callable[..., T], *args: Any, where: str, offset: int = 0) -> T:
        if op == "write" and offset == self.offset:
            self.fired += 1
            raise OSError(errno.EIO, "bad spot")
        return super().call(op, act, *args, where=where, offset=offset)


def test_one_extent_that_cannot_be_written_does_not_keep_the_others_in_memory(
    disk: Path, late: Late
) -> None:
    io = BadSpot(2 * NUMEL)
    pool = make_pool(disk, 4, io=io, executor=late)
    home = make_home(pool, 20)
    errors = 0
    for i in range(20):
        for _ in range(20):
            try:
                with pool.pin(home.request(i, use=PinUse.FRESH)):
                    home.array[i * NUMEL : (i + 1) * NUMEL] = i + 1
            except DiskWriteError:
                errors += 1
                continue
            break
    assert io.fired and errors < 20

    assert states(pool, home)[2] in (DIRTY, FLUSHING)
    for i in (0, 1, *range(3, 20)):
        with suppress(DiskWriteError):
            touch(pool, home, i)
        with pool.pin(home.request(i)):
            assert home.array[i * NUMEL] == i + 1
    assert home.array[2 * NUMEL] == 3


def test_the_disk_filling_up_is_told_before_anything_is_written(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = FaultPlan()
    plan.fail_at("reserve", 0, errno.ENOSPC)
    sizes: dict[str, Any] = {"pool_bytes": 9 * NUMEL, "extent_numel": NUMEL}
    sizes |= {"ledger": Ledger({}), "log": EventLog()}

    with pytest.raises(DiskFull) as failure:
        open_pool([Folder.open(disk, plan)], 40 * NUMEL, **sizes)
    assert plan.fired == 1 and plan.seen["write"] == 0
    assert failure.value.wanted == 40 * NUMEL and "free" in failure.value.advice

    monkeypatch.setattr(Folder, "space", lambda self: 39 * NUMEL)
    with pytest.raises(DiskFull, match="4096 bytes short"):
        open_pool([Folder.open(disk, plan)], 40 * NUMEL, **sizes)
    assert not os.listdir(disk)


# -- blocks that raise ---------------------------------------------------------------------------


class OopsError(Exception):
    """What a block raises here."""


def half_write(pool: Pool, home: Home, which: int, use: PinUse) -> None:
    with pytest.raises(OopsError), pool.pin(home.request(which, use=use)):
        home.array[which * NUMEL : which * NUMEL + 10] = 66
        raise OopsError


def test_what_was_to_be_written_anew_and_was_not_is_what_it_was(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 3, executor=late)
    home = make_home(pool, 4)
    fill(pool, home)
    flushed(pool, home)
    half_write(pool, home, 1, PinUse.FRESH)

    assert seen(pool, home) == [1, 2, 3, 4]
    empty = make_home(pool, 1)
    half_write(pool, empty, 0, PinUse.FRESH)
    assert seen(pool, empty) == [0]


def test_an_older_generation_never_takes_the_place_of_a_dirty_extent(
    disk: Path, late: Late
) -> None:
    pool = make_pool(disk, 3, executor=late)
    home = make_home(pool, 1)
    fill(pool, home, 1)
    flushed(pool, home)
    fill(pool, home, 2)
    assert states(pool, home) == [DIRTY]

    half_write(pool, home, 0, PinUse.FRESH)

    assert list(home.array[8:12]) == [66, 66, 2, 2]
    flushed(pool, home)
    touch(pool, home, 0)
    assert list(home.array[8:12]) == [66, 66, 2, 2]


def test_what_a_block_wrote_before_it_raised_counts(disk: Path, late: Late) -> None:
    pool = make_pool(disk, 3, executor=late)
    home = make_home(pool, 1)
    fill(pool, home, 1)
    flushed(pool, home)

    half_write(pool, home, 0, PinUse.WRITE)

    flushed(pool, home)
    touch(pool, home, 0)
    assert list(home.array[8:12]) == [66, 66, 1, 1]


# -- every fault at every place ------------------------------------------------------------------

N_HOMES, N_EXTENTS = 2, 5


def program(pool: Pool, homes: Sequence[Home]) -> Iterator[Callable[[], None]]:
    """Yield what a small training loop does; each part may fail, and may be tried again."""

    def add(i: int) -> None:
        with pool.pin(Request([home.span(i, use=PinUse.WRITE) for home in homes])):
            for home in homes:
                home.array[i * NUMEL : (i + 1) * NUMEL] += 1

    def begin(home: Home, i: int) -> None:
        with pool.pin(home.request(i, use=PinUse.FRESH)):
            home.array[i * NUMEL : (i + 1) * NUMEL] = i

    for home, i in itertools.product(homes, range(N_EXTENTS)):
        yield partial(begin, home, i)
    for _ in range(2):
        pool.ahead([home.request(i) for i in range(N_EXTENTS) for home in homes])
        for i in range(N_EXTENTS):
            yield partial(add, i)


def run_program(disk: Path, plan: FaultPlan) -> tuple[Counter[str], Counter[str]]:
    """Run it, going on after every error; return what errors and calls there were."""
    late, errors = Late(1), Counter[str]()
    pool = make_pool(disk, 4, io=plan, executor=late)
    homes = [make_home(pool, N_EXTENTS) for _ in range(N_HOMES)]
    for part in program(pool, homes):
        for attempt in itertools.count():
            try:
                part()
            except StorageError as error:
                errors[type(error).__name__] += 1
                assert attempt < 9
                if attempt == 5:
                    plan.clear()
                for home in homes:
                    check_nothing_is_held(pool, home)
                continue
            break
    calls = Counter(plan.seen)
    plan.clear()
    for home in homes:
        assert seen(pool, home) == [i + 2 for i in range(N_EXTENTS)]
    pool.close()
    return errors, calls


FAULTS = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EINTR)


@pytest.mark.campaign(seconds=5)
@pytest.mark.parametrize("number", FAULTS, ids=errno.errorcode.get)
def test_every_transfer_fails_once_and_for_ever_and_no_number_changes(
    disk: Path, number: int
) -> None:
    errors, calls = run_program(disk, FaultPlan())
    assert not errors and calls["read"] > 10 and calls["write"] > 10
    told = Counter[str]()
    for op in ("read", "write"):
        for k, times in itertools.product(range(calls[op]), (1, 2, None)):
            plan = FaultPlan()
            plan.fail_at(op, k, number, times)
            told += run_program(disk, plan)[0]
            assert plan.fired > 0
    # what is interrupted goes on; for ever is an error
    assert set(told) <= {"DiskReadError", "DiskWriteError", "DiskFull"} and told


@pytest.mark.parametrize("got", [ALIGN - 1 + ALIGN, 512 + ALIGN, ALIGN])
def test_transfers_that_are_all_short_change_no_number(disk: Path, got: int) -> None:
    plan = FaultPlan()
    plan.short_at("read", 0, got, times=None)
    plan.short_at("write", 0, got, times=None)
    late = Late(0)
    pool = make_pool(disk, 16, io=plan, executor=late)
    home = make_home(pool, 12, "f4")
    rng = np.random.default_rng(0)
    wanted = rng.random(len(home.array), "f4")
    with pool.pin(home.request(0, 3, PinUse.FRESH)):
        home.array[: 3 * NUMEL] = wanted[: 3 * NUMEL]
    for i in range(3, 12):
        with pool.pin(home.request(i, use=PinUse.FRESH)):
            home.array[i * NUMEL : (i + 1) * NUMEL] = wanted[i * NUMEL : (i + 1) * NUMEL]
    for i in range(12):
        with pool.pin(home.request(i)):
            part = slice(i * NUMEL, (i + 1) * NUMEL)
            assert np.array_equal(home.array[part], wanted[part])
    assert plan.fired >= 2 * (pool.nvme.written_bytes + 12 * 4 * NUMEL) // (4 * NUMEL)


# -- against plain arrays ------------------------------------------------------------------------

BUDGET = 8  # extents of one byte an element
SHAPES = ((3, "u1"), (2.5, "u1"), (4, "u1"), (2, "u2"), (1.3, "u4"))


class Held(NamedTuple):
    """A pin that is held, and what it holds."""

    guard: AbstractContextManager[None]
    request: Request


class PoolMachine(RuleBasedStateMachine):
    """Random programs of one thread, which may hold several pins; see [Note: turns]."""

    disk: Path

    @initialize(seed=st.integers(0, 2**16))
    def start(self, seed: int) -> None:
        self.plan, self.late = FaultPlan(), Late(seed)
        self.pool = make_pool(self.disk, BUDGET, io=self.plan, executor=self.late)
        self.homes = [make_home(self.pool, n, dtype) for n, dtype in SHAPES]
        self.model = [np.zeros_like(home.array) for home in self.homes]
        self.held: list[Held] = []
        self.announced: list[Request] = []
        self.faulty = False
        self.random = np.random.default_rng(seed)
        ((self.fd, _),) = self.pool.nvme.open_files()

    # -- what the machine believes ---------------------------------------------------------------

    def span(self, data: st.DataObject, use: PinUse | None = None) -> PinSpan:
        home = self.homes[data.draw(st.integers(0, len(self.homes) - 1))]
        numel = len(home.array)
        edges = st.sampled_from([*range(0, numel, NUMEL), numel]) | st.integers(0, numel)
        start, end = sorted((data.draw(edges), data.draw(edges)))
        return PinSpan(home, start, end, use or data.draw(st.sampled_from(PinUse)))

    def index(self, home: Any) -> int:
        return next(i for i, other in enumerate(self.homes) if other is home)

    def pinned(self) -> Counter[Extent]:
        return Counter(extent for held in self.held for extent in held.request.needs)

    def needed_bytes(self, request: Request) -> int:
        return sum(extent.n_bytes for extent in {*self.pinned(), *request.needs})

    def write(self, span: PinSpan) -> None:
        """Write numbers not seen before."""
        at = self.index(span.home)
        values = self.random.integers(1, 250, span.end - span.start, dtype=np.uint8)
        self.homes[at].array[span.start : span.end] = values
        self.model[at][span.start : span.end] = values

    def right(self, span: PinSpan) -> bool:
        at, part = self.index(span.home), slice(span.start, span.end)
        return np.array_equal(self.homes[at].array[part], self.model[at][part])

    # -- rules -----------------------------------------------------------------------------------

    @rule(data=st.data(), n=st.integers(1, 3))
    def pin(self, data: st.DataObject, n: int) -> None:
        spans = [self.span(data) for _ in range(n)]
        request = Request(spans)
        guard = self.pool.pin(request)
        try:
            guard.__enter__()
        except BudgetError:
            assert self.needed_bytes(request) > self.pool.n_bytes
            return
        except StorageError:
            assert self.faulty and self.plan.fired
            return
        assert self.needed_bytes(request) <= self.pool.n_bytes
        self.held.append(Held(guard, request))
        for span in spans:
            if span.use is not PinUse.FRESH and not any(self.fresh(other) for other in spans):
                assert self.right(span)
        for span in spans:
            if span.use is not PinUse.READ:
                self.write(span)

    def fresh(self, span: PinSpan) -> bool:
        return span.use is PinUse.FRESH

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        held.guard.__exit__(None, None, None)

    @rule(data=st.data())
    def block_that_raises(self, data: st.DataObject) -> None:
        span = self.span(data, PinUse.FRESH)
        request, at = Request([span]), self.index(span.home)
        if set(request.needs) & set(self.pinned()) or not request.needs:
            return
        guard = self.pool.pin(request)
        was = {e: state(self.pool, e) for e in request.needs}
        try:
            guard.__enter__()
        except (BudgetError, StorageError):
            return
        middle = (span.start + span.end) // 2
        self.homes[at].array[span.start : middle] = 251
        for extent, use in request.needs.items():
            size = self.homes[at].array.itemsize
            first = extent.page // size
            part = slice(max(first, span.start), min(first + extent.n_bytes // size, middle))
            if part.stop > part.start and (use is PinUse.WRITE or was[extent] is not ABSENT):
                self.model[at][part] = 251
        with suppress(OopsError):
            guard.__exit__(OopsError, OopsError(), None)

    @rule(data=st.data(), n=st.integers(1, 6))
    def announce(self, data: st.DataObject, n: int) -> None:
        requests = [Request([self.span(data)]) for _ in range(n)]
        self.announced += requests
        data.draw(st.sampled_from([self.pool.ahead, self.pool.later]))(requests)

    @precondition(lambda self: self.announced)
    @rule(data=st.data())
    def pin_announced(self, data: st.DataObject) -> None:
        request = self.announced.pop(data.draw(st.integers(0, min(2, len(self.announced) - 1))))
        if any(use is not PinUse.READ for use in request.needs.values()):
            return
        try:
            with self.pool.pin(request):
                pass
        except BudgetError:
            assert self.needed_bytes(request) > self.pool.n_bytes
        except StorageError:
            assert self.faulty and self.plan.fired

    @rule()
    def forget(self) -> None:
        self.announced.clear()
        self.pool.drain()

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.homes) - 1))
        if set(self.homes[at].extents.all) & set(self.pinned()):
            with pytest.raises(StateError):
                self.pool.discard(self.homes[at].extents)
            return
        self.pool.discard(self.homes[at].extents)
        self.model[at][:] = 0

    @rule(k=st.integers(1, 6))
    def transfers_end(self, k: int) -> None:
        for _ in range(k):
            self.late.step()

    @rule()
    def drain(self) -> None:
        self.pool.drain()
        assert not self.late.todo

    @rule(
        op=st.sampled_from(("read", "write", "any")),
        number=st.sampled_from((errno.EIO, errno.ENOSPC)),
        times=st.sampled_from((1, 2, 3, None)),
        wait=st.integers(0, 3),
    )
    def fail_next(self, op: str, number: int, times: int | None, wait: int) -> None:
        self.plan.fail_at(op, self.plan.seen[op] + wait, number, times)
        self.faulty = True

    @precondition(lambda self: self.faulty)
    @rule()
    def heal(self) -> None:
        self.plan.clear()
        self.faulty = self.plan.fired > 0 and any(
            extent.error is not None for home in self.homes for extent in home.extents.all
        )
        self.faulty |= bool(self.late.todo)  # what failed already may still be told

    # -- invariants ------------------------------------------------------------------------------

    @invariant()
    def budget_holds(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        sizes = Counter[CopyState]()
        for home in self.homes:
            for extent in home.extents.all:
                sizes[state(pool, extent)] += extent.n_bytes
        assert sizes == Counter({s: n for s, n in pool.cache.bytes.items() if n})
        assert pool.cache.used == sum(sizes.values()) - sizes[ABSENT]
        assert pool.cache.used <= pool.cache.peak <= pool.n_bytes

    @invariant()
    def pins_and_states_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, pinned = self.pool, self.pinned()
        moving = 0
        for home in self.homes:
            for extent in home.extents.all:
                found = state(pool, extent)
                assert extent.pins == pinned[extent] >= 0
                assert (extent in pool.cache.resident) == (found is not ABSENT)
                assert not extent.pins or found in (CLEAN, DIRTY, FLUSHING)
                assert extent not in pool.cache.window or found is not ABSENT
                moving += found in (FILLING, FLUSHING)
        assert moving == pool._in_flight == len(self.late.todo)
        kept = sum(extent.n_bytes for extent in pool.cache.window._kept)
        assert kept == pool.cache.window.kept_bytes
        assert pool._n_waiting == 0 and sum(pool._holders.values()) == len(self.held)

    @invariant()
    def what_may_leave_is_what_nothing_holds(self) -> None:
        if not hasattr(self, "pool"):
            return
        cache = self.pool.cache
        for each in (CLEAN, DIRTY):
            loose = {
                extent
                for extent in cache.resident
                if state(self.pool, extent) is each
                and not (extent.pins or extent in cache.window or extent in cache.later)
            }
            order = sorted(loose, key=lambda extent: extent.turn)
            assert cache.loose(each, (), 2**60) == order

    @invariant()
    def one_copy_has_the_content(self) -> None:
        if not hasattr(self, "pool"):
            return
        for home, model in zip(self.homes, self.model, strict=True):
            for extent in home.extents.all:
                size = model.itemsize
                part = slice(extent.page // size, (extent.page + extent.n_bytes) // size)
                wanted, found = model[part], state(self.pool, extent)
                if found in (CLEAN, DIRTY, FLUSHING):
                    assert np.array_equal(home.array[part], wanted)
                if found in (CLEAN, ABSENT, FILLING) and not extent.pins:
                    assert self.stored(extent, wanted) if extent.stored else not wanted.any()

    def stored(self, extent: Extent, wanted: Array) -> bool:
        """Whether the disk has what a home should hold."""
        buffer = aligned_buffer(extent.n_bytes)
        assert os.preadv(self.fd, [buffer], extent.slot.offset) == extent.n_bytes
        return buffer[: wanted.nbytes] == memoryview(wanted).cast("B")

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.plan.clear()
        for held in self.held:
            held.guard.__exit__(None, None, None)
        self.held.clear()
        for home in self.homes:
            for i in range(len(home.extents.all)):
                with suppress(StorageError):  # a write that failed before, told to the next
                    touch(self.pool, home, i)
                with self.pool.pin(home.request(i)):
                    assert self.right(home.span(i))
        self.pool.discard(self.homes[0].extents)
        self.pool.close()
        assert not self.late.todo


@pytest.mark.campaign(seconds=5)
def test_random_programs_agree_with_plain_arrays(disk: Path) -> None:
    class OnDisk(PoolMachine):
        pass

    OnDisk.disk = disk
    run_state_machine_as_test(
        OnDisk,
        settings=settings(
            max_examples=120,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


# -- threads -------------------------------------------------------------------------------------

N_THREADS, OWN, LARGEST = 8, 6, 4


class Flaky(IO):
    """Transfers fail at random, or not at all where ``rate`` is 0."""

    def __init__(self, rate: float) -> None:
        self.rate, self.fired, self.random = rate, 0, random.Random(0)

    def call(self, op: str, act: Callable[..., T], *args: Any, where: str, offset: int = 0) -> T:
        if op in ("read", "write") and self.random.random() < self.rate:
            self.fired += 1
            raise OSError(self.random.choice((errno.EIO, errno.ENOSPC)), "flaky")
        return super().call(op, act, *args, where=where, offset=offset)


class Stress:
    """Threads that add to extents of their own in two homes, and read what all share."""

    def __init__(self, disk: Path, rate: float) -> None:
        self.io = Flaky(0.0)
        self.pool = make_pool(disk, LARGEST + 3, io=self.io)
        self.homes = [make_home(self.pool, N_THREADS * OWN) for _ in range(2)]
        self.shared = make_home(self.pool, 5)
        fill(self.pool, self.shared)
        for home in self.homes:
            fill(self.pool, home, 0)
        self.io.rate = rate
        self.counts = np.zeros(N_THREADS * OWN, np.uint8)
        self.errors = 0

    def request(self, rng: random.Random, thread: int) -> tuple[Request, list[int], PinUse]:
        n = rng.randint(1, LARGEST // 2)
        first = thread * OWN + rng.randint(0, OWN - n)
        use = rng.choice((PinUse.READ, PinUse.WRITE, PinUse.WRITE, PinUse.FRESH))
        spans = [home.span(first, first + n, use) for home in self.homes]
        return Request(spans), list(range(first, first + n)), use

    def work(self, thread: int, turns: int = 60) -> None:
        rng = random.Random(thread)
        todo = [self.request(rng, thread) for _ in range(turns)]
        for turn, (request, which, use) in enumerate(todo):
            if turn % 10 == 0:
                self.pool.ahead(r for r, _, _ in todo[turn : turn + 10])
            self.patiently(partial(self.turn, request, which, use))
            if turn % 3 == 0:
                self.patiently(partial(self.look, rng.randrange(5)))

    def turn(self, request: Request, which: list[int], use: PinUse) -> None:
        with self.pool.pin(request):
            assert self.pool.cache.used <= self.pool.n_bytes
            for home, i in itertools.product(self.homes, which):
                part = home.array[i * NUMEL : (i + 1) * NUMEL]
                if use is not PinUse.FRESH:
                    assert (part == self.counts[i]).all()
                if use is not PinUse.READ:
                    part[:] = self.counts[i] + 1
            if use is not PinUse.READ:
                self.counts[which] += 1

    def look(self, i: int) -> None:
        with self.pool.pin(self.shared.request(i)):
            assert (self.shared.array[i * NUMEL : (i + 1) * NUMEL] == i + 1).all()

    def patiently(self, act: Callable[[], None]) -> None:
        while True:
            try:
                return act()
            except StorageError:
                self.errors += 1

    def check(self) -> None:
        self.io.rate = 0.0
        for home in self.homes:
            assert seen(self.pool, home) == list(self.counts)
        assert not any(e.pins for home in (*self.homes, self.shared) for e in home.extents.all)
        assert self.pool.cache.peak <= self.pool.n_bytes
        self.pool.drain()
        assert not self.pool._in_flight and not self.pool._holders
        self.pool.close()


@pytest.mark.parametrize("rate", [0.0, 0.02])
def test_threads_share_a_pool_that_is_hardly_larger_than_one_request(
    disk: Path, watchdog: None, rate: float
) -> None:
    stress = Stress(disk, rate)
    with ThreadPoolExecutor(N_THREADS) as executor:
        list(executor.map(stress.work, range(N_THREADS)))
    assert (stress.errors > 0) == (stress.io.fired > 0) == (rate > 0)
    stress.check()


def test_the_thread_that_launches_work_may_pin_more_while_it_holds_some(
    disk: Path, watchdog: None
) -> None:
    stress = Stress(disk, 0.0)
    with ThreadPoolExecutor(N_THREADS) as executor:
        others = [executor.submit(stress.work, thread) for thread in range(1, N_THREADS)]
        for turn in range(100):
            with stress.pool.pin(stress.shared.request(turn % 5)):
                stress.look((turn + 1) % 5)
                with stress.pool.pin(stress.shared.request((turn + 2) % 5)):
                    stress.look((turn + 3) % 5)
        for other in others:
            other.result()
    stress.check()


def test_an_update_is_helped_by_who_waits_for_it(disk: Path, watchdog: None) -> None:
    stress, worker = Stress(disk, 0.02), Worker(2)

    def add(i: int) -> None:
        with stress.pool.pin(Request([home.span(i, use=PinUse.WRITE) for home in stress.homes])):
            for home in stress.homes:
                home.array[i * NUMEL : (i + 1) * NUMEL] += 1
        stress.counts[i] += 1

    n = len(stress.counts)
    jobs = []
    for bucket in range(0, n, OWN):
        slices = [partial(add, i) for i in range(bucket, bucket + OWN)]
        jobs.append(worker.submit(Job(slices)))
    for job in reversed(jobs):
        stress.patiently(job.wait)
    assert list(stress.counts) == [1] * n and stress.io.fired
    worker.close()
    stress.check()


def test_a_pool_that_is_let_go_ends_its_threads(disk: Path) -> None:
    before = threading.active_count()
    pool = make_pool(disk, 3)
    fill(pool, make_home(pool, 4))
    pool.drain()
    assert threading.active_count() == before + 2
    del pool
    for _ in range(200):
        if threading.active_count() == before:
            return
        time.sleep(0.01)
    pytest.fail("threads are still there")


def test_closing_twice_is_no_error(disk: Path) -> None:
    pool = make_pool(disk, 3)
    fill(pool, make_home(pool, 6))
    pool.close()
    pool.close()


# -- forks and exits -----------------------------------------------------------------------------


def in_child(act: Callable[[], None]) -> int:
    """Run something in a forked child; return its exit code, -9 where it had to be killed."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    for _ in range(2000):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -9


def test_a_forked_child_is_refused_and_its_parent_goes_on(disk: Path, watchdog: None) -> None:
    pool = make_pool(disk, 3)
    home = make_home(pool, 6)
    fill(pool, home)
    held = pool.pin(home.request(2))

    def child() -> None:
        with pytest.raises(ForkedProcessError):
            touch(pool, home, 0)
        with pytest.raises(ForkedProcessError):
            pool.ahead([home.request(0)])
        with pytest.raises(ForkedProcessError):
            pool.discard(home.extents)
        pool.ready(home.request(0))
        held.__exit__(None, None, None)
        pool.drain()
        pool.close()

    held.__enter__()
    assert in_child(child) == 0
    held.__exit__(None, None, None)
    assert seen(pool, home) == [1, 2, 3, 4, 5, 6]
    pool.close()


def test_forks_in_the_middle_of_transfers_harm_nobody(disk: Path, watchdog: None) -> None:
    stress = Stress(disk, 0.0)
    with ThreadPoolExecutor(4) as executor:
        others = [executor.submit(stress.work, thread, 150) for thread in range(4)]
        forks = 0
        while not all(other.done() for other in others) or not forks:
            with stress.pool._changed:
                pass
            assert in_child(lambda: None) == 0
            forks += 1
        for other in others:
            other.result()
    assert forks
    stress.check()


def test_no_transfer_is_under_way_in_a_fork(disk: Path, watchdog: None) -> None:
    pool = make_pool(disk, 30)
    home = make_home(pool, 60)
    fill(pool, home)
    found = []

    def look() -> None:
        found.append((pool._in_flight, states(pool, home)))

    os.register_at_fork(after_in_parent=look)  # after the pool's own
    for _ in range(5):
        pool.ahead([home.request(i) for i in range(60)])
        assert in_child(lambda: None) == 0
        touch(pool, home, *range(0, 60, 7), use=PinUse.WRITE)
    looks = found[:5]
    assert len(looks) == 5
    pool.close()


def script(disk: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Run a program that has a pool with a scan under way."""
    code = f"""
import sys, threading
from hetero.device import map_slab
from hetero.events import EventLog
from hetero.io import Folder
from hetero.memory.ledger import Ledger
from hetero.memory.nvme import Nvme
from hetero.memory.extent import Request, PinSpan, PinUse
from hetero.memory.pool import Pool
from hetero.types import Kind

class Home:
    def __init__(self, pool, n_bytes):
        self.slab = map_slab(n_bytes, huge=False)
        self.extents = pool.adopt(Kind.STATE, self.slab, n_bytes, 1, "x")
        self.array = self.slab.block.numpy()

SIZE, N = 65536, 64
nvme = Nvme([Folder.open({str(disk)!r})], SIZE * N, ledger=Ledger({{}}), log=EventLog())
pool = Pool(nvme, 12 * SIZE, extent_numel=SIZE)
home = Home(pool, SIZE * N)
spans = [PinSpan(home.extents, i * SIZE, (i + 1) * SIZE, PinUse.WRITE) for i in range(N)]
requests = [Request([span]) for span in spans]
for i, request in enumerate(requests):
    with pool.pin(request):
        home.array[i * SIZE : (i + 1) * SIZE] = i
pool.ahead(requests)
{body}
"""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=HANGS_SECONDS,
        check=False,
    )


@pytest.mark.campaign(seconds=4)
def test_the_interpreter_ends_with_transfers_under_way(disk: Path) -> None:
    done = script(disk, "sys.exit(7)")
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
    assert not os.listdir(disk)


@pytest.mark.campaign(seconds=3)
def test_a_thread_still_reads_homes_while_the_interpreter_ends(disk: Path) -> None:
    """As an asynchronous save does that the end of the program waits for."""
    body = """
def save():
    threading.main_thread().join()
    for i, request in enumerate(requests):
        with pool.pin(request):
            assert (home.array[i * SIZE : (i + 1) * SIZE] == i).all()
    print("saved", flush=True)
threading.Thread(target=save).start()
"""
    done = script(disk, body)
    assert (done.returncode, done.stdout, done.stderr) == (0, "saved\n", "")

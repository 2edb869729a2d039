"""The pool: HOST memory for homes that lie on disk (floor 1, mechanism).

A thread pins all that it needs at once or nothing; only the launching thread may pin more while it
holds some: there is no circular wait. Dirty extents are written before their room is needed, least
recently used first, and announced ones are read before they are pinned; both pause while any thread
waits for memory. A failed read leaves an extent ABSENT, a failed write leaves it DIRTY: nothing is
lost, the error goes to the thread that needs the bytes or the room, and the next request retries.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from hetero import interrupts
from hetero.config import paranoid
from hetero.device import HUGE_PAGE, Slab
from hetero.errors import BudgetError, DiskFull, StateError, afresh
from hetero.events import EventLog
from hetero.forks import Owner
from hetero.io import ALIGN, Folder, align_up
from hetero.memory.extent import Extent, Extents, PinUse, Request, overlap
from hetero.memory.ledger import Ledger
from hetero.memory.nvme import DiskSlot, Executor, IoThreads, Nvme
from hetero.memory.pagecache import PageCache, Window, ask_for_pages
from hetero.types import CopyState, Kind, Lane, format_bytes

STALL_SECONDS = 600.0  # without progress, while a thread waits for room that others hold
N_THREADS = 4  # parallel transfers, if little is spilled
TRY_FROM_BYTES = 2**30  # from so much spilled on, measure how many threads are best
DIRTY_SHARE = 3  # beyond 1/3 of the pool, dirty extents are written at once
FORGET_AFTER = 2  # an unused read-ahead is dropped after so many fills of the pool
ABSENT, FILLING, CLEAN, DIRTY, FLUSHING = CopyState


class Pool:
    """Memory of ``n_bytes`` that extents share.

    Args:
        extent_numel: elements of an extent, a multiple of 4096.
        executor: runs transfers; None: ``n_threads`` threads of its own.
    """

    spills = True
    """Whether homes can lie on disk."""

    def __init__(
        self,
        nvme: Nvme,
        n_bytes: int,
        *,
        extent_numel: int,
        n_threads: int = N_THREADS,
        executor: Executor | None = None,
    ) -> None:
        self.nvme = nvme
        self.n_threads = n_threads
        self.n_bytes = n_bytes
        self.extent_numel = extent_numel
        self.cache = PageCache(n_bytes, checked=paranoid())
        self._executor = executor or IoThreads(n_threads)
        self._changed: threading.Condition = threading.Condition()
        self._in_flight = 0
        self._holders: Counter[int] = Counter()  # requests pinned, by thread
        self._n_waiting = 0  # threads that wait for room
        self._n_changes = 0  # that waiters were notified of
        self._failures = 0  # of writes
        self._failure: BaseException | None = None  # the last one, for a thread that needs the room
        self.told = False  # whether a drive's error was raised, since an owner last asked
        self._owner = Owner("homes on disk, which belong to its parent")
        _watch_forks(weakref.ref(self))

    @property
    def written_bytes(self) -> int:
        """Bytes written to disk since it was opened."""
        return self.nvme.written_bytes

    def take_counts(self) -> Counter[Lane]:
        return self.nvme.take_counts()

    @property
    def seconds_per_byte(self) -> float:
        """How long a byte takes that is read and written once: on the slower of both lanes, when it
        was used last; 0 if that is unknown yet."""
        return max(self.nvme.pace.values(), default=0.0)

    def adopt(
        self,
        kind: Kind,
        slab: Slab,
        n_bytes: int,
        itemsize: int,
        what: str,
        kept: slice | None = None,
    ) -> Extents:
        """Cut a home's memory into extents, each with a slot on disk; if ``kept`` is given, where
        those items lie."""
        size, extents = self.extent_numel * itemsize, []
        kept = overlap(kept or slice(0, sys.maxsize), slice(0, n_bytes // itemsize))
        begin = kept.start * itemsize // ALIGN * ALIGN
        end = align_up(min(n_bytes, kept.stop * itemsize))
        first = self._first_page(slab, size, n_bytes, what)
        with self._changed:
            for at in range(begin // size * size, end, size):
                start, stop = max(at, begin), min(at + size, end)
                slot = self.nvme.slot(kind, stop - start, what)
                id = self.cache.add(stop - start)
                extents.append(Extent(id, slab.mapping, first + start, stop - start, slot))
        return Extents(extents, self.extent_numel, kept)

    def _first_page(self, slab: Slab, size_bytes: int, n_bytes: int, what: str) -> int:
        """Return a home's offset in its mapping, and ask for pages that suit its extents."""
        mapping = slab.mapping
        if mapping is None:
            raise BudgetError(f"{what} lies on the device, which has no way to disk")
        first = slab.block.data_ptr() - ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        whole = slab.block.data_ptr() % HUGE_PAGE == 0 and size_bytes % HUGE_PAGE == 0
        ask_for_pages(mapping, first, n_bytes, n_bytes // HUGE_PAGE * HUGE_PAGE if whole else 0)
        return first

    # -- pins ------------------------------------------------------------------------------------

    @contextmanager
    def pin(self, request: Request) -> Iterator[None]:
        """Hold the spans of a request in memory for the length of a block.

        Raises StorageError if a read failed, or if writes fail and so no room can be made;
        BudgetError if the pool is too small. Nothing is held then. If the block raises, extents of
        a FRESH span that were not in memory keep their old content.
        """
        me = threading.get_ident()
        while not self._take(request, me):
            pass
        try:
            yield
        except BaseException:
            self._give_back(request, me, whole=False)
            raise
        self._give_back(request, me, whole=True)

    def ready(self, request: Request) -> bool:
        """Whether `pin` would not wait for a read."""
        with self._changed:
            needs = request.needs
            unread = (
                self.cache.is_unread(e) and use is not PinUse.FRESH for e, use in needs.items()
            )
            return not (self._is_filling(needs) or any(unread))

    def ahead(self, requests: Iterable[Request]) -> None:
        """Announce requests in the order in which they will be pinned; they are read ahead."""
        self._owner.check()
        with self._changed:
            for request in requests:
                request.asked_at = self.cache.clock
                self.cache.window.requests.append(request)
            self._pump()

    def later(self, requests: Iterable[Request]) -> None:
        """Announce requests to be pinned after other work, in place of those announced before.

        They are read while nothing is left to read ahead, and dropped, last first, as soon as a pin
        needs their room. A forked process, which must not read, announces nothing.
        """
        if not self._owner.is_here:
            return
        with self._changed:
            self.cache.later.requests.clear()
            for request in requests:
                request.asked_at = self.cache.clock
                self.cache.later.requests.append(request)
            self._pump()

    def discard(self, extents: Extents) -> None:
        """Drop a home's content, in memory and on disk; it reads as zeros from now on."""
        self._owner.check()
        with self._changed:
            moving = (FILLING, FLUSHING)
            self._wait(lambda: not any(self.cache.state(e) in moving for e in extents.all))
            if any(extent.pins for extent in extents.all):
                raise StateError("a home on disk was discarded while it is pinned")
            for extent in extents.all:
                extent.stored = False
                if self.cache.state(extent) is not ABSENT:
                    self.cache.leave(extent, "discard")
            self._pump()
            self._tell_waiters()

    def drain(self) -> None:
        """Forget announced requests, and return when no transfer is under way."""
        if not self._owner.is_here:
            return
        with self._changed:
            self.cache.window.requests.clear()
            self.cache.later.requests.clear()
            self._wait(lambda: not self._in_flight)

    def close(self) -> None:
        if self._owner.is_here:
            self.drain()
            self._executor.close()
            self.nvme.close()

    # -- inside, under the lock ------------------------------------------------------------------

    def _take(self, request: Request, me: int) -> bool:
        """Pin a request; False, with nothing pinned, if a read that was begun ahead failed. A
        failed read-ahead is not reported: the caller retries the read."""
        self._owner.check()
        with self._changed:
            # 1. wait until none to be written is being flushed, and the missing ones have room
            if not self._has_room(request):
                with self.nvme.log.standing("write"):
                    self._wait_for_room(request, me)
            # 2. hold them, and begin to read
            self.cache.clock += 1
            self._holders[me] += 1
            for extent in request.needs:
                extent.pins += 1
                extent.used_at = self.cache.clock
                self.cache.let_go(extent)
            try:
                ahead = {e for e in request.needs if self.cache.state(e) is FILLING}
                for extent, use in request.needs.items():
                    if self.cache.state(extent) is ABSENT:
                        self._bring(extent, use)
                # 3. wait for the reads
                if self._is_filling(request.needs):
                    with self.nvme.log.standing("read"):
                        self._wait(lambda: not self._is_filling(request.needs))
                failed = [e for e in request.needs if self.cache.state(e) is ABSENT]
                for extent in failed:
                    if extent not in ahead:
                        kept = extent.error
                        raise self._tell(kept) if kept else self._too_small(request.n_bytes)
            except BaseException:
                self._unpin(request, me)
                raise
            if failed:
                self._unpin(request, me)
            return not failed

    def _is_filling(self, extents: Iterable[Extent]) -> bool:
        return any(self.cache.state(extent) is FILLING for extent in extents)

    def _wait(self, happened: Callable[[], bool], seconds: float | None = None) -> bool:
        return interrupts.wait(self._changed, happened, seconds)

    def _tell_waiters(self) -> None:
        self._n_changes += 1
        self._changed.notify_all()

    def _give_back(self, request: Request, me: int, *, whole: bool) -> None:
        if not self._owner.is_here:
            return
        with self._changed:
            for extent, use in request.needs.items():
                if use is PinUse.FRESH and whole:
                    extent.blank = False
                if use is not PinUse.READ and not extent.blank:
                    self.cache.move(extent, DIRTY, "write")
            self._unpin(request, me)

    def _unpin(self, request: Request, me: int) -> None:
        self._holders[me] -= 1
        self._holders += Counter()  # drop threads that hold nothing
        for extent in request.needs:
            extent.pins -= 1
            self.cache.touch(extent)
            if extent.blank and not extent.pins:
                self.cache.leave(extent, "discard")  # not fully written: keep the old content
        self._pump()
        self._tell_waiters()

    # -- room ------------------------------------------------------------------------------------

    def _wait_for_room(self, request: Request, me: int) -> None:
        if request.n_bytes > self.n_bytes:
            raise self._too_small(request.n_bytes)
        failures = self._failures
        self._n_waiting += 1
        try:
            while not self._has_room(request):
                self._make_room(request, me, failed=self._failures > failures)
        finally:
            self._n_waiting -= 1

    def _has_room(self, request: Request) -> bool:
        for extent, use in request.needs.items():
            if use is not PinUse.READ and self.cache.state(extent) is FLUSHING:
                return False  # it must not change while it is flushed
        while not self.cache.evict(self.cache.missing(request), request.needs):
            self.cache.later.requests.clear()  # reading now would be for nothing
            if not self.cache.later.let_go_last():
                return False
        return True

    def _make_room(self, request: Request, me: int, *, failed: bool) -> None:
        """Make some room for a request, or wait for another thread to."""
        # 1. write the least recently used; nothing more once a write has failed
        if not failed:
            self._flush(self.cache.short(self.cache.missing(request)), request.needs)
        # 2. if nothing is being flushed, drop extents read ahead, last first
        if not self.cache.bytes[FLUSHING] and (failed or not self._in_flight):
            if self.cache.window.let_go_last():
                return
            if failed and self._failure is not None:
                raise self._tell(self._failure)
            if self._holders.keys() == {me}:
                raise self._too_small(request.n_bytes)
        # 3. wait for the threads that hold some
        seen = self._n_changes
        changed = self._wait(lambda: self._n_changes != seen, STALL_SECONDS)
        if not changed and not self._in_flight:
            raise self._too_small(request.n_bytes)

    def _flush(self, n_bytes: int, keep: Container[Extent] = ()) -> None:
        """Begin to write ``n_bytes`` of dirty extents, or all there are."""
        for extent in self.cache.loose(DIRTY, keep, n_bytes):
            self.cache.move(extent, FLUSHING, "flush")
            self._begin(Lane.WRITE, extent)

    def _bring(self, extent: Extent, use: PinUse) -> None:
        """Give an extent memory, and begin to read its content if the use needs it."""
        if self.cache.enter(extent, use):
            self._begin(Lane.READ, extent)

    # -- ahead of need ---------------------------------------------------------------------------

    def _pump(self) -> None:
        """Write dirty extents, and read ahead within the window, unless a thread waits."""
        if self._n_waiting:
            return
        self._flush(self.cache.bytes[DIRTY] - self.n_bytes // DIRTY_SHARE)
        self.cache.window.let_go_before(self.cache.clock - FORGET_AFTER * self.n_bytes)
        if self._read_ahead(self.cache.window):
            self._read_ahead(self.cache.later)

    def _read_ahead(self, window: Window) -> bool:
        """Begin to read as much as a window has room for; whether that is all of it."""
        while window.requests:
            request = window.requests[0]
            coming = self.cache.due(request)
            if request.n_bytes > self.n_bytes or not coming:
                window.requests.popleft()
                continue
            n_bytes = sum(extent.n_bytes for extent in coming)
            if window.kept_bytes and window.kept_bytes + n_bytes > window.n_bytes:
                return False
            missing = sum(e.n_bytes for e in coming if self.cache.state(e) is ABSENT)
            if not self.cache.evict(missing, request.needs):
                self._flush(self.cache.short(missing), request.needs)
                return False
            window.requests.popleft()
            for extent in coming:
                window.keep(extent, self.cache.clock)
                if self.cache.state(extent) is ABSENT:
                    self._bring(extent, PinUse.READ)
        return True

    # -- transfers, on their own threads ---------------------------------------------------------

    def _begin(self, lane: Lane, extent: Extent) -> None:
        """Have an extent read or written, urgently if a thread waits for it."""
        self._in_flight += 1
        urgent = (lambda: extent.pins > 0) if lane is Lane.READ else lambda: self._n_waiting > 0
        self._executor.submit(lane, extent.n_bytes, partial(self._carry_out, lane, extent), urgent)

    def _carry_out(self, lane: Lane, extent: Extent) -> None:
        error = _attempt(self.nvme.read if lane is Lane.READ else self.nvme.write, extent)
        with self._changed:
            if error is None:
                extent.stored = True
                self.cache.move(extent, CLEAN, "ready")
            elif lane is Lane.READ:
                extent.error = error
                self.cache.leave(extent, "fail")
            else:
                self._failures, self._failure = self._failures + 1, error
                self.cache.move(extent, DIRTY, "fail")
                self.cache.touch(extent)  # try others first
            self._in_flight -= 1
            if error is None or lane is Lane.READ:  # else a full disk would be tried for ever
                self._pump()
            self._tell_waiters()

    def _tell(self, error: BaseException) -> BaseException:
        self.told = True
        return afresh(error)

    def _too_small(self, n_bytes: int) -> BudgetError:
        pinned = sum(extent.n_bytes for extent in self.cache.resident if extent.pins)
        return BudgetError(
            f"{format_bytes(n_bytes)} of homes on disk are needed in memory at once; of"
            f" {format_bytes(self.n_bytes)} set aside for them {format_bytes(pinned)} are pinned",
            advice=f"raise host= by {format_bytes(n_bytes + pinned - self.n_bytes)} or more",
            moves=self.cache.table.moves(),
            tier="HOST",
            needed_bytes=n_bytes + pinned,
        )


def _attempt(act: Callable[[DiskSlot, memoryview], None], extent: Extent) -> BaseException | None:
    try:
        act(extent.slot, extent.view)
    except BaseException as error:
        return error
    return None


def _watch_forks(pool: weakref.ref[Pool]) -> None:
    """Finish transfers into private memory before any fork (open(2), NOTES)."""
    held: list[Pool] = []

    def before() -> None:
        found = pool()
        if found is not None and found._owner.is_here:
            found._changed.acquire()  # with no transfer under way, until after the fork
            found.drain()
            held.append(found)

    def after() -> None:
        while held:
            held.pop()._changed.release()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=before, after_in_parent=after, after_in_child=after)


def open_pool(
    folders: Sequence[Folder],
    disk_bytes: int,
    *,
    pool_bytes: int,
    extent_numel: int,
    ledger: Ledger,
    log: EventLog,
    n_threads: int | None = None,
    checked: bool = True,
) -> Pool:
    """Return a pool over private files of ``disk_bytes`` in ``folders``; raises DiskFull.
    ``n_threads`` None: measured, if enough is spilled to be worth the time."""
    for folder in folders:
        need, free = align_up(disk_bytes // len(folders)), folder.space()
        if need > free:
            raise DiskFull(
                f"{format_bytes(need)} go to {folder.path}; {format_bytes(free)} are free there,"
                f" {need - free} bytes short",
                advice="free some space, name more directories in nvme=, or raise host=",
                path=folder.path,
                op="reserve",
                wanted=need,
                got=free,
            )
    nvme = Nvme(folders, disk_bytes, ledger=ledger, log=log, checked=checked)
    if n_threads is None:
        n_threads = N_THREADS
        if disk_bytes >= TRY_FROM_BYTES:
            n_threads = nvme.fastest(align_up(min(4 * extent_numel, pool_bytes // 8)))
    return Pool(nvme, pool_bytes, extent_numel=extent_numel, n_threads=n_threads)

"""The pool: HOST memory for homes that lie on disk (floor 1, mechanism).

[Note: addresses stay]  A home on disk has its whole range of addresses for life, and memory only
where an extent is resident: an extent is read into its place, and its pages are given back when it
is evicted. Views of such a home are therefore always there, and mean something only inside `pin`.
(The technique is vmcache's: Leis et al., SIGMOD 2023.)

An *extent* is a fixed number of elements of a bucket's index space, for every kind the same, so
that an update pins the same run of all of them. What one thread needs is pinned at once or not at
all; only the thread that launches work may pin more while it holds some: nobody waits in a circle.

Dirty extents are written before their room is needed, the least recently used first, and announced
ones are read before they are pinned. Write-behind and read-ahead pause while any thread waits for
memory. What is announced for later is read while nothing else is, and gives way to every pin.

A read that fails leaves an extent ABSENT, a write that fails leaves it DIRTY: nothing is lost, the
error goes to the thread that needs the bytes or the room, and the next who asks tries again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import NamedTuple, Protocol

from hetero import interrupts
from hetero.config import paranoid
from hetero.device import HUGE_PAGE, POISON, Slab
from hetero.errors import BudgetError, DiskFull, ForkedProcessError, StateError, afresh
from hetero.events import EventLog
from hetero.io import Folder, align_up
from hetero.memory.chunk import CopyTable
from hetero.memory.ledger import Ledger
from hetero.memory.nvme import Executor, Nvme, Slot, Threads
from hetero.types import CopyState, Kind, Tier, format_bytes

STALL_SECONDS = 600.0  # without anything happening, while a thread waits for room that others hold
N_THREADS = 4  # transfers at once, where little is spilled
TRY_FROM_BYTES = 2**30  # so much is spilled that the drive is asked how many are best
AHEAD_SHARE = 3  # this part of the pool is kept for what is read ahead
DIRTY_SHARE = 3  # more than this part does not wait to be written
FORGET_AFTER = 2  # what is read ahead and not used while the pool is filled so often
ABSENT, FILLING, CLEAN, DIRTY, FLUSHING = CopyState


class Use(IntEnum):
    """What a pinned span is for."""

    READ = 0
    WRITE = 1
    FRESH = 2
    """Every element is going to be written: what was there is not read."""


class Extent:
    """One run of a home: its memory, its slot, who uses it."""

    __slots__ = (
        *("blank", "error", "id", "mapping", "n_bytes", "page", "pins", "slot", "stored"),
        *("used_at", "view"),
    )

    def __init__(
        self, id: int, mapping: mmap.mmap | None, page: int, n_bytes: int, slot: Slot
    ) -> None:
        self.id = id
        self.mapping = mapping
        self.page = page  # first byte in its mapping
        self.n_bytes = n_bytes
        self.view = memoryview(b"" if mapping is None else mapping)[page : page + n_bytes]
        self.slot = slot
        self.stored = False  # whether the slot has what an ABSENT extent reads; zeros otherwise
        self.blank = False  # whether what it is to hold is still being written by who pinned it
        self.pins = 0
        self.used_at = 0
        self.error: BaseException | None = None


class Extents:
    """The extents of one home, in order."""

    __slots__ = ("_numel", "_size", "all")

    def __init__(self, extents: list[Extent], size: int, numel: int) -> None:
        self.all = extents
        self._size = size
        self._numel = numel

    def needs(self, start: int, end: int, use: Use) -> Iterator[tuple[Extent, Use]]:
        """Yield the extents that elements [start, end) touch, and what each is needed for."""
        if end <= start:
            return
        for at in range(start // self._size, (end - 1) // self._size + 1):
            first, last = at * self._size, min((at + 1) * self._size, self._numel)
            part = use is Use.FRESH and not (start <= first and last <= end)
            yield self.all[at], Use.WRITE if part else use


class Spilled(Protocol):
    """A home, as the pool sees it; ``extents`` is None for one that is on HOST."""

    @property
    def extents(self) -> Extents | None:
        """Its extents, where it lies on disk."""


class Span(NamedTuple):
    """Elements [start, end) of a home."""

    home: Spilled
    start: int
    end: int
    use: Use = Use.READ


class Request:
    """Spans that are pinned together, and may be announced before."""

    __slots__ = ("asked_at", "n_bytes", "needs")

    def __init__(self, spans: Iterable[Span]) -> None:
        self.needs: dict[Extent, Use] = {}
        self.asked_at = 0
        for span in spans:
            if span.home.extents is not None:
                for extent, use in span.home.extents.needs(span.start, span.end, span.use):
                    self.needs[extent] = use if self.needs.get(extent, use) is use else Use.WRITE
        self.n_bytes = sum(extent.n_bytes for extent in self.needs)

    def again(self) -> Request:
        """Return what the same work needs the next time, without what it only reads: that is new
        then."""
        request = Request(())
        changed = (extent for extent, use in self.needs.items() if use is not Use.READ)
        request.needs = dict.fromkeys(changed, Use.WRITE)
        request.n_bytes = sum(extent.n_bytes for extent in request.needs)
        return request


class Window:
    """What was announced, and the extents that are kept in memory for the first of it."""

    __slots__ = ("_kept", "kept_bytes", "n_bytes", "requests")

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.requests: deque[Request] = deque()
        self.kept_bytes = 0
        self._kept: OrderedDict[Extent, int] = OrderedDict()  # since when

    def __contains__(self, extent: object) -> bool:
        return extent in self._kept

    def keep(self, extent: Extent, now: int) -> None:
        """Keep an extent that is in memory, or will be, until it is used."""
        if extent not in self._kept:
            self._kept[extent] = now
            self.kept_bytes += extent.n_bytes

    def let_go(self, extent: Extent) -> None:
        """Keep an extent no longer, where it was kept."""
        if self._kept.pop(extent, None) is not None:
            self.kept_bytes -= extent.n_bytes

    def let_go_before(self, then: int) -> None:
        """Give up what has been kept for too long: nobody came for it."""
        while self._kept:
            extent, since = next(iter(self._kept.items()))
            if since >= then:
                return
            self.let_go(extent)

    def let_go_last(self) -> bool:
        """Give up what would be used last; False where nothing is kept."""
        if not self._kept:
            return False
        self.let_go(next(reversed(self._kept)))
        return True


class Pool:
    """Memory of ``n_bytes`` that extents share.

    Args:
        extent_numel: elements of an extent, a multiple of 4096.
        executor: runs transfers; None: threads of its own, ``n_threads`` of them.
    """

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
        self.table = CopyTable(0, home=Tier.NVME, what="extent")
        self.peak = 0
        self._bytes = dict.fromkeys(CopyState, 0)  # of the extents in each state
        self._window = Window(n_bytes // AHEAD_SHARE)
        self._later = Window(n_bytes // AHEAD_SHARE)
        self._executor = executor or Threads(n_threads)
        self._changed: threading.Condition = threading.Condition()
        self._resident: OrderedDict[Extent, None] = OrderedDict()  # least recently used first
        self._clock = 0  # moves with every pin, and with every byte that is brought in
        self._in_flight = 0
        self._holders: Counter[int] = Counter()  # threads, and how many requests each has pinned
        self._n_waiting = 0  # threads that wait for room
        self._n_changes = 0  # of which they were told
        self._failures = 0  # of writes
        self._failure: BaseException | None = None  # the last one, for whoever needs the room
        self.told = False  # whether a drive's error was raised, since an owner last asked
        self._pid = os.getpid()
        self._paranoid = paranoid()
        _watch_forks(weakref.ref(self))

    @property
    def used(self) -> int:
        """Bytes of the extents that have memory now."""
        return sum(self._bytes.values()) - self._bytes[ABSENT]

    def adopt(self, kind: Kind, slab: Slab, n_bytes: int, itemsize: int, what: str) -> Extents:
        """Cut a home's memory into extents, each with a slot on disk."""
        size, extents = self.extent_numel * itemsize, []
        first = self._first_page(slab, size, n_bytes, what)
        with self._changed:
            for start in range(0, n_bytes, size):
                length = align_up(min(size, n_bytes - start))
                slot = self.nvme.slot(kind, length, what)
                id = self.table.extend(1)
                extents.append(Extent(id, slab.mapping, first + start, length, slot))
                self._bytes[ABSENT] += length
        return Extents(extents, self.extent_numel, n_bytes // itemsize)

    def _first_page(self, slab: Slab, size_bytes: int, n_bytes: int, what: str) -> int:
        """Return where a home begins in its mapping, and ask for pages that suit its extents."""
        mapping = slab.mapping
        if mapping is None:
            raise BudgetError(f"{what} lies on the device, which has no way to disk")
        first = slab.block.data_ptr() - ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        whole = slab.block.data_ptr() % HUGE_PAGE == 0 and size_bytes % HUGE_PAGE == 0
        _ask_for_pages(mapping, first, n_bytes, n_bytes // HUGE_PAGE * HUGE_PAGE if whole else 0)
        return first

    # -- pins ------------------------------------------------------------------------------------

    @contextmanager
    def pin(self, request: Request) -> Iterator[None]:
        """Hold the spans of a request in memory for the length of a block.

        Raises StorageError where a read failed, or where room cannot be made because writes fail;
        BudgetError where the pool is too small. Nothing is held then. What a block that raises has
        left of a FRESH span is given up for what was there before, where that is still on disk.
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
            return not any(
                self._state(e) is FILLING or (self._is_unread(e) and use is not Use.FRESH)
                for e, use in request.needs.items()
            )

    def ahead(self, requests: Iterable[Request]) -> None:
        """Announce requests in the order in which they will be pinned; they are read ahead."""
        self._refuse_fork()
        with self._changed:
            for request in requests:
                request.asked_at = self._clock
                self._window.requests.append(request)
            self._pump()

    def later(self, requests: Iterable[Request]) -> None:
        """Announce what will be pinned once other work is done, in place of what was so before.

        It is read while nothing is left to read ahead, and given up, the last of it first, as soon
        as a pin needs its room. A forked process, which must not read, announces nothing.
        """
        if self._pid != os.getpid():
            return
        with self._changed:
            self._later.requests.clear()
            for request in requests:
                request.asked_at = self._clock
                self._later.requests.append(request)
            self._pump()

    def forget_ahead(self) -> None:
        """Nothing that was announced is needed any more."""
        with self._changed:
            for window in (self._window, self._later):
                window.requests.clear()
                while window.let_go_last():
                    pass
            self._tell_waiters()

    def discard(self, extents: Extents) -> None:
        """Let a home's content go, in memory and on disk; it reads as zeros from now on."""
        self._refuse_fork()
        with self._changed:
            moving = (FILLING, FLUSHING)
            self._wait(lambda: not any(self._state(e) in moving for e in extents.all))
            if any(extent.pins for extent in extents.all):
                raise StateError("a home on disk was discarded while it is pinned")
            for extent in extents.all:
                extent.stored = False
                if self._state(extent) is not ABSENT:
                    self._leave(extent, "discard")
            self._pump()
            self._tell_waiters()

    def drain(self) -> None:
        """Return when no transfer is under way; what was announced is forgotten."""
        if self._pid != os.getpid():
            return
        with self._changed:
            self._window.requests.clear()
            self._later.requests.clear()
            self._wait(lambda: not self._in_flight)

    def close(self) -> None:
        """Finish transfers and let the files go; what is in memory is gone with them."""
        if self._pid == os.getpid():
            self.drain()
            self._executor.close()
            self.nvme.close()

    # -- inside, under the lock ------------------------------------------------------------------

    def _take(self, request: Request, me: int) -> bool:
        """Pin a request; False, and nothing is pinned, where a read that was begun ahead failed.

        A failed read-ahead is not reported: the caller retries the read.
        """
        self._refuse_fork()
        with self._changed:
            # 1. wait until none of them is on its way down, and there is room for what is missing
            if not self._has_room(request):
                with self.nvme.log.standing("write"):
                    self._wait_for_room(request, me)
            # 2. hold them, and begin to read
            self._clock += 1
            self._holders[me] += 1
            for extent in request.needs:
                extent.pins += 1
                extent.used_at = self._clock
                self._let_go(extent)
            try:
                ahead = {e for e in request.needs if self._state(e) is FILLING}
                for extent, use in request.needs.items():
                    if self._state(extent) is ABSENT:
                        self._bring(extent, use)
                # 3. wait for what is read
                if any(self._state(extent) is FILLING for extent in request.needs):
                    with self.nvme.log.standing("read"):
                        self._wait_for_reads(request)
                failed = [e for e in request.needs if self._state(e) is ABSENT]
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

    def _wait(self, happened: Callable[[], bool], seconds: float | None = None) -> bool:
        return interrupts.wait(self._changed, happened, seconds)

    def _wait_for_reads(self, request: Request) -> None:
        self._wait(lambda: not any(self._state(extent) is FILLING for extent in request.needs))

    def _tell_waiters(self) -> None:
        self._n_changes += 1
        self._changed.notify_all()

    def _give_back(self, request: Request, me: int, *, whole: bool) -> None:
        if self._pid != os.getpid():
            return
        with self._changed:
            for extent, use in request.needs.items():
                if use is Use.FRESH and whole:
                    extent.blank = False
                if use is not Use.READ and not extent.blank:
                    self._move(extent, DIRTY, "write")
            self._unpin(request, me)

    def _unpin(self, request: Request, me: int) -> None:
        self._holders[me] -= 1
        self._holders += Counter()  # without those who hold nothing
        for extent in request.needs:
            extent.pins -= 1
            if extent in self._resident:
                self._resident.move_to_end(extent)
            if extent.blank and not extent.pins:
                self._leave(extent, "discard")  # never written whole: the old content stands
        self._pump()
        self._tell_waiters()

    def _let_go(self, extent: Extent) -> None:
        self._window.let_go(extent)
        self._later.let_go(extent)

    def _is_kept(self, extent: Extent) -> bool:
        return extent in self._window or extent in self._later

    def _state(self, extent: Extent) -> CopyState:
        return self.table.state(extent.id, Tier.HOST)

    def _is_unread(self, extent: Extent) -> bool:
        return extent.stored and self._state(extent) is ABSENT

    def _move(self, extent: Extent, state: CopyState, why: str) -> None:
        old = self._state(extent)
        self.table.transition(extent.id, Tier.HOST, state, why)
        self._bytes[old] -= extent.n_bytes
        self._bytes[state] += extent.n_bytes

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
            if use is not Use.READ and self._state(extent) is FLUSHING:
                return False  # it must not change while it is written
        while not self._evict(self._missing(request), request.needs):
            self._later.requests.clear()  # what would be read now would be given up again
            if not self._later.let_go_last():
                return False
        return True

    def _missing(self, request: Request) -> int:
        return sum(e.n_bytes for e in request.needs if self._state(e) is ABSENT)

    def _make_room(self, request: Request, me: int, *, failed: bool) -> None:
        """Do something for a request that has no room, or wait until somebody has."""
        # 1. write what is least recently used; nothing more once a write has failed
        if not failed:
            self._flush(self._short(self._missing(request)), request.needs)
        # 2. where nothing is on its way down, what is read ahead makes room, the last of it first
        if not self._bytes[FLUSHING] and (failed or not self._in_flight):
            if self._window.let_go_last():
                return
            if failed and self._failure is not None:
                raise self._tell(self._failure)
            if self._holders.keys() == {me}:
                raise self._too_small(request.n_bytes)
        # 3. wait for those who hold some
        seen = self._n_changes
        changed = self._wait(lambda: self._n_changes != seen, STALL_SECONDS)
        if not changed and not self._in_flight:
            raise self._too_small(request.n_bytes)

    def _short(self, n_bytes: int) -> int:
        """Return what is missing of so much room, when everything is written that is begun."""
        return n_bytes - (self.n_bytes - self.used) - self._bytes[FLUSHING]

    def _loose(self, state: CopyState, keep: Container[Extent]) -> Iterator[Extent]:
        """Yield extents in a state that no thread holds or waits for, least recently used first."""
        for extent in self._resident:
            held = extent.pins or extent in keep or self._is_kept(extent)
            if self._state(extent) is state and not held:
                yield extent

    def _evict(self, n_bytes: int, keep: Container[Extent]) -> bool:
        """Give up clean extents until ``n_bytes`` are free; none where that is not enough."""
        short = n_bytes - (self.n_bytes - self.used)
        leaving = _enough(self._loose(CLEAN, keep), short)
        if sum(extent.n_bytes for extent in leaving) < short:
            return False
        for extent in leaving:
            self._leave(extent, "evict")
        return True

    def _flush(self, n_bytes: int, keep: Container[Extent] = ()) -> None:
        """Begin to write ``n_bytes`` of dirty extents, or what there is."""
        for extent in _enough(self._loose(DIRTY, keep), n_bytes):
            self._move(extent, FLUSHING, "flush")
            self._in_flight += 1
            self._begin_write(extent)

    def _leave(self, extent: Extent, why: str) -> None:
        """Give an extent's memory back."""
        self._move(extent, ABSENT, why)
        del self._resident[extent]
        self._let_go(extent)
        extent.blank = False
        if self._paranoid:  # who reads it without a pin reads NaN
            extent.view[:] = bytes([POISON]) * extent.n_bytes
        elif extent.mapping is not None:
            extent.mapping.madvise(mmap.MADV_DONTNEED, extent.page, extent.n_bytes)

    def _bring(self, extent: Extent, use: Use) -> None:
        """Give an extent memory, and its content where the user looks at that."""
        self._move(extent, FILLING, "fetch")
        self._resident[extent] = None
        self.peak = max(self.peak, self.used)
        self._clock += extent.n_bytes
        extent.error = None
        extent.blank = use is Use.FRESH
        if extent.stored and not extent.blank:
            self._in_flight += 1
            self._begin_read(extent)
            return
        if self._paranoid and not extent.blank:
            extent.view[:] = bytes(extent.n_bytes)
        self._move(extent, CLEAN, "ready")

    # -- ahead of need ---------------------------------------------------------------------------

    def _pump(self) -> None:
        """Write dirty extents, and read ahead within the window; threads that wait come first."""
        if self._n_waiting:
            return
        self._flush(self._bytes[DIRTY] - self.n_bytes // DIRTY_SHARE)
        self._window.let_go_before(self._clock - FORGET_AFTER * self.n_bytes)
        if self._read_ahead(self._window):
            self._read_ahead(self._later)

    def _read_ahead(self, window: Window) -> bool:
        """Begin to read what a window has room for; whether that is all that was announced."""
        while window.requests:
            request = window.requests[0]
            coming = [e for e, use in request.needs.items() if self._is_due(e, use, request)]
            if request.n_bytes > self.n_bytes or not coming:
                window.requests.popleft()
                continue
            n_bytes = sum(extent.n_bytes for extent in coming)
            if window.kept_bytes and window.kept_bytes + n_bytes > window.n_bytes:
                return False
            missing = sum(e.n_bytes for e in coming if self._state(e) is ABSENT)
            if not self._evict(missing, request.needs):
                self._flush(self._short(missing), request.needs)
                return False
            window.requests.popleft()
            for extent in coming:
                window.keep(extent, self._clock)
                if self._state(extent) is ABSENT:
                    self._bring(extent, Use.READ)
        return True

    def _is_due(self, extent: Extent, use: Use, request: Request) -> bool:
        """Whether an extent is to be in memory for a request, and nothing sees to that yet."""
        if use is Use.FRESH or self._is_kept(extent) or extent.used_at > request.asked_at:
            return False  # pinned since it was announced: that may have been this very use
        return extent.stored or self._state(extent) is not ABSENT

    # -- transfers, on their own threads ---------------------------------------------------------

    def _begin_read(self, extent: Extent) -> None:
        self._executor.submit(partial(self._read, extent), lambda: extent.pins > 0)

    def _begin_write(self, extent: Extent) -> None:
        self._executor.submit(partial(self._write, extent), lambda: self._n_waiting > 0)

    def _read(self, extent: Extent) -> None:
        error = _attempt(self.nvme.read, extent)
        with self._changed:
            extent.error = error
            if error is None:
                self._move(extent, CLEAN, "ready")
            else:
                self._leave(extent, "fail")
            self._landed()

    def _write(self, extent: Extent) -> None:
        error = _attempt(self.nvme.write, extent)
        with self._changed:
            if error is None:
                extent.stored = True
                self._move(extent, CLEAN, "ready")
            else:
                self._failures, self._failure = self._failures + 1, error
                self._move(extent, DIRTY, "fail")
                self._resident.move_to_end(extent)  # others are tried before it is tried again
            self._landed(failed=error is not None)

    def _landed(self, *, failed: bool = False) -> None:
        self._in_flight -= 1
        if not failed:  # or a disk that is full would be asked again at once, for ever
            self._pump()
        self._tell_waiters()

    def _tell(self, error: BaseException) -> BaseException:
        self.told = True
        return afresh(error)

    def _too_small(self, n_bytes: int) -> BudgetError:
        pinned = sum(extent.n_bytes for extent in self._resident if extent.pins)
        return BudgetError(
            f"{format_bytes(n_bytes)} of homes on disk are needed in memory at once; of"
            f" {format_bytes(self.n_bytes)} set aside for them {format_bytes(pinned)} are pinned",
            advice=f"raise host= by {format_bytes(n_bytes + pinned - self.n_bytes)} or more",
            moves=self.table.moves(),
            tier="HOST",
            needed_bytes=n_bytes + pinned,
        )

    def _refuse_fork(self) -> None:
        if self._pid != os.getpid():
            raise ForkedProcessError(
                "a forked process uses homes on disk, which belong to its parent",
                advice="start it with the 'spawn' method, and pass values, not the model",
            )

    def _stand_still(self) -> None:
        """Take the lock, with no transfer under way, until `_go_on`."""
        self._changed.acquire()
        self.drain()

    def _go_on(self) -> None:
        self._changed.release()


def _attempt(act: Callable[[Slot, memoryview], None], extent: Extent) -> BaseException | None:
    try:
        act(extent.slot, extent.view)
    except BaseException as error:
        return error
    return None


def _enough(extents: Iterator[Extent], n_bytes: int) -> list[Extent]:
    """Return the first extents that have ``n_bytes`` together, or all."""
    found = []
    while n_bytes > 0 and (extent := next(extents, None)) is not None:
        found.append(extent)
        n_bytes -= extent.n_bytes
    return found


def _ask_for_pages(mapping: mmap.mmap, first: int, n_bytes: int, huge_bytes: int) -> None:
    """Ask for huge pages at the beginning of a home, and for small ones after them.

    A huge page that is a part of one extent only makes transfers of few long runs (measured: twice
    as fast) and is cheap to give back; one of two extents would stay when one of them goes.
    """
    try:
        if huge_bytes:
            mapping.madvise(mmap.MADV_HUGEPAGE, first, huge_bytes)
        if huge_bytes < n_bytes:
            rest = align_up(n_bytes) - huge_bytes
            mapping.madvise(mmap.MADV_NOHUGEPAGE, first + huge_bytes, rest)
    except (OSError, AttributeError):  # a kernel built without them
        pass


def _watch_forks(pool: weakref.ref[Pool]) -> None:
    """Let no transfer into private memory be under way in a fork (open(2), NOTES)."""
    held: list[Pool] = []

    def before() -> None:
        found = pool()
        if found is not None and found._pid == os.getpid():
            found._stand_still()
            held.append(found)

    def after() -> None:
        while held:
            held.pop()._go_on()

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

    ``n_threads`` None: the drive is asked, where so much goes to it that this is worth the time.
    """
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

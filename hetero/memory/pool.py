"""The pool: HOST memory for homes that lie on disk (floor 1, mechanism).

[Note: addresses stay]  A home on disk has its whole range of addresses for life, and memory only
where an extent is resident: an extent is read into its place, and its pages are given back when it
is evicted. Views of such a home are therefore always there, and mean something only inside `pin`.
(The technique is vmcache's: Leis et al., SIGMOD 2023.)

An *extent* is a fixed number of elements of a bucket's index space, for every kind the same, so
that an update pins the same run of all of them. What one thread needs is pinned at once or not at
all; only the thread that launches work may pin more while it holds some: nobody waits in a circle.

A read that fails leaves an extent ABSENT, a write that fails leaves it DIRTY: nothing is lost, the
error goes to whoever needs the bytes or the room, and the next who asks tries again.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from enum import IntEnum
from typing import NamedTuple, Protocol

from hetero.config import paranoid
from hetero.device import POISON, Slab
from hetero.errors import BudgetError, DiskFull, ForkedProcessError
from hetero.events import EventLog
from hetero.io import Folder, align_up
from hetero.memory.chunk import CopyTable
from hetero.memory.ledger import Ledger
from hetero.memory.nvme import Nvme, Slot
from hetero.types import CopyState, Kind, Tier, format_bytes

STALL_SECONDS = 60.0  # without anything happening, while somebody waits for room
N_THREADS = 4  # transfers at once
AHEAD_SHARE = 3  # this part of the pool is kept for what is read ahead


class Use(IntEnum):
    """What a pinned span is for."""

    READ = 0
    WRITE = 1
    FRESH = 2
    """Every element is going to be written: what was there is not read."""


class Extent:
    """One run of a home: its memory, its slot, who uses it."""

    __slots__ = ("error", "id", "n_bytes", "page", "pins", "slot", "stored", "view", "wanted")

    def __init__(self, id: int, view: memoryview, page: int, slot: Slot) -> None:
        self.id = id
        self.view = view
        self.page = page  # first byte in its mapping
        self.n_bytes = len(view)
        self.slot = slot
        self.stored = False  # whether the slot has what an ABSENT extent reads; zeros otherwise
        self.pins = 0
        self.wanted = False  # read ahead, and not used yet
        self.error: BaseException | None = None


class Extents:
    """The extents of one home, in order."""

    __slots__ = ("_numel", "_size", "all", "mapping")

    def __init__(self, mapping: mmap.mmap, extents: list[Extent], size: int, numel: int) -> None:
        self.mapping = mapping
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

    __slots__ = ("home_of", "needs", "started")

    def __init__(self, spans: Iterable[Span]) -> None:
        self.needs: dict[Extent, Use] = {}
        self.home_of: dict[Extent, Extents] = {}
        self.started = False
        for span in spans:
            extents = span.home.extents
            if extents is None:
                continue
            for extent, use in extents.needs(span.start, span.end, span.use):
                self.needs[extent] = use if self.needs.get(extent, use) is use else Use.WRITE
                self.home_of[extent] = extents


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
        self.used = 0
        self.peak = 0
        self._window = n_bytes // AHEAD_SHARE
        self._executor = executor or ThreadPoolExecutor(n_threads, "hetero-io")
        self._changed = threading.Condition()
        self._resident: OrderedDict[Extent, Extents] = OrderedDict()  # least recently used first
        self._ahead: deque[Request] = deque()
        self._in_flight = 0
        self._failures = 0  # of writes
        self._failure: BaseException | None = None  # the last one, for whoever needs the room
        self._pid = os.getpid()
        self._paranoid = paranoid()
        if hasattr(os, "register_at_fork"):
            # A fork must not find a transfer into private memory under way (open(2), NOTES).
            os.register_at_fork(before=_before_fork(weakref.ref(self)))

    def adopt(self, kind: Kind, slab: Slab, n_bytes: int, itemsize: int, what: str) -> Extents:
        """Cut a home's memory into extents, each with a slot on disk."""
        if slab.mapping is None:
            raise BudgetError(f"{what} lies on the device, which has no way to disk")
        size = self.extent_numel * itemsize
        view = memoryview(slab.mapping)
        extents = []
        for start in range(0, n_bytes, size):
            end = align_up(min(start + size, n_bytes))
            slot = self.nvme.slot(kind, end - start, what)
            extents.append(Extent(self.table.extend(1), view[start:end], start, slot))
        return Extents(slab.mapping, extents, self.extent_numel, n_bytes // itemsize)

    # -- pins ------------------------------------------------------------------------------------

    @contextmanager
    def pin(self, request: Request) -> Iterator[None]:
        """Hold the spans of a request in memory for the length of a block.

        Raises StorageError where a read failed, or where room cannot be made because writes fail;
        BudgetError where the pool is too small. Nothing is held then.
        """
        self._take(request)
        try:
            yield
        except BaseException:
            self._give_back(request, whole=False)
            raise
        self._give_back(request, whole=True)

    def ready(self, request: Request) -> bool:
        """Whether `pin` would not wait for a read."""
        with self._changed:
            return not any(
                self._state(e) in (CopyState.ABSENT, CopyState.FILLING) and e.stored
                for e in request.needs
            )

    def ahead(self, requests: Iterable[Request]) -> None:
        """Announce requests in the order in which they will be pinned; they are read ahead."""
        with self._changed:
            self._ahead = deque(r for r in self._ahead if not r.started)
            self._ahead.extend(requests)
            self._pump()

    def forget_ahead(self) -> None:
        """Nothing that was announced is needed any more."""
        with self._changed:
            self._ahead.clear()
            for extent in self._resident:
                extent.wanted = False

    def discard(self, extents: Extents) -> None:
        """Let a home's content go, in memory and on disk; it reads as zeros from now on."""
        with self._changed:
            while any(self._state(e) in _MOVING for e in extents.all):
                self._changed.wait()
            for extent in extents.all:
                extent.stored = False
                if self._state(extent) is not CopyState.ABSENT:
                    self._leave(extent, "discard")
            self._pump()

    def drain(self) -> None:
        """Return when no transfer is under way; none begins meanwhile."""
        with self._changed:
            self._ahead.clear()
            while self._in_flight:
                self._changed.wait()

    def close(self) -> None:
        """Finish transfers and let the files go; what is in memory is gone with them."""
        if self._pid == os.getpid():
            self.drain()
            self._executor.shutdown()
            self.nvme.close()

    # -- inside, under the lock ------------------------------------------------------------------

    def _take(self, request: Request) -> None:
        if self._pid != os.getpid():
            raise ForkedProcessError(
                "a forked process uses homes on disk, which belong to its parent",
                advice="start it with the 'spawn' method, and pass values, not the model",
            )
        needs = request.needs
        with self._changed:
            request.started = True
            n_bytes = sum(extent.n_bytes for extent in needs)
            if n_bytes > self.n_bytes:
                raise self._too_small(n_bytes)
            # 1. wait until none of them is on its way down, and there is room for what is missing
            failures = self._failures
            while not self._has_room(needs):
                self._wait_for_room(n_bytes, failures)
            # 2. hold them, and begin to read
            for extent, use in needs.items():
                extent.pins += 1
                extent.wanted = False
                if self._state(extent) is CopyState.ABSENT:
                    self._bring(extent, request.home_of[extent], read=use is not Use.FRESH)
            # 3. wait for what is read
            while any(self._state(extent) is CopyState.FILLING for extent in needs):
                self._changed.wait()
            failed = [e for e in needs if self._state(e) is CopyState.ABSENT]
            if failed:
                for extent in needs:
                    extent.pins -= 1
                self._changed.notify_all()
                error = failed[0].error
                raise error if error is not None else self._too_small(n_bytes)

    def _give_back(self, request: Request, *, whole: bool) -> None:
        with self._changed:
            for extent, use in request.needs.items():
                extent.pins -= 1
                if not whole and use is Use.FRESH and extent.stored and not extent.pins:
                    self._leave(extent, "discard")  # half written: the old content stands
                    continue
                if use is not Use.READ:
                    self.table.transition(extent.id, Tier.HOST, CopyState.DIRTY, "write")
                self._resident.move_to_end(extent)
            self._pump()
            self._changed.notify_all()

    def _state(self, extent: Extent) -> CopyState:
        return self.table.state(extent.id, Tier.HOST)

    def _has_room(self, needs: dict[Extent, Use]) -> bool:
        states = {extent: self._state(extent) for extent in needs}
        if CopyState.FLUSHING in states.values():
            return False
        missing = sum(e.n_bytes for e, state in states.items() if state is CopyState.ABSENT)
        return self._free(missing, needs) or self._free_wanted(missing, needs)

    def _wait_for_room(self, n_bytes: int, failures: int) -> None:
        if self._failures > failures and self._failure is not None and not self._in_flight:
            raise self._failure
        if not self._changed.wait(STALL_SECONDS):
            raise self._too_small(n_bytes)

    def _free(self, n_bytes: int, keep: dict[Extent, Use]) -> bool:
        """Evict clean extents until ``n_bytes`` are free; begin to flush where that is too few."""
        for extent in list(self._resident):
            if self.n_bytes - self.used >= n_bytes:
                return True
            clean = self._state(extent) is CopyState.CLEAN
            if clean and not extent.pins and not extent.wanted and extent not in keep:
                self._leave(extent, "evict")
        self._flush_until(n_bytes, keep)
        return self.n_bytes - self.used >= n_bytes

    def _flush_until(self, n_bytes: int, keep: dict[Extent, Use]) -> None:
        """Begin to flush until ``n_bytes`` are free, or will be when what is under way is done."""
        states = [(e, self._state(e)) for e in self._resident if not e.pins and e not in keep]
        room = self.n_bytes - self.used
        room += sum(e.n_bytes for e, s in states if s is CopyState.FLUSHING)
        for extent, state in states:
            if room >= n_bytes:
                return
            if state is CopyState.DIRTY:
                self._flush(extent)
                room += extent.n_bytes

    def _free_wanted(self, n_bytes: int, keep: dict[Extent, Use]) -> bool:
        """As `_free`, at the cost of what was read ahead, where nothing else is on its way."""
        if self._in_flight:
            return False
        for extent in self._resident:
            extent.wanted = False
        return self._free(n_bytes, keep)

    def _bring(self, extent: Extent, extents: Extents, *, read: bool) -> None:
        self.used += extent.n_bytes
        self.peak = max(self.peak, self.used)
        self._resident[extent] = extents
        extent.error = None
        self.table.transition(extent.id, Tier.HOST, CopyState.FILLING, "fetch")
        if read and extent.stored:
            self._in_flight += 1
            self._executor.submit(self._read, extent)
            return
        if self._paranoid:
            extent.view[:] = bytes(extent.n_bytes)
        self.table.transition(extent.id, Tier.HOST, CopyState.CLEAN, "ready")

    def _leave(self, extent: Extent, why: str) -> None:
        """Give an extent's memory back."""
        self.table.transition(extent.id, Tier.HOST, CopyState.ABSENT, why)
        extents = self._resident.pop(extent)
        self.used -= extent.n_bytes
        extent.wanted = False
        if self._paranoid:  # who reads it without a pin reads NaN
            extent.view[:] = bytes([POISON]) * extent.n_bytes
        else:
            extents.mapping.madvise(mmap.MADV_DONTNEED, extent.page, extent.n_bytes)

    def _flush(self, extent: Extent) -> None:
        self.table.transition(extent.id, Tier.HOST, CopyState.FLUSHING, "flush")
        self._in_flight += 1
        self._executor.submit(self._write, extent)

    def _pump(self) -> None:
        """Read ahead as far as the window goes, and make the room for it."""
        wanted = sum(extent.n_bytes for extent in self._resident if extent.wanted)
        while self._ahead:
            request = self._ahead[0]
            missing = [
                e
                for e, use in request.needs.items()
                if self._state(e) is CopyState.ABSENT and e.stored and use is not Use.FRESH
            ]
            if request.started or not missing:
                self._ahead.popleft()
                continue
            n_bytes = sum(extent.n_bytes for extent in missing)
            if wanted and wanted + n_bytes > self._window:
                break
            if not self._free(n_bytes, request.needs):
                self._flush_until(self._window - wanted, request.needs)
                break
            for extent in missing:
                self._bring(extent, request.home_of[extent], read=True)
                extent.wanted = True
            wanted += n_bytes
            self._ahead.popleft()

    # -- transfers, on their own threads ---------------------------------------------------------

    def _read(self, extent: Extent) -> None:
        error = self._attempt(self.nvme.read, extent)
        with self._changed:
            extent.error = error
            if error is None:
                self.table.transition(extent.id, Tier.HOST, CopyState.CLEAN, "ready")
            else:
                self._leave(extent, "fail")
            self._landed()

    def _write(self, extent: Extent) -> None:
        error = self._attempt(self.nvme.write, extent)
        with self._changed:
            if error is None:
                extent.stored = True
                self.table.transition(extent.id, Tier.HOST, CopyState.CLEAN, "ready")
            else:
                self._failures, self._failure = self._failures + 1, error
                self.table.transition(extent.id, Tier.HOST, CopyState.DIRTY, "fail")
            self._landed(failed=error is not None)

    def _attempt(
        self, act: Callable[[Slot, memoryview], None], extent: Extent
    ) -> BaseException | None:
        try:
            act(extent.slot, extent.view)
        except BaseException as error:
            return error
        return None

    def _landed(self, *, failed: bool = False) -> None:
        self._in_flight -= 1
        if not failed:  # or a disk that is full would be asked again at once, for ever
            self._pump()
        self._changed.notify_all()

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


_MOVING = (CopyState.FILLING, CopyState.FLUSHING)


def _before_fork(pool: weakref.ref[Pool]) -> Callable[[], None]:
    def settle() -> None:
        found = pool()
        if found is not None and found._pid == os.getpid():
            found.drain()

    return settle


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
    """Return a pool over private files of ``disk_bytes`` in ``folders``; raises DiskFull."""
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
    return Pool(nvme, pool_bytes, extent_numel=extent_numel, n_threads=n_threads or N_THREADS)

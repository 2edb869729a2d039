"""The NVME tier: slots in private files, checked on every way back (floor 1, mechanism).

The files vanish with the process, so nothing is synced. A slot's bytes are read back as they were
written last, or not at all: a CRC-32, seeded with the slot's number and the generation of its
content and kept in RAM, refuses older content and a neighbour's.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from hetero import interrupts
from hetero.crc import crc32
from hetero.errors import ChunkCorrupt
from hetero.events import EventLog, What, go_behind
from hetero.io import File, Folder, align_up, aligned_buffer
from hetero.memory.ledger import Ledger
from hetero.types import Kind, Lane, Tier, format_bytes

TRIED = (1, 2, 4, 8)  # parallel transfers for each drive
TRIAL_SECONDS = 0.08
NEARLY = 0.9  # of the best rate is good enough, with fewer threads
NS = 10**9

Work = Callable[[], None]
Urgent = Callable[[], bool]


class DiskSlot:
    """A run of one file that holds one extent; ``generation`` 0: never written."""

    __slots__ = ("digest", "file", "generation", "kind", "n_bytes", "number", "offset")

    def __init__(
        self, number: int, file: File, offset: int, n_bytes: int, kind: Kind = Kind.POOL
    ) -> None:
        self.kind = kind
        self.number = number
        self.file = file
        self.offset = offset
        self.n_bytes = n_bytes
        self.generation = 0
        self.digest = 0


class Nvme:
    """Private files, one in each directory, and the slots that lie in them in turn.

    Args:
        folders: directories, best on different drives.
        n_bytes: reserved now, in total; DiskFull if there is less.
        ledger: charged as slots are taken.
        checked: whether digests are made and compared (benchmarks measure their cost).
    """

    def __init__(
        self,
        folders: Sequence[Folder],
        n_bytes: int,
        *,
        ledger: Ledger,
        log: EventLog,
        checked: bool = True,
    ) -> None:
        self._moved: Counter[Lane] = Counter()
        self._busy: Counter[Lane] = Counter()  # nanoseconds since the last `take_counts`
        self._ended: dict[Lane, float] = {}  # when the last transfer did
        self.pace: dict[Lane, float] = {}
        """Seconds a byte, between the last two calls of `take_counts` in which there was any."""
        self.written_bytes = 0  # since the beginning, to watch a drive's endurance
        self._checked = checked
        self._ledger = ledger
        self.log = log
        self._files = [folder.private() for folder in folders]
        self._ends = [0] * len(self._files)
        self._n_slots = 0
        self._lock = threading.Lock()
        self._each_bytes = align_up(-(-n_bytes // len(folders)))
        for file in self._files:
            file.reserve(self._each_bytes)

    def slot(self, kind: Kind, n_bytes: int, what: str) -> DiskSlot:
        """Return the next slot, of ``n_bytes`` rounded up to whole blocks. Raises BudgetError or
        DiskFull if there is no room; nothing has changed then."""
        size = align_up(n_bytes)
        at = min(range(len(self._files)), key=lambda i: self._ends[i])
        offset, end = self._ends[at], self._ends[at] + size
        self._ledger.charge(Tier.NVME, kind, size, what)
        if end > self._each_bytes:
            try:
                self._files[at].reserve(end)
            except BaseException:
                self._ledger.credit(Tier.NVME, kind, size)
                raise
        self._ends[at] = end
        self._n_slots += 1
        return DiskSlot(self._n_slots, self._files[at], offset, size, kind)

    def read(self, slot: DiskSlot, into: memoryview) -> None:
        """Fill ``into`` with a slot's content; ChunkCorrupt if it is not as written."""
        began = self.log.clock()
        slot.file.read(slot.offset, into)
        if self._checked and _crc(into, slot.number, slot.generation) != slot.digest:
            raise ChunkCorrupt(
                f"slot {slot.number} ({format_bytes(slot.n_bytes)} at byte {slot.offset} of a file"
                f" in {slot.file.path}) is not generation {slot.generation} as it was written",
                advice="the drive lost, misplaced or damaged a write: check its health, and"
                " resume from the last checkpoint on another directory",
                path=slot.file.path,
                op="read",
                offset=slot.offset,
                wanted=slot.n_bytes,
                got=slot.n_bytes,
            )
        self._count(Lane.READ, slot, began, self.log.clock())

    def write(self, slot: DiskSlot, data: memoryview) -> None:
        """Make ``data`` a slot's content. A failed write leaves none: the caller keeps ``data``."""
        generation, began = slot.generation + 1, self.log.clock()
        digest = _crc(data, slot.number, generation) if self._checked else 0
        slot.file.write(slot.offset, data)
        slot.generation, slot.digest = generation, digest
        self._count(Lane.WRITE, slot, began, self.log.clock())

    def take_counts(self) -> Counter[Lane]:
        """Return the bytes moved since the last call."""
        with self._lock:
            moved, self._moved = self._moved, Counter()
            busy, self._busy = self._busy, Counter()
        self.pace.update({lane: busy[lane] / NS / n_bytes for lane, n_bytes in moved.items()})
        return moved

    def _count(self, lane: Lane, slot: DiskSlot, began: float, ended: float) -> None:
        n_bytes = slot.n_bytes
        with self._lock:
            self._moved[lane] += n_bytes
            since = max(began, self._ended.get(lane, began))  # several are under way at once
            self._busy[lane] += max(0, round(NS * (ended - since)))
            self._ended[lane] = max(ended, since)
            if lane is Lane.WRITE:
                self.written_bytes += n_bytes
        if slot.number:  # and not a trial
            span = began, ended
            self.log.add(What.MOVE, *span, lane=lane, n_bytes=n_bytes, category=slot.kind)

    def fastest(self, block_bytes: int) -> int:
        """Measure, in half a second, how many threads move blocks fastest, checks included. It
        overwrites the place of slots: call it before there are any."""
        n_files = len(self._files)
        room = n_files * max(1, self._each_bytes // block_bytes)
        counts = [n * n_files for n in TRIED if n * n_files <= room] or [1]
        blocks = []
        for number in range(counts[-1]):
            file, offset = self._files[number % n_files], number // n_files * block_bytes
            blocks.append((DiskSlot(0, file, offset, block_bytes), aligned_buffer(block_bytes)))
            self.write(*blocks[-1])  # blocks never written are read without the drive
        rates = {n: self._rate(blocks[:n]) for n in counts}
        self.take_counts()
        return fewest(rates)

    def _rate(self, blocks: Sequence[tuple[DiskSlot, memoryview]]) -> float:
        """Return bytes a second, while one thread for each block writes and reads it."""
        began = time.monotonic()

        def move(block: tuple[DiskSlot, memoryview]) -> int:
            moved = 0
            while not moved or time.monotonic() < began + TRIAL_SECONDS:
                self.write(*block)
                self.read(*block)
                moved += 2 * len(block[1])
            return moved

        with ThreadPoolExecutor(len(blocks)) as executor:
            moved = sum(executor.map(move, blocks))
        return moved / (time.monotonic() - began)

    @property
    def direct(self) -> bool:
        """Whether all files pass by the page cache."""
        return all(file.direct for file in self._files)

    def open_files(self) -> list[tuple[int, int]]:
        """Return the descriptor and the length in bytes of every file."""
        return [(file.fileno(), file.size()) for file in self._files]

    def close(self) -> None:
        """Close the files, which frees their space."""
        for file in self._files:
            file.close()


def fewest(rates: Mapping[int, float]) -> int:
    """Return the smallest number of threads whose rate is nearly the best."""
    return min(n for n, rate in rates.items() if rate >= NEARLY * max(rates.values()))


def _crc(data: memoryview, number: int, generation: int) -> int:
    return crc32(data, crc32(struct.pack("<QQ", number, generation)))


# -- executors of transfers ----------------------------------------------------------------------


class Executor(Protocol):
    """Does work later, elsewhere; tests draw its order."""

    def submit(self, lane: Lane, n_bytes: int, work: Work, urgent: Urgent) -> None:
        """Queue ``work``; work that is ``urgent()`` goes first."""

    def close(self) -> None:
        """Return when all work is done; no more is taken."""


class IoThreads:
    """``n_threads`` that do urgent work first. They are daemons: while the interpreter ends they go
    on for a save that still reads homes."""

    def __init__(self, n_threads: int) -> None:
        self._queue = _Tasks()
        self._pid = os.getpid()
        self._threads = [
            threading.Thread(
                target=_work, args=(self._queue,), name=f"hetero-io-{number}", daemon=True
            )
            for number in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, lane: Lane, n_bytes: int, work: Work, urgent: Urgent) -> None:
        with self._queue.changed:
            self._queue.waiting.append((work, urgent))
            self._queue.changed.notify()

    def close(self) -> None:
        self._end()
        for thread in self._threads:
            interrupts.join(thread)

    def _end(self) -> None:
        with self._queue.changed:
            self._queue.closed = True
            self._queue.changed.notify_all()

    def __del__(self) -> None:
        # Not joined: garbage collection may run on one of these very threads.
        if self._pid == os.getpid():  # in a forked child the lock may have no holder
            self._end()


class _Tasks:
    """The threads' queue: they must not keep their owner alive."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Work, Urgent]] = deque()
        self.changed = threading.Condition()
        self.closed = False

    def next(self) -> Work | None:
        """Wait for the next work and return it; None when it is time to end."""
        with self.changed:
            while not (self.waiting or self.closed):
                self.changed.wait()
            for at, (work, urgent) in enumerate(self.waiting):
                if urgent():
                    del self.waiting[at]
                    return work
            return self.waiting.popleft()[0] if self.waiting else None


def _work(queue: _Tasks) -> None:
    go_behind()
    while (work := queue.next()) is not None:
        work()
        del work  # its references go now, not when the next work comes

"""The disk of a dry device: transfers take time, and that is all (floor 4)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from hetero.device import Slab
from hetero.dry import DryDevice
from hetero.memory.nvme import DiskSlot, Nvme, Urgent, Work
from hetero.memory.pool import Pool
from hetero.types import Lane

LANES = (Lane.READ, Lane.WRITE)
DiskSeconds = Callable[[Lane, int, bool], float]


class DriveTransfer(NamedTuple):
    """A read or write that was asked for; ``work`` follows when it is done."""

    asked: float
    n_bytes: int
    work: Work
    urgent: Urgent


class Running(NamedTuple):
    """A transfer under way, in seconds of the device's clock."""

    begin: float
    end: float
    work: Work


class DryDisk(threading.Condition):
    """Reads on one lane and writes on another, each one by one, urgent ones first.

    It is also the lock of its pool: taking it completes the transfers that end by then, and waiting
    on it waits, on the device's clock, for the next one.

    Args:
        seconds: (lane, bytes, whether the other lane is busy) -> seconds.
    """

    def __init__(self, device: DryDevice, seconds: DiskSeconds) -> None:
        super().__init__()
        self.span = (0.0, 0.0)
        """Of the transfer that ended last."""
        self._device = device
        self._seconds = seconds
        self._waiting: dict[Lane, deque[DriveTransfer]] = {lane: deque() for lane in LANES}
        self._running: dict[Lane, Running] = {}
        self._free_at = dict.fromkeys(LANES, 0.0)
        self._elsewhere: float | None = None  # the caller's time, when it is not the device's
        self._is_polling = False

    def now(self) -> float:
        """Return the caller's seconds."""
        return self._device.clock() if self._elsewhere is None else self._elsewhere

    @contextmanager
    def at(self, seconds: float) -> Iterator[None]:
        """Let the caller, inside the block, be at another time than the device."""
        before, self._elsewhere = self._elsewhere, seconds
        try:
            yield
        finally:
            self._elsewhere = before

    def submit(self, lane: Lane, n_bytes: int, work: Work, urgent: Urgent) -> None:
        """Queue a transfer."""
        self._waiting[lane].append(DriveTransfer(self.now(), n_bytes, work, urgent))
        self._next(lane)

    def close(self) -> None: ...

    def __enter__(self) -> bool:
        self._poll()
        return super().__enter__()

    def wait(self, timeout: float | None = None) -> bool:
        if not self._running:
            return False
        first = min(self._running, key=lambda lane: self._running[lane].end)
        end = self._running[first].end
        if self._elsewhere is None:
            self._device.pass_until(end)
        else:
            self._elsewhere = max(self._elsewhere, end)
        if first in self._running and self._running[first].end == end:
            self._finish(first)
        return True

    def _poll(self) -> None:
        if self._is_polling:
            return
        self._is_polling = True
        try:
            now = self.now()
            while done := [lane for lane, r in self._running.items() if r.end <= now]:
                self._finish(min(done, key=lambda lane: self._running[lane].end))
        finally:
            self._is_polling = False

    def _finish(self, lane: Lane) -> None:
        done = self._running.pop(lane)
        self._free_at[lane] = done.end
        self.span = done.begin, done.end
        done.work()
        self._next(lane)

    def _next(self, lane: Lane) -> None:
        """Begin an urgent transfer, or the oldest, if none is under way."""
        waiting = self._waiting[lane]
        if lane in self._running or not waiting:
            return
        at = next((i for i, transfer in enumerate(waiting) if transfer.urgent()), 0)
        transfer = waiting[at]
        del waiting[at]
        begin = max(self._free_at[lane], transfer.asked)
        busy = any(other.end > begin for other in self._running.values())
        end = begin + self._seconds(lane, transfer.n_bytes, busy)
        self._running[lane] = Running(begin, end, transfer.work)
        self._device.busy_until(lane, end)


class DryFile:
    """A file without content."""

    direct = True
    path = ""

    def reserve(self, n_bytes: int) -> None: ...

    def close(self) -> None: ...


class DryFolder:
    """A directory without files."""

    def private(self) -> Any:
        return DryFile()


class DryNvme(Nvme):
    """Slots that are counted and charged."""

    def __init__(self, disk: DryDisk, **options: Any) -> None:
        folders: Any = [DryFolder()]
        super().__init__(folders, 0, **options)
        self._disk = disk

    def read(self, slot: DiskSlot, into: memoryview) -> None:
        self._count(Lane.READ, slot, *self._disk.span)

    def write(self, slot: DiskSlot, data: memoryview) -> None:
        self._count(Lane.WRITE, slot, *self._disk.span)


class DryPool(Pool):
    """The pool of homes on disk, without memory."""

    def __init__(self, nvme: DryNvme, disk: DryDisk, n_bytes: int, *, extent_numel: int) -> None:
        super().__init__(nvme, n_bytes, extent_numel=extent_numel, executor=disk)
        self._changed = disk
        self.cache.checked = False
        self.disk = disk

    def _first_page(self, slab: Slab, size_bytes: int, n_bytes: int, what: str) -> int:
        return 0


def open_dry_pool(
    disk: DryDisk,
    folders: object,
    disk_bytes: int,
    *,
    pool_bytes: int,
    extent_numel: int,
    n_threads: int | None,
    checked: bool,
    **options: Any,
) -> Pool:
    """Return a pool like `hetero.memory.pool.open_pool` on a disk that is large enough."""
    nvme = DryNvme(disk, checked=False, **options)
    return DryPool(nvme, disk, pool_bytes, extent_numel=extent_numel)

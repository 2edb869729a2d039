"""Memory that the ranks of one machine share (floor 3).

Each rank keeps its homes in files of memory, one for each name of a home, as long as whole buckets;
pages that no share touches take nothing. The others map these files and read shares where they lie.
A counter a bucket and rank says how often its homes were changed there: the ranks make the same
changes, so each knows how often to expect.
"""

from __future__ import annotations

import mmap
import os
import pickle
import select
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hetero.crc import crc32
from hetero.device import Slab
from hetero.device.comm import Comm
from hetero.errors import RankLost
from hetero.memory.layout import Layout

TOKEN_BYTES = 16
MOST_FILES = 64
WIDTH = 4
"""Bytes that a file has for an element, at least."""
PAUSES_SECONDS = (0.0, 0.0001, 0.001)
"""Between looks at another rank's counter; the last one repeats."""
LOOKS = 64
"""At a counter, before the pause grows, and between looks whether its rank lives."""


class Told(NamedTuple):
    """What a rank tells the others of itself."""

    machine: str
    pid: int
    fd: int
    """Of its control block."""
    token: bytes


class Control:
    """A rank's control block: a token, its files by name, and a counter a bucket."""

    def __init__(self, memory: mmap.mmap, pid: int, n_buckets: int) -> None:
        self.pid = pid
        numbers: npt.NDArray[np.int64] = np.frombuffer(memory, np.int64, offset=TOKEN_BYTES)
        self.files = numbers[: 2 * MOST_FILES].reshape(MOST_FILES, 2)
        """Rows of a name's number, and the descriptor of its file plus 1."""
        self.counts = numbers[2 * MOST_FILES : 2 * MOST_FILES + n_buckets]

    @staticmethod
    def size_bytes(n_buckets: int) -> int:
        return TOKEN_BYTES + 8 * (2 * MOST_FILES + n_buckets)

    def file(self, name: str) -> int | None:
        """Return the descriptor of a name's file; None if there is none yet."""
        for number, fd in self.files.tolist():
            if fd and number == number_of(name):
                return int(fd) - 1
        return None

    def add(self, name: str, fd: int) -> None:
        """Tell the others of a file."""
        free = next(row for row in self.files if row[1] == 0)
        free[0] = number_of(name)
        free[1] = fd + 1


def number_of(name: str) -> int:
    return crc32(memoryview(name.encode()))


class SharedNode:
    """This rank's homes, and those of the others."""

    def __init__(
        self,
        rank: int,
        layout: Layout,
        controls: Sequence[Control],
        timeout_seconds: float,
    ) -> None:
        self.is_open = False
        self._rank = rank
        self._controls = controls
        self._timeout = timeout_seconds
        self._begun: Counter[int] = Counter()
        width = max([WIDTH, *(bucket.dtype.itemsize for bucket in layout.buckets)])
        spans = (pages(max(1, bucket.numel * width)) for bucket in layout.buckets)
        *self._starts, self._end = accumulate(spans, initial=0)
        self._files: dict[str, int] = {}
        self._maps: dict[tuple[str, int], mmap.mmap] = {}
        self._lives = [os.pidfd_open(control.pid) for control in controls]
        self._gone = select.poll()
        for other, handle in enumerate(self._lives):
            if other != rank:
                self._gone.register(handle, select.POLLIN)

    # -- memory ----------------------------------------------------------------------------------

    def slab(self, name: str, bucket: int, n_bytes: int) -> Slab:
        """Return this rank's memory for the home of a name, of which others see a share."""
        if name not in self._files:
            fd = self._files[name] = os.memfd_create(f"hetero-{name}")
            os.ftruncate(fd, max(self._end, mmap.PAGESIZE))
            self._maps[name, self._rank] = mmap.mmap(fd, 0)
            self._controls[self._rank].add(name, fd)
        memory = self._maps[name, self._rank]
        return Slab(
            n_bytes, self._piece(memory, bucket, n_bytes), memory, first=self._starts[bucket]
        )

    def memory(self, name: str, bucket: int, rank: int, n_bytes: int) -> torch.Tensor:
        """Return the bytes of another rank's home, of which its share is there; blocks until that
        rank has made it."""
        if (name, rank) not in self._maps:
            control = self._controls[rank]
            self._wait_until(lambda: control.file(name) is not None, rank, f"home of {name!r}")
            try:
                fd = os.open(f"/proc/{control.pid}/fd/{control.file(name)}", os.O_RDWR)
            except OSError:
                raise self._lost(f"home of {name!r}", rank, "its process ended") from None
            try:
                self._maps[name, rank] = mmap.mmap(fd, 0)
            finally:
                os.close(fd)
        return self._piece(self._maps[name, rank], bucket, n_bytes)

    def _piece(self, memory: mmap.mmap, bucket: int, n_bytes: int) -> torch.Tensor:
        at = self._starts[bucket]
        return torch.frombuffer(memory, dtype=torch.uint8, count=max(1, n_bytes), offset=at)

    # -- changes ---------------------------------------------------------------------------------

    def begin(self, bucket: int) -> None:
        """All ranks are about to change a bucket's homes."""
        self._begun[bucket] += 1

    def changed(self, bucket: int) -> None:
        """This rank has made a change that it began; on any thread."""
        self._controls[self._rank].counts[bucket] += 1

    def is_current(self, bucket: int) -> bool:
        """Whether all ranks have made the changes that this one has begun."""
        begun = self._begun[bucket]
        return all(control.counts[bucket] >= begun for control in self._controls)

    def wait(self, bucket: int) -> None:
        """Block until they have; raises RankLost for a rank that died, or takes too long."""
        begun = self._begun[bucket]
        for rank, control in enumerate(self._controls):
            done = partial(has_made, control.counts, bucket, begun)
            self._wait_until(done, rank, f"share of bucket {bucket}")

    def _wait_until(self, is_true: Callable[[], bool], rank: int, what: str) -> None:
        began, looks = time.monotonic(), 0
        while not is_true():
            looks += 1
            if looks % LOOKS == 0 and (dead := self._dead()) is not None:
                raise self._lost(what, dead, "its process ended")
            if time.monotonic() - began > self._timeout:
                raise self._lost(what, rank, f"no change for {self._timeout:.0f} s")
            time.sleep(PAUSES_SECONDS[min(looks // LOOKS, len(PAUSES_SECONDS) - 1)])

    def _dead(self) -> int | None:
        ended = {handle for handle, _ in self._gone.poll(0)}
        return next((rank for rank, handle in enumerate(self._lives) if handle in ended), None)

    def _lost(self, what: str, rank: int, why: str) -> RankLost:
        return RankLost(
            f"rank {self._rank} waits for rank {rank}'s {what}: {why}",
            advice="look at the first error of any rank: it says why that rank left",
        )

    def close(self) -> None:
        """Let go of the other processes; memory goes with the last tensor in it."""
        for handle in (*self._lives, *self._files.values()):
            os.close(handle)
        self._lives.clear()
        self._files.clear()
        self._maps.clear()


def has_made(counts: npt.NDArray[np.int64], bucket: int, n_changes: int) -> bool:
    return bool(counts[bucket] >= n_changes)


def pages(n_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def open_node(comm: Comm, layout: Layout, timeout_seconds: float) -> SharedNode | None:
    """Return the memory that all ranks share; None if they are on several machines, or this one
    has no such memory. Collective."""
    fd, mine, n_buckets = -1, b"", len(layout.buckets)
    if hasattr(os, "memfd_create") and hasattr(os, "pidfd_open"):
        with suppress(OSError):
            fd = os.memfd_create("hetero-control")
            os.ftruncate(fd, pages(Control.size_bytes(n_buckets)))
            token = os.urandom(TOKEN_BYTES)
            os.pwrite(fd, token, 0)
            mine = pickle.dumps(Told(machine(), os.getpid(), fd, token))
    try:
        rows = comm.agree(mine, "memory that ranks of a machine share")
        told: list[Told] = [pickle.loads(row) for row in rows if row]  # of this very program
        found = [(memory, each.pid) for each in told if (memory := mapped(each)) is not None]
        sees_all = len(found) == comm.size
        can = all(comm.agree(b"1" if sees_all else b"", "whether they all see it"))
    finally:
        if fd >= 0:
            os.close(fd)
    if not can:
        return None
    controls = [Control(memory, pid, n_buckets) for memory, pid in found]
    return SharedNode(comm.rank, layout, controls, timeout_seconds)


def mapped(told: Told) -> mmap.mmap | None:
    """Return a rank's control block; None if it is not on this machine."""
    if told.machine != machine():
        return None
    try:
        fd = os.open(f"/proc/{told.pid}/fd/{told.fd}", os.O_RDWR)
    except OSError:
        return None
    try:
        memory = mmap.mmap(fd, 0)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    return memory if memory[:TOKEN_BYTES] == told.token else None


def machine() -> str:
    """Return a name of this boot of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""

"""Memory that the ranks of one machine share (floor 3).

Each rank keeps its homes in files of memory, one for each name of a home, as long as whole buckets;
pages that no share touches take nothing. The others map these files and read shares where they lie.
Counters of each rank say how often homes were changed there (see `hetero.memory.changes`): the
ranks make the same changes, so each knows how often to expect. These files stay out of children: a
child that writes to its copy of a model would write to this rank's.
"""

from __future__ import annotations

import mmap
import os
import pickle
import threading
from collections import Counter
from collections.abc import Mapping
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
from hetero.forks import keep_out
from hetero.memory.changes import bucket_of, count
from hetero.memory.layout import Layout
from hetero.parallel.board import Board, Entries, RankWatch
from hetero.parallel.fence import fence
from hetero.parallel.news import News
from hetero.train.gradients.crossing import outbox_bytes

TOKEN_BYTES = 16
MOST_FILES = 64
WIDTH = 4
"""Bytes that a file of homes has for an element, at least."""
OUTBOX, MAIL = "outbox", "mail"
BOXES = 2
"""Exchanges that use an outbox in turn: one is read while the next is filled."""
LETTERS = 4
"""Calls that use a mail box in turn. At most one exchange is under way between two calls that all
join, so that a rank that writes a letter knows that the one before the last was read."""
LETTER_BYTES = 2**26


class Introduction(NamedTuple):
    """What a rank tells the others of itself."""

    machine: str
    pid: int
    fd: int
    """Of its control block."""
    token: bytes


class Control:
    """A rank's control block: token, files by name, counters and boards."""

    def __init__(self, memory: mmap.mmap, pid: int, n_counters: int) -> None:
        self.pid = pid
        numbers: npt.NDArray[np.int64] = np.frombuffer(
            memory, np.int64, 2 * MOST_FILES + n_counters, TOKEN_BYTES
        )
        self.files = numbers[: 2 * MOST_FILES].reshape(MOST_FILES, 2)
        """Rows of a name's number, and the descriptor of its file plus 1."""
        self.counts = numbers[2 * MOST_FILES :]
        first = TOKEN_BYTES + numbers.nbytes
        self.entries = Entries(memory, first)
        self.swaps = Entries(memory, first + Entries.size_bytes())

    @staticmethod
    def size_bytes(n_counters: int) -> int:
        numbers = 8 * (2 * MOST_FILES + n_counters)
        return TOKEN_BYTES + numbers + 2 * Entries.size_bytes()

    def file(self, name: str) -> int | None:
        """Return the descriptor of a name's file; None if there is none yet."""
        for number, fd in self.files.tolist():
            if fd and number == number_of(name):
                return int(fd) - 1
        return None

    def has_file(self, name: str) -> bool:
        return self.file(name) is not None

    def has_made(self, counter: int, n_changes: int) -> bool:
        return bool(self.counts[counter] >= n_changes)

    def add(self, name: str, fd: int) -> None:
        """Tell the others of a file."""
        free = next(row for row in self.files if row[1] == 0)
        free[0] = number_of(name)
        fence()
        free[1] = fd + 1


def number_of(name: str) -> int:
    return crc32(memoryview(name.encode()))


class SharedNode:
    """This rank's homes, outbox and board, and those of the others."""

    def __init__(
        self, comm: Comm, layout: Layout, controls: Mapping[int, Control], watch: RankWatch
    ) -> None:
        self._rank = rank = comm.rank
        self._controls = controls  # by rank
        self._copy = ranks_of_copy(comm)
        self._begun: Counter[int] = Counter()
        width = max([WIDTH, *(bucket.dtype.itemsize for bucket in layout.buckets)])
        spans = (pages(max(1, bucket.numel * width)) for bucket in layout.buckets)
        *self._starts, self._end = accumulate(spans, initial=0)
        self._box_bytes = pages(max(map(outbox_bytes, layout.buckets)))
        self._files: dict[str, int] = {}
        self._maps: dict[tuple[str, int], mmap.mmap] = {}
        self._watch = watch
        self._counting = threading.Lock()
        entries = [control.entries for control in controls.values()]
        self.board = Board(rank, entries, self._watch, self._letter)
        swaps = [control.swaps for control in controls.values()]
        self.swaps = Board(rank, swaps, self._watch, self._letter)
        """Of calls without long rows, by the thread that exchanges."""

    def awaited(self) -> int | None:
        return self._watch.awaited()

    def has_all(self, n_ranks: int) -> bool:
        """Whether all ranks are on this machine, not those of this one's copy alone."""
        return len(self._controls) == n_ranks

    # -- memory ----------------------------------------------------------------------------------

    def slab(self, name: str, bucket: int, n_bytes: int) -> Slab:
        """Return this rank's memory for the home of a name, of which others see a share."""
        memory, at = self._file(f"home {name}", self._rank, self._end), self._starts[bucket]
        return Slab(n_bytes, piece(memory, at, n_bytes), memory, first=at)

    def memory(self, name: str, bucket: int, share: int, n_bytes: int) -> torch.Tensor:
        """Return the bytes of the home of the rank that keeps a share of this one's copy; only that
        share is there. Blocks until that rank has made it."""
        rank = self._copy[share]
        return piece(self._file(f"home {name}", rank, self._end), self._starts[bucket], n_bytes)

    def outbox(self, rank: int, number: int) -> torch.Tensor:
        """Return the memory from which a rank's exchange of a number is read."""
        memory = self._file(OUTBOX, rank, BOXES * self._box_bytes)
        return piece(memory, number % BOXES * self._box_bytes, self._box_bytes)

    def _letter(self, rank: int, number: int) -> memoryview:
        memory = self._file(MAIL, rank, LETTERS * LETTER_BYTES)
        at = number % LETTERS * LETTER_BYTES
        return memoryview(memory)[at : at + LETTER_BYTES]

    def _file(self, name: str, rank: int, n_bytes: int) -> mmap.mmap:
        """Return the mapping of a rank's file, made if it is this rank's."""
        if (name, rank) not in self._maps:
            found = self._made(name, n_bytes) if rank == self._rank else self._seen(name, rank)
            self._maps[name, rank] = found
        return self._maps[name, rank]

    def _made(self, name: str, n_bytes: int) -> mmap.mmap:
        fd = self._files[name] = os.memfd_create(f"hetero-{name}")
        os.ftruncate(fd, max(n_bytes, mmap.PAGESIZE))
        made = mmap.mmap(fd, 0)
        keep_out(made)
        self._controls[self._rank].add(name, fd)
        return made

    def _seen(self, name: str, rank: int) -> mmap.mmap:
        control = self._controls[rank]
        self._watch.until(partial(control.has_file, name), rank, name)
        try:
            fd = os.open(f"/proc/{control.pid}/fd/{control.file(name)}", os.O_RDWR)
        except OSError:
            raise self._watch.died(rank, name) from None
        try:
            seen = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        keep_out(seen)
        return seen

    # -- changes ---------------------------------------------------------------------------------

    def begin(self, counter: int) -> None:
        """All ranks are about to change the homes of a counter."""
        self._begun[counter] += 1

    def changed(self, counter: int) -> None:
        """This rank has made a change that it began; on any thread."""
        fence()
        with self._counting:
            self._controls[self._rank].counts[counter] += 1

    def is_current(self, counter: int) -> bool:
        """Whether all ranks of this copy have made the changes that this one has begun."""
        begun = self._begun[counter]
        found = all(self._controls[rank].has_made(counter, begun) for rank in self._copy)
        fence()
        return found

    def wait(self, counter: int) -> None:
        """Block until they have; raises RankLost for a rank that died, or takes too long."""
        begun = self._begun[counter]
        for rank in self._copy:
            done = partial(self._controls[rank].has_made, counter, begun)
            self._watch.until(done, rank, f"the share of bucket {bucket_of(counter)}")

    def close(self) -> None:
        """Let go of the other processes; memory goes with the last tensor in it."""
        self._watch.close()
        for handle in self._files.values():
            os.close(handle)
        self._files.clear()
        self._maps.clear()


def piece(memory: mmap.mmap, start: int, n_bytes: int) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8, count=max(1, n_bytes), offset=start)


def pages(n_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def ranks_of_copy(comm: Comm) -> range:
    """Return the ranks that keep the same copy of the model as this one."""
    first = comm.rank - comm.rank % comm.n_shares
    return range(first, first + comm.n_shares)


def open_node(comm: Comm, layout: Layout, news: News, timeout_seconds: float) -> SharedNode | None:
    """Return the memory that all ranks share, or those of each copy; None if a copy is on several
    machines, or one has no such memory. Collective."""
    fd, mine, n_counters = -1, b"", count(layout)
    if hasattr(os, "memfd_create") and hasattr(os, "pidfd_open"):
        with suppress(OSError):
            fd = os.memfd_create("hetero-control")
            os.ftruncate(fd, pages(Control.size_bytes(n_counters)))
            token = os.urandom(TOKEN_BYTES)
            os.pwrite(fd, token, 0)
            mine = pickle.dumps(Introduction(machine(), os.getpid(), fd, token))
    try:
        rows = comm.agree(mine, "memory that ranks of a machine share")
        found: dict[int, tuple[mmap.mmap, int]] = {}
        for rank, row in enumerate(rows):
            told = pickle.loads(row) if row else None  # of this very program
            if told is not None and (memory := mapped(told)) is not None:
                found[rank] = memory, told.pid
        choices = [range(comm.size), ranks_of_copy(comm)]
        seen = pickle.dumps([found.keys() >= set(ranks) for ranks in choices])
        all_see = [pickle.loads(row) for row in comm.agree(seen, "whose homes they see")]
    finally:
        if fd >= 0:
            os.close(fd)
    for ranks, see in zip(choices, zip(*all_see, strict=True), strict=True):
        if all(see):
            controls = {rank: Control(*found[rank], n_counters) for rank in ranks}
            pids = {rank: control.pid for rank, control in controls.items()}
            return SharedNode(comm, layout, controls, RankWatch(pids, news, timeout_seconds))
    return None


def mapped(told: Introduction) -> mmap.mmap | None:
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

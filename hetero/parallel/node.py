"""Memory that the ranks of one machine share (floor 3).

Each rank's PARAM homes lie in one block of its own, as long as whole buckets, of which only its
shares take memory. The others map it and read shares where they lie. A counter a bucket and rank
says how often that share was changed; the ranks make the same changes, so each knows how often.
"""

from __future__ import annotations

import mmap
import os
import pickle
import select
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hetero.device import Slab
from hetero.device.comm import Comm
from hetero.errors import RankLost

TOKEN_BYTES = 16
PAUSES_SECONDS = (0.0, 0.0001, 0.001)
"""Between looks at another rank's counter; the last one repeats."""
LOOKS = 64
"""At a counter, before the pause grows, and between looks whether its rank lives."""


class Block(NamedTuple):
    """A rank's block, as it tells the others."""

    machine: str
    pid: int
    fd: int
    token: bytes


class SharedNode:
    """This rank's block, and those of the others.

    Args:
        sizes_bytes: of each bucket's whole PARAM home.
        blocks: the mapping of each rank's block.
    """

    def __init__(
        self,
        comm: Comm,
        sizes_bytes: Sequence[int],
        blocks: Sequence[mmap.mmap],
        pids: Sequence[int],
        timeout_seconds: float,
    ) -> None:
        self._rank = comm.rank
        self._blocks = blocks
        self._starts = starts(sizes_bytes, comm.size)
        self._sizes = sizes_bytes
        self._timeout = timeout_seconds
        shape = (len(sizes_bytes), comm.size)
        n = shape[0] * shape[1]
        counts = np.frombuffer(blocks[0], dtype=np.int64, count=n, offset=TOKEN_BYTES)
        self._counts = counts.reshape(shape)
        self._lives = [os.pidfd_open(pid) for pid in pids]
        self._gone = select.poll()
        for rank, handle in enumerate(self._lives):
            if rank != self._rank:
                self._gone.register(handle, select.POLLIN)

    def slab(self, bucket: int) -> Slab:
        """Return the memory of this rank's home of a bucket."""
        n_bytes, at = self._sizes[bucket], self._starts[bucket]
        block = self.memory(bucket, self._rank)
        return Slab(n_bytes, block, self._blocks[self._rank], first=at)

    def memory(self, bucket: int, rank: int) -> torch.Tensor:
        """Return a rank's home of a bucket, of which its share is there."""
        return torch.frombuffer(
            self._blocks[rank],
            dtype=torch.uint8,
            count=max(1, self._sizes[bucket]),
            offset=self._starts[bucket],
        )

    def changed(self, bucket: int) -> None:
        """This rank's share was changed once more."""
        self._counts[bucket, self._rank] += 1

    def is_current(self, bucket: int, n_changes: int) -> bool:
        """Whether every rank has changed its share so often."""
        return int(self._counts[bucket].min()) >= n_changes

    def wait(self, bucket: int, n_changes: int) -> None:
        """Block until that is so; raises RankLost for a rank that died, or takes too long."""
        began, looks = time.monotonic(), 0
        while not self.is_current(bucket, n_changes):
            looks += 1
            late = int(self._counts[bucket].argmin())
            if looks % LOOKS == 0 and (dead := self._dead()) is not None:
                raise self._lost(bucket, dead, "its process ended")
            if time.monotonic() - began > self._timeout:
                raise self._lost(bucket, late, f"no update for {self._timeout:.0f} s")
            time.sleep(PAUSES_SECONDS[min(looks // LOOKS, len(PAUSES_SECONDS) - 1)])

    def _dead(self) -> int | None:
        ended = {handle for handle, _ in self._gone.poll(0)}
        return next((rank for rank, handle in enumerate(self._lives) if handle in ended), None)

    def _lost(self, bucket: int, rank: int, why: str) -> RankLost:
        return RankLost(
            f"rank {self._rank} waits for rank {rank}'s share of bucket {bucket}: {why}",
            advice="look at the first error of any rank: it says why that rank left",
        )

    def close(self) -> None:
        """Let go of the other processes; memory goes with the last tensor in it."""
        for handle in self._lives:
            os.close(handle)
        self._lives.clear()


def starts(sizes_bytes: Sequence[int], n_ranks: int) -> list[int]:
    """Return where each bucket begins in a block, at a page; the last number is the block's end."""
    page = mmap.PAGESIZE
    at = -(-(TOKEN_BYTES + 8 * n_ranks * len(sizes_bytes)) // page) * page
    found = []
    for n_bytes in sizes_bytes:
        found.append(at)
        at += -(-max(1, n_bytes) // page) * page
    return [*found, at]


def open_node(comm: Comm, sizes_bytes: Sequence[int], timeout_seconds: float) -> SharedNode | None:
    """Return the memory that all ranks share; None if they are on several machines, or this one
    has no such memory. Collective."""
    fd, mine = -1, b""
    if hasattr(os, "memfd_create") and hasattr(os, "pidfd_open"):
        with suppress(OSError):
            fd = os.memfd_create("hetero")
            os.ftruncate(fd, starts(sizes_bytes, comm.size)[-1])
            block = mmap.mmap(fd, 0)
            token = os.urandom(TOKEN_BYTES)
            block[:TOKEN_BYTES] = token
            mine = pickle.dumps(Block(machine(), os.getpid(), fd, token))
    try:
        rows = comm.agree(mine, "memory that ranks of a machine share")
        others: list[Block] = [pickle.loads(row) for row in rows if row]  # of this very program
        blocks = [found for other in others if (found := mapped(other)) is not None]
        sees_all = len(blocks) == comm.size
        can = all(comm.agree(b"1" if sees_all else b"", "whether they all see it"))
    finally:
        if fd >= 0:
            os.close(fd)
    if not can:
        return None
    pids = [other.pid for other in others]
    return SharedNode(comm, sizes_bytes, blocks, pids, timeout_seconds)


def mapped(block: Block) -> mmap.mmap | None:
    """Return the mapping of a rank's block; None if it is not on this machine."""
    if block.machine != machine():
        return None
    try:
        fd = os.open(f"/proc/{block.pid}/fd/{block.fd}", os.O_RDWR)
    except OSError:
        return None
    try:
        found = mmap.mmap(fd, 0)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    return found if found[:TOKEN_BYTES] == block.token else None


def machine() -> str:
    """Return a name of this boot of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""

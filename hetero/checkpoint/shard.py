"""The file of a checkpoint's bytes: aligned pieces in and out, a CRC for every block.

Writing is a pipeline of two: the shard's own thread writes while callers stage and checksum pieces,
so that one stream of large direct writes reaches the drive. Staged pieces share a buffer, and those
adjacent in the file are written in one call.
"""

from __future__ import annotations

import ctypes
import errno
import queue
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from itertools import accumulate
from operator import itemgetter
from typing import Any

from hetero.checkpoint.folders import check_safe
from hetero.checkpoint.manifest import layout
from hetero.checkpoint.slices import Shard, Slice
from hetero.errors import CheckpointCorrupt, CheckpointError, StorageError, UnsafeCheckpoint, afresh
from hetero.interrupts import running
from hetero.io import ALIGN, File, Folder, align_up, aligned_buffer
from hetero.tensorfile import BLOCK, block_crcs
from hetero.types import format_bytes

PIECE = 8 * 2**20  # bytes per call: eight blocks
BUFFERS = 2  # for staging: one is filled while the other is written
SLACK_BYTES = 64 * 2**20  # of holes that are always accepted
GATHERED = 4 * 2**20  # bytes of a piece that is written alone, without a copy
UNWRITTEN, CLAIMED = -1, -2  # instead of a CRC
CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL)  # file systems that allocate on write


def check_range(each: Slice, start: int, n_bytes: int) -> None:
    """Raise CheckpointError unless bytes [start, start + n_bytes) are whole blocks of a slice."""
    end = start + n_bytes
    whole = start % BLOCK == 0 and (end % BLOCK == 0 or end == each.n_bytes)
    if not whole or not 0 <= start <= end <= each.n_bytes:
        raise CheckpointError(
            f"bytes {start} to {end} of {each.label!r} are not whole blocks of it",
            advice=f"use multiples of {BLOCK} up to its end, which is byte {each.n_bytes}",
        )


def flat(memory: memoryview) -> memoryview:
    """Return contiguous memory as bytes, whatever its type and shape."""
    return memory.cast("B") if memory.nbytes else memoryview(b"")


def fits(file: File, memory: memoryview) -> bool:
    """Whether memory may be written to a file without a copy. [Note: direct I/O]"""
    if len(memory) % ALIGN:
        return False  # padding follows
    return not file.direct or (not memory.readonly and address(memory) % ALIGN == 0)


def address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Buffers:
    """A few aligned buffers of `PIECE` bytes; `take` waits for a free one."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(BUFFERS):
            self._free.put(aligned_buffer(PIECE))

    def take(self) -> memoryview:
        return self._free.get()

    def give(self, buffer: memoryview) -> None:
        self._free.put(buffer)

    @contextmanager
    def one(self) -> Iterator[memoryview]:
        buffer = self.take()
        try:
            yield buffer
        finally:
            self.give(buffer)


class GatherBuffer:
    """A buffer that collects pieces, to write them together."""

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer
        self._used = 0
        self._pieces: list[tuple[int, memoryview]] = []

    def add(self, offset: int, piece: memoryview) -> int:
        """Copy bytes for ``offset`` of the file, padded, or the first of them; returns how many."""
        room = self.buffer[self._used : self._used + align_up(len(piece))]
        n_bytes = min(len(room), len(piece))
        copy(room[:n_bytes], piece[:n_bytes])
        room[n_bytes:] = bytes(len(room) - n_bytes)
        self._used += len(room)
        if room:
            self._pieces.append((offset, room))
        return n_bytes

    def runs(self) -> Iterator[tuple[int, list[memoryview]]]:
        """Yield (offset, pieces adjacent in the file from there on)."""
        run: list[memoryview] = []
        begin = end = 0
        for offset, piece in sorted(self._pieces, key=itemgetter(0)):
            if run and offset != end:
                yield begin, run
                run = []
            begin, end = begin if run else offset, offset + len(piece)
            run.append(piece)
        if run:
            yield begin, run


class ShardWriter:
    """A new shard, fully reserved; every block is written once, in any order.

    A later call raises a failure of the drive, `finish` at the latest.
    """

    def __init__(self, folder: Folder, shard: Shard) -> None:
        self._shard = shard
        self._slices = shard.slices
        first = shard.header
        self._offsets = [len(first) + at for at in layout(shard.slices)]
        self._blocks = list(accumulate((each.n_blocks for each in shard.slices), initial=0))
        self._crcs = array("q", [UNWRITTEN]) * self._blocks[-1]
        self._buffers = Buffers()
        self._lane = running(1, "hetero-checkpoint")
        self._lock = threading.Lock()  # of counts and claims
        self._placing = threading.Lock()  # its holder may wait for a buffer
        self._stage: GatherBuffer | None = None
        self._stopped = False
        self._failure: BaseException | None = None
        self._file = folder.create(shard.file, direct=True)
        try:
            self._file.reserve(self._offsets[-1])
        except StorageError as error:
            if error.errno not in CANNOT_RESERVE:
                raise
        self._gather(0, memoryview(first))

    def write(self, place: int, start: int, data: memoryview) -> None:
        """Write whole blocks of a slice, and return when ``data`` may change again."""
        check_range(self._slices[place], start, len(data))
        self._check_failure()
        writes: list[Future[None]] = []
        try:
            for at in range(0, len(data), PIECE):
                self._send(place, start + at, data[at : at + PIECE], writes)
        finally:
            wait(writes)
        for write in writes:
            write.result()

    def finish(self) -> tuple[str, ...]:
        """Make the shard durable; returns the CRCs of each slice as hexadecimal digits."""
        self.check_complete()
        with self._placing:
            self._send_stage()
        self._lane.shutdown()
        self._check_failure()
        self._file.sync()
        self._file.close()
        digits = [f"{crc:08x}" for crc in self._crcs]
        ends = zip(self._blocks, self._blocks[1:], strict=False)
        return tuple("".join(digits[first:last]) for first, last in ends)

    def stop(self) -> None:
        """Write nothing more, and close the file after the write under way."""
        self._stopped = True
        self._lane.shutdown()
        with suppress(OSError):
            self._file.close()

    def check_complete(self) -> None:
        """Raise CheckpointError if a block was never written."""
        block = next((n for n, crc in enumerate(self._crcs) if crc < 0), None)
        if block is None:
            return
        place = next(n for n, end in enumerate(self._blocks[1:]) if block < end)
        start = (block - self._blocks[place]) * BLOCK
        raise CheckpointError(
            f"{self._slices[place].label!r} was not written from byte {start} on",
            advice="write every block of every entry before commit",
        )

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise afresh(self._failure)

    def _send(self, place: int, start: int, piece: memoryview, writes: list[Future[None]]) -> None:
        """Queue the write of a piece, or stage it, and compute its CRCs meanwhile."""
        first = self._blocks[place] + start // BLOCK
        self._claim(place, first, -(-len(piece) // BLOCK))
        offset = self._offsets[place] + start
        if len(piece) >= GATHERED and fits(self._file, piece):
            writes.append(self._submit(self._put, offset, piece))
        else:
            self._gather(offset, piece)
        crcs = block_crcs(self._shard.seed(place), start, piece)
        self._crcs[first : first + len(crcs)] = array("q", crcs)

    def _claim(self, place: int, first: int, n_blocks: int) -> None:
        with self._lock:
            if any(crc != UNWRITTEN for crc in self._crcs[first : first + n_blocks]):
                raise CheckpointError(
                    f"a block of {self._slices[place].label!r} was written twice",
                    advice="write every block once",
                )
            self._crcs[first : first + n_blocks] = array("q", [CLAIMED]) * n_blocks

    def _gather(self, offset: int, piece: memoryview) -> None:
        """Copy a piece to a buffer that is written when full, or by `finish`."""
        done = 0
        with self._placing:
            while done < len(piece):
                self._stage = self._stage or GatherBuffer(self._buffers.take())
                added = self._stage.add(offset + done, piece[done:])
                if not added:
                    self._send_stage()
                done += added

    def _send_stage(self) -> None:
        stage, self._stage = self._stage, None
        if stage is None:
            return
        try:
            self._submit(self._put_stage, stage)
        except CheckpointError:
            self._buffers.give(stage.buffer)  # others may wait for it
            raise

    def _submit(self, put: Callable[..., None], *what: Any) -> Future[None]:
        try:
            return self._lane.submit(put, *what)
        except RuntimeError as error:  # the lane is shut down
            raise CheckpointError(f"this save is over: {error}") from None

    def _put(self, offset: int, *pieces: memoryview) -> None:
        try:
            if not self._stopped and self._failure is None:
                self._file.write(offset, *pieces)
        except BaseException as error:
            self._failure = error
            raise

    def _put_stage(self, stage: GatherBuffer) -> None:
        try:
            for offset, pieces in stage.runs():
                self._put(offset, *pieces)
        finally:
            self._buffers.give(stage.buffer)


def copy(to: memoryview, source: memoryview) -> None:
    """Copy bytes while other threads run: a memoryview's own assignment would block them."""
    if source.readonly or not len(source):
        to[:] = source
    else:
        ctypes.memmove(address(to), address(source), len(source))


def check_size(file: File, declared: int) -> None:
    """Raise if a file is not as long as declared, or has too many holes."""
    size = file.size()
    if size != declared:
        raise CheckpointCorrupt(
            f"{file.path} has {size} bytes, {declared} were saved", advice="use another checkpoint"
        )
    if size - file.allocated() > max(SLACK_BYTES, size * 3 // 4):
        raise UnsafeCheckpoint(
            f"{file.path} is declared with {format_bytes(size)}, and most of it are holes",
            advice="if a copy made the holes, fill them: cp --sparse=never",
        )


class ShardReader:
    """A shard; returns verified bytes only."""

    def __init__(self, folder: Folder, shard: Shard, buffers: Buffers) -> None:
        """Open the shard and check its size on the drive, and its header."""
        first = shard.header
        self.shard = shard
        self._offsets = [len(first) + at for at in layout(shard.slices)]
        self._buffers = buffers
        check_safe(folder, shard.file)
        self._file = folder.file(shard.file, direct=True)
        self.path, self.n_bytes = self._file.path, self._offsets[-1]
        check_size(self._file, self.n_bytes)
        found = aligned_buffer(len(first))[: len(first)]
        self._file.read(0, found)
        if found != first:
            raise CheckpointCorrupt(
                f"{self.path} does not begin with the header that was saved",
                advice="use another checkpoint",
            )

    def read(self, place: int, start: int, into: memoryview) -> None:
        """Fill ``into`` with bytes of a slice, from any byte on; whole blocks are read and
        verified. Raises CheckpointCorrupt or StorageError."""
        n_bytes, end = self.shard.slices[place].n_bytes, start + len(into)
        while start < end:
            first = start // BLOCK * BLOCK
            stop = min(first + PIECE, end)
            piece = into[: stop - start]
            if (
                first == start
                and (stop % BLOCK == 0 or stop == n_bytes)
                and fits(self._file, piece)
            ):
                self._file.read(self._offsets[place] + start, piece)
                self._verify(place, start, piece)
            else:
                self._read_blocks(place, first, start - first, piece)
            start, into = stop, into[len(piece) :]

    def close(self) -> None:
        self._file.close()

    def _read_blocks(self, place: int, first: int, skipped: int, piece: memoryview) -> None:
        """Read the blocks around a piece, which begins ``skipped`` bytes after the first."""
        n_bytes = self.shard.slices[place].n_bytes
        last = min(-(-(first + skipped + len(piece)) // BLOCK) * BLOCK, align_up(n_bytes))
        with self._buffers.one() as buffer:
            blocks = buffer[: last - first]
            self._file.read(self._offsets[place] + first, blocks)
            self._verify(place, first, blocks)
            copy(piece, blocks[skipped : skipped + len(piece)])

    def _verify(self, place: int, start: int, data: memoryview) -> None:
        shard = self.shard
        for block, crc in enumerate(block_crcs(shard.seed(place), start, data), start // BLOCK):
            expected, got = shard.crcs[place][8 * block : 8 * block + 8], f"{crc:08x}"
            if got != expected:
                each = shard.slices[place]
                raise CheckpointCorrupt(
                    f"{self.path}: block {block} of entry {each.number}"
                    f" ({each.label!r}) has CRC {got}, saved was {expected}",
                    advice="use another checkpoint",
                )

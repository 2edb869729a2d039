"""The file that holds a checkpoint's bytes: aligned pieces in and out, a CRC on every block.

Writing is a pipeline of two: one thread of the shard writes pieces, and callers stage and sum them
meanwhile, so one stream of large direct writes reaches the drive while CRCs are computed.
"""

from __future__ import annotations

import ctypes
import errno
import queue
import struct
import threading
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from itertools import accumulate

from hetero.checkpoint.manifest import BLOCK, SHARD, Entry, layout
from hetero.crc import crc32
from hetero.errors import CheckpointError, StorageError
from hetero.io import ALIGN, File, Folder, align_up, aligned_buffer

PIECE = 8 * 2**20  # bytes of one call: eight blocks
BUFFERS = 2  # for staging: one is filled while the other is written
SEED = struct.Struct("<QQ")  # number of the entry, number of the block
UNWRITTEN, CLAIMED = -1, -2  # in place of a CRC
CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL)  # file systems that allocate as one writes


def block_crcs(entry: int, start: int, data: memoryview) -> list[int]:
    """Return the CRCs of the blocks of ``data``, which lies at byte ``start`` of an entry.

    Zeros pad the last one to a multiple of `ALIGN`. The seed makes bytes of another place wrong.
    """
    crcs = [
        crc32(data[at : at + BLOCK], crc32(SEED.pack(entry, (start + at) // BLOCK)))
        for at in range(0, len(data), BLOCK)
    ]
    padding = -len(data) % ALIGN
    return crcs[:-1] + [crc32(bytes(padding), crcs[-1])] if padding else crcs


def check_range(entry: Entry, start: int, n_bytes: int) -> None:
    """Raise CheckpointError unless bytes [start, start + n_bytes) are whole blocks of an entry."""
    end = start + n_bytes
    whole = start % BLOCK == 0 and (end % BLOCK == 0 or end == entry.n_bytes)
    if not whole or not 0 <= start <= end <= entry.n_bytes:
        raise CheckpointError(
            f"bytes {start} to {end} of {entry.label!r} are not whole blocks of it",
            advice=f"use multiples of {BLOCK} up to its end, which is byte {entry.n_bytes}",
        )


def flat(memory: memoryview) -> memoryview:
    """Return contiguous memory as bytes, of whatever type and shape it is."""
    return memory.cast("B") if memory.nbytes else memoryview(b"")


def fits(file: File, memory: memoryview) -> bool:
    """Whether memory may go to a file as it is. [Note: direct I/O]"""
    if len(memory) % ALIGN:
        return False  # padding follows
    return not file.direct or (not memory.readonly and address(memory) % ALIGN == 0)


def address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Buffers:
    """A few aligned buffers of `PIECE` bytes; who wants one waits for it."""

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


class ShardWriter:
    """A new shard, reserved whole; every block of it is written once, in any order."""

    def __init__(self, folder: Folder, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._offsets = layout(entries)
        self._blocks = list(accumulate((entry.n_blocks for entry in entries), initial=0))
        self._crcs = array("q", [UNWRITTEN]) * self._blocks[-1]
        self._buffers = Buffers()
        self._lane = ThreadPoolExecutor(1, thread_name_prefix="hetero-checkpoint")
        self._lock = threading.Lock()
        self._stopped = False
        self._failed = False
        self._file = folder.create(SHARD, direct=True)
        try:
            self._file.reserve(self._offsets[-1])
        except StorageError as error:
            if error.errno not in CANNOT_RESERVE:
                raise

    def write(self, entry: int, start: int, data: memoryview) -> None:
        """Write whole blocks of an entry, and return when ``data`` may change again."""
        check_range(self._entries[entry], start, len(data))
        writes: list[Future[None]] = []
        try:
            for at in range(0, len(data), PIECE):
                writes.append(self._send(entry, start + at, data[at : at + PIECE]))
        finally:
            wait(writes)
        for write in writes:
            write.result()

    def finish(self) -> tuple[str, ...]:
        """Make the shard durable; returns the CRCs of each entry as hexadecimal digits."""
        self.check_complete()
        self._lane.shutdown()
        if self._failed:
            raise CheckpointError("a write failed", advice="commit after every write has returned")
        self._file.sync()
        self._file.close()
        digits = [f"{crc:08x}" for crc in self._crcs]
        ends = zip(self._blocks, self._blocks[1:], strict=False)
        return tuple("".join(digits[first:last]) for first, last in ends)

    def stop(self) -> None:
        """Write nothing more, and let the file go when the write that is under way has ended."""
        self._stopped = True
        self._lane.shutdown()
        with suppress(OSError):
            self._file.close()

    def check_complete(self) -> None:
        """Raise CheckpointError where a block was never written."""
        block = next((n for n, crc in enumerate(self._crcs) if crc < 0), None)
        if block is None:
            return
        number = next(n for n, end in enumerate(self._blocks[1:]) if block < end)
        start = (block - self._blocks[number]) * BLOCK
        raise CheckpointError(
            f"{self._entries[number].label!r} was not written from byte {start} on",
            advice="write every block of every entry before commit",
        )

    def _send(self, entry: int, start: int, piece: memoryview) -> Future[None]:
        """Let a piece be written, and compute its CRCs meanwhile."""
        first = self._blocks[entry] + start // BLOCK
        self._claim(entry, first, -(-len(piece) // BLOCK))
        write = self._submit(self._offsets[entry] + start, piece)
        crcs = block_crcs(entry, start, piece)
        self._crcs[first : first + len(crcs)] = array("q", crcs)
        return write

    def _claim(self, entry: int, first: int, n_blocks: int) -> None:
        with self._lock:
            if any(crc != UNWRITTEN for crc in self._crcs[first : first + n_blocks]):
                raise CheckpointError(
                    f"a block of {self._entries[entry].label!r} was written twice",
                    advice="write every block once",
                )
            self._crcs[first : first + n_blocks] = array("q", [CLAIMED]) * n_blocks

    def _submit(self, offset: int, piece: memoryview) -> Future[None]:
        try:
            if fits(self._file, piece):
                return self._lane.submit(self._put, offset, piece)
            buffer = self._buffers.take()
            try:
                return self._lane.submit(self._put, offset, padded_copy(piece, buffer), buffer)
            except BaseException:
                self._buffers.give(buffer)
                raise
        except RuntimeError as error:  # the lane is shut
            raise CheckpointError(f"this save is over: {error}") from None

    def _put(self, offset: int, piece: memoryview, buffer: memoryview | None = None) -> None:
        try:
            if not self._stopped:
                self._file.write(offset, piece)
        except BaseException:
            self._failed = True
            raise
        finally:
            if buffer is not None:
                self._buffers.give(buffer)


def padded_copy(piece: memoryview, buffer: memoryview) -> memoryview:
    """Return a copy of ``piece`` in ``buffer``, with zeros up to a multiple of `ALIGN`."""
    size = align_up(len(piece))
    copy(buffer[: len(piece)], piece)
    buffer[len(piece) : size] = bytes(size - len(piece))
    return buffer[:size]


def copy(to: memoryview, source: memoryview) -> None:
    """Copy bytes while other threads run: a memoryview's own assignment would hold them up."""
    if source.readonly or not len(source):
        to[:] = source
    else:
        ctypes.memmove(address(to), address(source), len(source))


class Mismatch(Exception):
    """A block's bytes do not have the CRC that was saved."""

    def __init__(self, entry: int, block: int, expected: str, got: str) -> None:
        super().__init__(entry, block, expected, got)
        self.entry, self.block, self.expected, self.got = entry, block, expected, got


class ShardReader:
    """A shard whose size is known to be right; gives out verified bytes only."""

    def __init__(self, file: File, entries: Sequence[Entry], crcs: Sequence[str]) -> None:
        self._file = file
        self._entries = entries
        self._offsets = layout(entries)
        self._crcs = crcs
        self._buffers = Buffers()

    def read(self, entry: int, start: int, into: memoryview) -> None:
        """Fill ``into`` with whole blocks of an entry; raises Mismatch or StorageError.

        After an error ``into`` holds nothing of use.
        """
        check_range(self._entries[entry], start, len(into))
        for at in range(0, len(into), PIECE):
            self._read(entry, start + at, into[at : at + PIECE])

    def close(self) -> None:
        self._file.close()

    def _read(self, entry: int, start: int, piece: memoryview) -> None:
        offset = self._offsets[entry] + start
        if fits(self._file, piece):
            self._file.read(offset, piece)
            self._verify(entry, start, piece)
            return
        with self._buffers.one() as buffer:
            padded = buffer[: align_up(len(piece))]
            self._file.read(offset, padded)
            self._verify(entry, start, padded)
            copy(piece, padded[: len(piece)])

    def _verify(self, entry: int, start: int, data: memoryview) -> None:
        for block, crc in enumerate(block_crcs(entry, start, data), start // BLOCK):
            expected, got = self._crcs[entry][8 * block : 8 * block + 8], f"{crc:08x}"
            if got != expected:
                raise Mismatch(entry, block, expected, got)

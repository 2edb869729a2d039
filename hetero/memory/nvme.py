"""The NVME tier: slots in private files, checked on every way back (floor 1, mechanism).

The files have no names and no content that outlives the process, so nothing is synced. What is
promised is integrity: every slot's bytes are read back as they were written last, or not at all.
The digest is a CRC-32 seeded with the slot's number and the generation of its content, and kept in
RAM: an older content, or a neighbour's, does not pass.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections import Counter
from collections.abc import Sequence

from hetero.errors import ChunkCorrupt
from hetero.events import EventLog
from hetero.io import File, Folder, align_up
from hetero.memory.ledger import Ledger
from hetero.types import Kind, Lane, Tier, format_bytes


class Slot:
    """A run of one file that holds one extent; ``generation`` 0 means that nothing was written."""

    __slots__ = ("digest", "file", "generation", "n_bytes", "number", "offset")

    def __init__(self, number: int, file: File, offset: int, n_bytes: int) -> None:
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
        n_bytes: reserved now, all together; DiskFull where they are not there.
        ledger: charged as slots are taken.
        checked: whether digests are made and compared (benchmarks measure what they cost).
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
        self.written_bytes = 0  # since the beginning: what a drive's endurance is spent on
        self._checked = checked
        self._ledger = ledger
        self._log = log
        self._files = [folder.private() for folder in folders]
        self._ends = [0] * len(self._files)
        self._n_slots = 0
        self._lock = threading.Lock()
        self._each_bytes = align_up(-(-n_bytes // len(folders)))
        for file in self._files:
            file.reserve(self._each_bytes)

    def slot(self, kind: Kind, n_bytes: int, what: str) -> Slot:
        """Return the next slot, of ``n_bytes`` rounded up to whole blocks."""
        size = align_up(n_bytes)
        self._ledger.charge(Tier.NVME, kind, size, what)
        at = min(range(len(self._files)), key=lambda i: self._ends[i])
        offset, self._ends[at] = self._ends[at], self._ends[at] + size
        if self._ends[at] > self._each_bytes:
            self._each_bytes = self._ends[at]
            self._files[at].reserve(self._ends[at])
        self._n_slots += 1
        return Slot(self._n_slots, self._files[at], offset, size)

    def read(self, slot: Slot, into: memoryview) -> None:
        """Fill ``into`` with a slot's content; ChunkCorrupt where it is not what was written."""
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
        self._count(Lane.READ, slot.n_bytes)

    def write(self, slot: Slot, data: memoryview) -> None:
        """Make ``data`` a slot's content. After a failure it has none: the caller keeps its own."""
        generation = slot.generation + 1
        digest = _crc(data, slot.number, generation) if self._checked else 0
        slot.file.write(slot.offset, data)
        slot.generation, slot.digest = generation, digest
        self._count(Lane.WRITE, slot.n_bytes)

    def take_counts(self) -> Counter[Lane]:
        """Return the bytes moved since this was last asked."""
        with self._lock:
            moved, self._moved = self._moved, Counter()
        return moved

    def _count(self, lane: Lane, n_bytes: int) -> None:
        with self._lock:
            self._moved[lane] += n_bytes
            if lane is Lane.WRITE:
                self.written_bytes += n_bytes

    @property
    def direct(self) -> bool:
        """Whether all files pass by the page cache."""
        return all(file.direct for file in self._files)

    def open_files(self) -> list[tuple[int, int]]:
        """Return the descriptor and the length in bytes of every file (to be looked at)."""
        return [(file.fileno(), file.size()) for file in self._files]

    def close(self) -> None:
        """Let the files go; their space is free then."""
        for file in self._files:
            file.close()


def _crc(data: memoryview, number: int, generation: int) -> int:
    return zlib.crc32(data, zlib.crc32(struct.pack("<QQ", number, generation)))

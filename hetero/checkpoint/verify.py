"""Checking checkpoints: every byte of every one, without a model and without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from hetero.checkpoint.folders import named
from hetero.checkpoint.manifest import MANIFEST
from hetero.checkpoint.reader import CheckpointReader, nothing, open_folder, open_in
from hetero.checkpoint.shard import BUFFERS, PIECE, Buffers
from hetero.errors import CheckpointError, StorageError
from hetero.io import IO


@dataclass(frozen=True, slots=True)
class CheckpointVerdict:
    """The result for one checkpoint; ``problem`` is "" if every byte is right."""

    step: int | None
    """None for a single directory that cannot be opened."""
    name: str
    bytes: int
    """Size of its shards; 0 if its manifest is invalid."""
    ok: bool
    problem: str


@dataclass(frozen=True, slots=True)
class Verification:
    """The results for a directory of checkpoints, or for one, by step."""

    path: str
    checkpoints: tuple[CheckpointVerdict, ...]
    unfinished: tuple[str, ...]
    """Directories of unfinished saves, which no load looks at."""

    @property
    def ok(self) -> bool:
        return all(verdict.ok for verdict in self.checkpoints)

    @property
    def newest_good(self) -> int | None:
        """The highest step whose bytes are all right."""
        return max((v.step for v in self.checkpoints if v.ok and v.step is not None), default=None)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok, "newest_good": self.newest_good}


def verify(path: str | Path, io: IO | None = None) -> Verification:
    """Read every byte of each ``step-N`` under ``path``, or of that one checkpoint.

    The report has all damage and failures of drives. Raises NoCheckpoint if there is nothing to
    check, and CheckpointError if another program wrote it.
    """
    root = open_folder(path, io)
    if root.has(MANIFEST):
        name = Path(root.path).name
        return Verification(root.path, (examine(None, name, partial(CheckpointReader, root)),), ())
    found = named(root)
    done = [each for each in found if not each.unfinished]
    if not done:
        raise nothing(root, None)
    verdicts = tuple(examine(each.step, each.name, partial(open_in, root, each)) for each in done)
    return Verification(root.path, verdicts, tuple(each.name for each in found if each.unfinished))


def examine(
    step: int | None, name: str, opened: Callable[[], CheckpointReader]
) -> CheckpointVerdict:
    n_bytes = 0
    try:
        with opened() as reader:
            step, n_bytes = reader.step, reader.n_bytes
            read_all(reader)
    except (CheckpointError, StorageError) as error:
        return CheckpointVerdict(
            step, name, n_bytes, False, f"{type(error).__name__}: {error.args[0]}"
        )
    return CheckpointVerdict(step, name, n_bytes, True, "")


def read_all(reader: CheckpointReader, rank: int = 0, n_ranks: int = 1) -> None:
    """Read every block, or those of one of several ranks; raises the error of the first bad one."""
    buffers = Buffers()

    def read(piece: tuple[int, int, int]) -> None:
        entry, start, n_bytes = piece
        with buffers.one() as buffer:
            reader.read(entry, start, buffer[:n_bytes])

    with ThreadPoolExecutor(BUFFERS, thread_name_prefix="hetero-verify") as pool:
        mine = islice(pieces(reader), rank, None, n_ranks)
        for _ in pool.map(read, mine):  # one checksums while the other reads
            pass


def pieces(reader: CheckpointReader) -> Iterator[tuple[int, int, int]]:
    """Yield (entry, start, bytes) of all of a checkpoint, a buffer at a time."""
    for each in reader.slices():
        for start in range(each.start_byte, each.end_byte, PIECE):
            yield each.number, start, min(PIECE, each.end_byte - start)

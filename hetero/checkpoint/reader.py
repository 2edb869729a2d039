"""Loading: the choice of a checkpoint, its validation, and its bytes.

[Note: order of belief]  Names and types of files are checked before any is opened; the manifest's
size before it is read; its CRC before it is parsed; its version; every declared value before
anything is allocated by it; the same of its parts; each shard's size; its header; and the CRC of
each block before its bytes are returned. Unknown files in a checkpoint are never opened.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from hetero.checkpoint import parts
from hetero.checkpoint.folders import CheckpointName, check_safe, final_name, named
from hetero.checkpoint.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    SHARDS,
    UNSAFE,
    Manifest,
    Unfit,
    decode,
    part_name,
)
from hetero.checkpoint.shard import Buffers, ShardReader, flat
from hetero.checkpoint.slices import Place, Shard, Slice, only_shard, places
from hetero.crc import crc32
from hetero.errors import (
    CheckpointCorrupt,
    CheckpointError,
    NoCheckpoint,
    StorageError,
    UnsafeCheckpoint,
)
from hetero.io import IO, File, Folder
from hetero.types import format_bytes

FOREIGN_NAMES = {  # file name endings of other tools: never opened
    ".metadata": "torch.distributed.checkpoint (DCP)",
    ".distcp": "torch.distributed.checkpoint (DCP)",
    ".safetensors": "safetensors",
    ".safetensors.index.json": "safetensors",
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt", ".pkl"), "torch.save (pickle)"),
}
FOREIGN_BYTES = {b"PK\x03\x04": "zip archive, as torch.save writes", b"\x80": "pickle"}
NAME_ONE = "name a directory that holds step-N, or a step-N itself"
SAVE_AGAIN = "only a finished save is loaded"


class State(Enum):
    """The state of a checkpoint's directory."""

    COMPLETE = "complete"
    DAMAGED = "damaged"
    UNFINISHED = "unfinished"


class Found(NamedTuple):
    """A checkpoint's name in a root; ``problem`` says why it is not complete."""

    step: int
    name: str
    state: State
    problem: str


class CheckpointReader:
    """An open checkpoint: its contents, with bytes verified as they are read."""

    def __init__(self, folder: Folder, root: Folder | None = None) -> None:
        """Check ``folder`` in the order of [Note: order of belief]."""
        self._folder, self._root = folder, root
        manifest = read_manifest(folder)
        self.step = manifest.step
        self.meta = manifest.meta
        self.entries = manifest.entries
        self.path = folder.path
        content = repr((manifest.crcs, manifest.parts))
        self.digest = crc32(memoryview(content.encode()))
        """Of the digests of all its bytes."""
        self._numbers = {(e.kind, e.name, e.key): n for n, e in enumerate(self.entries)}
        shards, self.of_ranks = read_parts(folder, manifest)
        self._places = places_in(folder, manifest, shards)
        self._buffers = Buffers()
        self._shards: list[ShardReader] = []
        try:
            for shard in shards:
                self._shards.append(ShardReader(folder, shard, self._buffers))
        except BaseException:
            self.close()
            raise
        self.shard_bytes = [shard.n_bytes for shard in self._shards]
        self.n_bytes = sum(self.shard_bytes)

    @classmethod
    def open(
        cls, path: str | Path, step: int | None = None, io: IO | None = None
    ) -> CheckpointReader:
        """Open a checkpoint, or the newest one in a directory of them, or that of ``step``.

        Never falls back silently: if the newest is damaged, the error's advice names the newest
        good one. Raises NoCheckpoint, CheckpointCorrupt, CheckpointTooNew, UnsafeCheckpoint, plain
        CheckpointError for another program's checkpoint, StorageError if a read fails.
        """
        root = open_folder(path, io)
        if root.has(MANIFEST):
            return cls._open_one(root, step)
        found = [n for n in named(root) if not n.unfinished and step in (None, n.step)]
        if not found:
            raise nothing(root, step)
        try:
            return open_in(root, found[-1])
        except CheckpointError as error:
            advice = f"{newest_good(root, found[-1].step)}; {error.advice}"
            raise type(error)(error.args[0], advice=advice) from None

    @classmethod
    def _open_one(cls, folder: Folder, step: int | None) -> CheckpointReader:
        if Path(folder.path).resolve().name.endswith(".tmp"):
            raise NoCheckpoint(f"{folder.path} is a save that did not finish", advice=SAVE_AGAIN)
        reader = cls(folder)
        if step not in (None, reader.step):
            raise NoCheckpoint(f"{folder.path} is of step {reader.step}, not {step}")
        return reader

    def find(self, kind: str, name: str, key: str = "") -> int | None:
        return self._numbers.get((kind, name, key))

    def shares(self, entry: int) -> list[tuple[int, Slice]]:
        """Return which shards hold an entry, with what each holds, from its first element on."""
        places = self._places[entry]
        return [(shard, self._shards[shard].shard.slices[place]) for shard, place in places]

    def slices(self) -> Iterator[Slice]:
        """Yield what files hold of entries, entry by entry: it is read fastest in these pieces."""
        for number in range(len(self.entries)):
            for _, each in self.shares(number):
                yield each

    def read(self, entry: int, start: int, into: memoryview) -> None:
        """Fill ``into`` with bytes [start, start + len(into)) of the entry with this number.

        Whole blocks of `BLOCK` bytes are read and verified: a start and an end at their borders
        cost least. Any thread may call this. Raises CheckpointCorrupt for bytes that are not those
        saved, StorageError if the drive fails; ``into`` is then undefined.
        """
        if not 0 <= entry < len(self.entries):
            raise CheckpointError(f"there is no entry {entry} of {len(self.entries)}")
        into, n_bytes = flat(into), self.entries[entry].n_bytes
        if not 0 <= start <= start + len(into) <= n_bytes:
            raise CheckpointError(
                f"bytes {start} to {start + len(into)} are not inside of"
                f" {self.entries[entry].label!r}, which has {n_bytes}"
            )
        try:
            for number, place in self._places[entry]:
                shard = self._shards[number]
                each = shard.shard.slices[place]
                first = max(start, each.start_byte)
                end = min(start + len(into), each.end_byte)
                if first < end:
                    piece = into[first - start : end - start]
                    shard.read(place, first - each.start_byte, piece)
        except CheckpointCorrupt as error:
            advice = newest_good(self._root, self.step)
            raise CheckpointCorrupt(error.args[0], advice=advice) from None

    def close(self) -> None:
        """Close the files; closing twice is no error."""
        for shard in self._shards:
            shard.close()
        self._folder.close()
        self._root = None

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_in(root: Folder, found: CheckpointName) -> CheckpointReader:
    """Open one of the checkpoints in ``root``; its name must match its step."""
    check_safe(root, found.name, is_folder=True)
    reader = CheckpointReader(root.folder(found.name), root)
    if reader.step != found.step:
        reader.close()
        raise CheckpointCorrupt(
            f"{reader.path} holds step {reader.step}",
            advice=f"give it its name back: {final_name(reader.step)}",
        )
    return reader


def steps(root: Folder | str | Path) -> list[Found]:
    """Return the checkpoints in a directory, by step.

    COMPLETE means a valid manifest and a shard of its size; `verify` reads the bytes too.
    """
    if not isinstance(root, Folder):
        root = open_folder(root, None)
    return [found_at(root, each) for each in named(root)]


def found_at(root: Folder, found: CheckpointName) -> Found:
    if found.unfinished:
        return Found(*found, State.UNFINISHED, SAVE_AGAIN)
    try:
        with open_in(root, found):
            return Found(*found, State.COMPLETE, "")
    except (CheckpointError, StorageError) as error:
        return Found(*found, State.DAMAGED, error.args[0])


def newest_good(root: Folder | None, step: int) -> str:
    """Return advice: the newest checkpoint that can be opened, other than that of ``step``."""
    others = [found_at(root, n) for n in named(root) if n.step != step] if root else []
    for found in reversed(others):
        if found.state is State.COMPLETE:
            return f"step {found.step} is the newest good one: load it with step={found.step}"
    return "there is no other good one in this directory"


def read_manifest(folder: Folder) -> Manifest:
    """Return a checkpoint's manifest; nothing is allocated by it before it is checked."""
    refuse_foreign(folder, folder.names())
    return decode(read_json(folder, MANIFEST), folder.where(MANIFEST))


def read_parts(folder: Folder, manifest: Manifest) -> tuple[list[Shard], list[dict[str, Any]]]:
    """Return a checkpoint's shards, and what the rank of each told."""
    if not manifest.parts:
        return [only_shard(manifest)], [{}]
    names = [part_name(number) for number in range(len(manifest.parts))]
    found = [
        parts.decode(read_json(folder, name), folder.where(name), manifest, number)
        for number, name in enumerate(names)
    ]
    return [shard for shard, _ in found], [told for _, told in found]


def places_in(folder: Folder, manifest: Manifest, shards: Sequence[Shard]) -> list[list[Place]]:
    """Return where each entry lies; UnsafeCheckpoint unless all of it is there."""
    try:
        return places(manifest.entries, shards)
    except Unfit as error:
        raise UnsafeCheckpoint(f"{folder.path}: {error}", advice=UNSAFE) from None


def read_json(folder: Folder, name: str) -> bytes:
    """Return a file that is small, if it is one of ours."""
    check_safe(folder, name)
    with folder.file(name) as file:
        size = file.size()
        if size > MAX_MANIFEST_BYTES:
            raise UnsafeCheckpoint(
                f"{file.path} has {format_bytes(size)} of {format_bytes(MAX_MANIFEST_BYTES)}",
                advice=UNSAFE,
            )
        return read_bytes(file, size)


def read_bytes(file: File, n_bytes: int) -> bytes:
    raw = bytearray(n_bytes)
    file.read(0, memoryview(raw))
    return bytes(raw)


# -- foreign directories -------------------------------------------------------------------------


def open_folder(path: str | Path, io: IO | None) -> Folder:
    """Open a user's directory; raises NoCheckpoint if there is none."""
    try:
        return Folder.open(path, io)
    except ValueError:  # a NUL in the path
        raise NoCheckpoint(f"{str(path)[:300]!r} is no path", advice=NAME_ONE) from None
    except StorageError as error:
        if error.errno == errno.ENOTDIR:
            raise foreign_file(path, io) from None
        if error.errno != errno.ENOENT:
            raise
        raise NoCheckpoint(f"{path} does not exist", advice=NAME_ONE) from None


def foreign_file(path: str | Path, io: IO | None) -> CheckpointError:
    """Return the error for a path that is no directory."""
    where = Path(path)
    with Folder.open(where.parent, io) as folder, folder.file(where.name) as file:
        found = foreign_bytes(read_bytes(file, min(16, file.size())))
    return CheckpointError(f"{path} is a {found or 'file'}, not a directory", advice=NAME_ONE)


def foreign_bytes(head: bytes) -> str:
    """Return the type of another program's file by its first bytes; "" if unknown."""
    if head[8:9] == b"{":
        return "safetensors file"
    return next((name for magic, name in FOREIGN_BYTES.items() if head.startswith(magic)), "")


def refuse_foreign(folder: Folder, names: Sequence[str]) -> None:
    """Raise CheckpointError for another program's directory, judged by names alone."""
    if MANIFEST in names:
        return
    for ending, program in FOREIGN_NAMES.items():
        if any(name.endswith(ending) and name not in SHARDS.values() for name in names):
            raise CheckpointError(
                f"{folder.path} is a checkpoint of {program}, not of hetero",
                advice="load it with that program into the model, then prepare it",
            )


def nothing(root: Folder, step: int | None) -> NoCheckpoint:
    """Return the error for a directory without the checkpoint, with a list of its contents."""
    names = root.names()
    refuse_foreign(root, names)
    wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
    there = ", ".join(repr(name[:80]) for name in names[:12]) or "nothing"
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return NoCheckpoint(
        f"{root.path} holds no {wanted}; found: {there}{more}",
        advice=f"{NAME_ONE}; a name that ends in .tmp is a save that did not finish",
    )

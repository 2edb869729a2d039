"""Which bytes of a checkpoint lie in which file: values alone (no I/O, no torch).

A rank saves a run of each entry, its *slice*, in a shard of its own. A single rank's slices are
whole entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetero import tensorfile
from hetero.checkpoint.manifest import (
    ITEM_BYTES,
    PAIRS,
    SHARDS,
    UNCUT,
    Manifest,
    SavedTensor,
    Unfit,
    shard_name,
)
from hetero.io import ALIGN, align_up
from hetero.tensorfile import BLOCK

SHARD_BITS = 32
"""A block's seed has the number of the shard above those of entries."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements [first, end) of an entry, in its order; they lie in one shard."""

    number: int
    """The entry's."""
    entry: SavedTensor
    first: int
    end: int

    @property
    def is_whole(self) -> bool:
        return self.end - self.first == self.entry.numel

    @property
    def start_byte(self) -> int:
        """Of the entry."""
        return self.first * ITEM_BYTES[self.entry.dtype]

    @property
    def n_bytes(self) -> int:
        return (self.end - self.first) * ITEM_BYTES[self.entry.dtype]

    @property
    def end_byte(self) -> int:
        return self.start_byte + self.n_bytes

    @property
    def n_blocks(self) -> int:
        return -(-align_up(self.n_bytes) // BLOCK)

    @property
    def label(self) -> str:
        """The slice's name in messages."""
        part = "" if self.is_whole else f" from element {self.first} on"
        return f"{self.entry.label}{part}"

    @property
    def shape(self) -> tuple[int, ...]:
        """As its elements lie."""
        if not self.is_whole:
            return (self.end - self.first,)
        entry = self.entry
        return tuple(entry.shape[dim] for dim in entry.order) if entry.order else entry.shape

    @property
    def key(self) -> str:
        """Its name as a tensor of the shard."""
        entry = self.entry
        name = "/".join(part for part in (entry.kind, entry.name, entry.key) if part)
        name = name.encode("utf-8", "backslashreplace").decode()  # halves of surrogate pairs
        return name if self.is_whole else f"{name}@{self.first}"


@dataclass(frozen=True, slots=True)
class Shard:
    """What one file of a checkpoint holds: slices of entries, by their numbers."""

    number: int
    slices: tuple[Slice, ...]
    crcs: tuple[str, ...] = ()
    """For each slice, eight hexadecimal digits per block; () while it is written."""
    version: int = UNCUT

    @property
    def file(self) -> str:
        return SHARDS.get(self.version, shard_name(self.number))

    @property
    def header(self) -> bytes:
        """The first bytes of the file."""
        return header_of(self.slices) if self.version > 1 else b""

    def seed(self, place: int) -> int:
        """Return the number that the CRCs of a slice begin with."""
        return self.slices[place].number | self.number << SHARD_BITS


def whole(entries: Iterable[SavedTensor]) -> tuple[Slice, ...]:
    """Return entries as slices."""
    return tuple(Slice(number, each, 0, each.numel) for number, each in enumerate(entries))


def only_shard(manifest: Manifest) -> Shard:
    """Return the shard of a checkpoint that one rank saved."""
    return Shard(0, whole(manifest.entries), manifest.crcs, manifest.version)


def header_of(slices: Sequence[Slice]) -> bytes:
    """Return the header of a shard: slices and padding as tensors of safetensors.

    Its bytes are part of the format: to change them is to change the version.
    """
    rows: dict[str, tuple[str, tuple[int, ...]]] = {}
    for number, each in enumerate(slices):
        name, dtype = each.key, each.entry.dtype
        while name in rows:
            name += f"#{number}"
        half = PAIRS.get(dtype)
        rows[name] = (half, (*each.shape, 2)) if half else (dtype, each.shape)
        if padding := -each.n_bytes % ALIGN:
            rows[f"__padding__/{number}"] = "uint8", (padding,)
    tensors = ((name, *row) for name, row in rows.items())
    return tensorfile.header(tensors, notes={"format": "pt"}, align=ALIGN)


Place = tuple[int, int]
"""A shard, and which of its slices."""


def places(entries: Sequence[SavedTensor], shards: Sequence[Shard]) -> list[list[Place]]:
    """Return where each entry lies, from its first element on; raises Unfit unless all of it does,
    and once."""
    found: list[list[Place]] = [[] for _ in entries]
    for number, shard in enumerate(shards):
        for place, each in enumerate(shard.slices):
            found[each.number].append((number, place))
    for entry, there in zip(entries, found, strict=True):
        there.sort(key=lambda at: shards[at[0]].slices[at[1]].first)
        end = 0
        for number, place in there:
            each = shards[number].slices[place]
            if each.first != end:
                wrong = "twice" if each.first < end else "in no shard"
                raise Unfit(f"element {min(end, each.first)} of {entry.label!r} is {wrong}")
            end = each.end
        if end != entry.numel:
            raise Unfit(f"element {end} of {entry.label!r} is in no shard")
    return found

"""The manifest of a checkpoint: values, their JSON, and every check of it (no I/O).

[Note: format]  A checkpoint is a directory ``step-N`` with `MANIFEST` and one shard, a safetensors
file. The shard's header is a function of the entries (`slices.header_of`), has a multiple of
`ALIGN` bytes, and is compared as a whole. The entries follow it in order and without gaps, each
padded with zeros to a multiple of `ALIGN` (the padding is a tensor of the file as well). A CRC
covers each `BLOCK` of an entry's padded bytes, seeded with the numbers of entry and block, so every
byte of the shard is checked in one way, and valid bytes in the wrong place are refused. In format 1
a shard had no header, and another name.

Several ranks save a shard each, in format 3: a run of each entry, by the numbers of its elements,
which say nothing of budgets, chunks or ranks. They are in row-major order, or in that of the
dimensions that the entry names (channels_last). The CRCs are in a part of the manifest next to each
shard (`parts`); together the runs are all of each entry. What one rank saves is of format 2 still.
Where ranks divide tensors, the format is 4: an entry says as well where it is cut along each
dimension, and its elements are numbered box by box (`hetero.boxes`).

The manifest is one line of ASCII JSON. Its first member is the CRC of all bytes after it; later
versions keep that head. CRCs are eight hexadecimal digits per block in one string: 96 GB take 0.8
MB, and parsing makes no object per block. Numbers outside JSON are Python's own tokens (NaN,
Infinity, -Infinity), and floats come back bit for bit, except the payload of a NaN.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple, Protocol

from hetero import tensorfile
from hetero.boxes import Arrangement, Cuts
from hetero.crc import crc32
from hetero.errors import CheckpointCorrupt, CheckpointTooNew, UnsafeCheckpoint
from hetero.io import align_up
from hetero.parse import MAX_DEPTH, Unparsable, json_of
from hetero.tensorfile import BLOCK, MAX_RANK
from hetero.types import format_bytes

FORMAT = "hetero checkpoint"
VERSION = 4
ONE_SHARD = 2  # the version of a checkpoint that one rank saves
UNCUT = 3  # of one that several save, who have each tensor whole
MANIFEST = "MANIFEST.json"
SHARD = "model-0.safetensors"
SHARDS = {1: "r00000.bin", 2: SHARD}  # by version

# Limits of a load. A save keeps them too: it reads its own manifest back.
MAX_MANIFEST_BYTES = 64 * 2**20  # with 8 digits per MiB enough for 8 TB
MAX_ENTRIES = 2**17
MAX_STEP = 10**18 - 1
MAX_NAME = 4096  # characters of a parameter's name
MAX_KEY = 256
MAX_BYTES = 2**50  # of one entry, and of a shard
MAX_SHARDS = 2**16  # and boxes of an entry

PAIRS = {"complex32": "float16", "complex128": "float64"}  # dtypes missing in safetensors
ITEM_BYTES = tensorfile.ITEM_BYTES | {
    dtype: 2 * tensorfile.ITEM_BYTES[half] for dtype, half in PAIRS.items()
}

KIND = re.compile(r"[a-z][a-z0-9_]{0,31}")
CRCS = re.compile(r"[0-9a-f]*")
HEAD = b'{"crc32":"%08x",'
HEAD_BYTES = len(HEAD % 0)
UNSAFE = "no save of hetero writes this: do not use a checkpoint from there"


class Unfit(Exception):
    """A value breaks a rule of the format; the text names the rule."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor of a checkpoint, whole: its name and its layout."""

    kind: str
    """A short word: "param", "state", "master", "buffer", "own_buffer", "extra"."""
    name: str
    """The parameter's own name, any string; never a file's name."""
    key: str
    """Which state, as "exp_avg"; "" otherwise."""
    dtype: str
    """A name of `ITEM_BYTES`."""
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()
    """Of its elements: dimensions, slowest first; () is row-major, the only one of a single shard.
    """
    cuts: Cuts = ()
    """Where it is cut along each dimension; () if it is whole."""

    @property
    def lies(self) -> Arrangement:
        """How its elements follow each other."""
        return Arrangement(self.shape, self.order, self.cuts)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def n_bytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]

    @property
    def n_blocks(self) -> int:
        return -(-align_up(self.n_bytes) // BLOCK)

    @property
    def label(self) -> str:
        """The tensor's name in messages."""
        return " ".join(part[:80] for part in (self.kind, self.name, self.key) if part)


class PartRecord(NamedTuple):
    """What the manifest says of a shard that has a part of its own."""

    n_bytes: int
    """Of the shard, after its header."""
    crc: str
    """Of the part."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that a checkpoint declares: its entries, where they lie, and ``meta``."""

    step: int
    entries: tuple[SavedTensor, ...]
    """In shard order, if there is one shard."""
    crcs: tuple[str, ...]
    """For each entry, eight hexadecimal digits per block; () where parts have them."""
    meta: dict[str, Any]
    version: int = ONE_SHARD
    parts: tuple[PartRecord, ...] = ()
    """One for each shard of several ranks."""


class Sized(Protocol):
    """An entry, or a run of one."""

    @property
    def n_bytes(self) -> int: ...


def layout(entries: Iterable[Sized]) -> list[int]:
    """Return each entry's first byte after the header of its shard, and last the end of all."""
    return list(accumulate((align_up(entry.n_bytes) for entry in entries), initial=0))


def version_for(entries: Iterable[SavedTensor]) -> int:
    """Return the oldest version in which several ranks can save entries."""
    return VERSION if any(entry.cuts for entry in entries) else UNCUT


def shard_name(number: int) -> str:
    return f"model-{number}.safetensors"


def part_name(number: int) -> str:
    return f"model-{number}.json"


def encode(manifest: Manifest) -> bytes:
    """Return a manifest's bytes; raises Unfit if a load would return something else."""
    record = {
        "format": FORMAT,
        "version": manifest.version,
        "step": manifest.step,
        **(of_parts(manifest) if manifest.parts else of_one_shard(manifest)),
        "meta": plain(manifest.meta),
    }
    try:
        body = json.dumps(record, separators=(",", ":"))[1:].encode("ascii")
    except ValueError as error:  # an integer of thousands of digits
        raise Unfit(f"a value is no JSON: {error}") from None
    raw = HEAD % crc32(body) + body
    found = _decode(raw)
    if found.entries != manifest.entries or repr(found.meta) != repr(record["meta"]):
        raise Unfit("a string does not survive JSON: it has surrogates that form a pair")
    return raw


def of_one_shard(manifest: Manifest) -> dict[str, Any]:
    """Return the fields that say where entries lie in a single shard."""
    offsets = layout(manifest.entries)
    index = []
    for entry, offset, crcs in zip(manifest.entries, offsets[:-1], manifest.crcs, strict=True):
        piece = {"shard": 0, "offset": offset, "slice": whole(entry.shape), "crcs": crcs}
        index.append({**entry_record(entry), "slices": [piece]})
    shard = {"file": SHARDS[manifest.version], "bytes": offsets[-1]}
    return {"shards": [shard], "index": index}


def of_parts(manifest: Manifest) -> dict[str, Any]:
    """Return the fields that name the parts, which say where entries lie."""
    shards = [
        {
            "file": shard_name(number),
            "bytes": part.n_bytes,
            "part": part_name(number),
            "crc": part.crc,
        }
        for number, part in enumerate(manifest.parts)
    ]
    index = [{**entry_record(entry), "order": list(entry.order)} for entry in manifest.entries]
    if manifest.version > UNCUT:
        for record, entry in zip(index, manifest.entries, strict=True):
            record["cuts"] = [list(each) for each in entry.cuts]
    return {"shards": shards, "index": index}


def entry_record(entry: SavedTensor) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "name": entry.name,
        "key": entry.key,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
    }


def whole(shape: Sequence[int]) -> str:
    """Return the slice of a whole tensor: ``(3, 4) -> "0:3,0:4"``."""
    return ",".join(f"0:{size}" for size in shape)


def plain(value: Any, depth: int = 2) -> Any:
    """Return ``value`` as JSON returns it: tuples are lists, subclasses their base.

    Raises Unfit for a key that is no string, for nesting beyond `MAX_DEPTH`, and for values outside
    JSON.
    """
    if depth > MAX_DEPTH:
        raise Unfit(f"meta is nested deeper than {MAX_DEPTH - 2}")
    if isinstance(value, Mapping):
        odd = [key for key in value if not isinstance(key, str)]
        if odd:
            raise Unfit(f"meta has the key {odd[0]!r}, and keys are strings")
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value]
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    raise Unfit(f"meta has a {type(value).__name__}, which JSON does not have")


# -- reading a manifest --------------------------------------------------------------------------


def decode(raw: bytes, where: str) -> Manifest:
    """Return the manifest in the bytes of the file ``where``; nothing in them is trusted.

    Raises CheckpointCorrupt if the bytes are not those saved, CheckpointTooNew for a later format,
    UnsafeCheckpoint if they declare values that no save declares.
    """
    try:
        check_crc(raw)
    except Unfit as error:
        raise CheckpointCorrupt(
            f"{where} is damaged: {error}", advice="use another checkpoint"
        ) from None
    try:
        return _decode(raw)
    except Unfit as error:
        raise UnsafeCheckpoint(f"{where}: {error}", advice=UNSAFE) from None
    except CheckpointTooNew as error:
        raise CheckpointTooNew(f"{where} {error.args[0]}", advice=error.advice) from None


def check_crc(raw: bytes) -> None:
    """Raise Unfit unless the first member of the JSON is the CRC of all bytes after it."""
    if len(raw) <= HEAD_BYTES or raw[:10] != HEAD[:10]:
        raise Unfit(f"at byte 0, it does not begin as a manifest does but with {raw[:16]!r}")
    expected = HEAD % crc32(memoryview(raw)[HEAD_BYTES:])
    if raw[:HEAD_BYTES] != expected:
        raise Unfit(f"its CRC is {raw[10:18]!r}, that of its bytes is {expected[10:18]!r}")


def _decode(raw: bytes) -> Manifest:
    record = parse(raw)
    version = check_version(record)
    kinds = {"crc32": str, "format": str, "version": int, "step": int}
    kinds |= {"shards": list, "index": list, "meta": dict}
    *_, step, shards, index, meta = fields("the manifest", record, kinds)
    if not 0 <= step <= MAX_STEP:
        raise Unfit("its step is negative or has more than 18 digits")
    if len(index) > MAX_ENTRIES:
        raise Unfit(f"{len(index)} entries are more than {MAX_ENTRIES}")
    entries, crcs, end = [], [], 0
    has_parts = version > ONE_SHARD
    for number, given in enumerate(index):
        what = f"entry {number}"
        if version > UNCUT:
            *named, order, cuts = fields(what, given, ENTRY_FIELDS | {"order": list, "cuts": list})
            entry = entry_of(what, named, order, cuts)
        elif has_parts:
            *named, order = fields(what, given, ENTRY_FIELDS | {"order": list})
            entry = entry_of(what, named, order)
        else:
            entry, digits = index_entry(what, given, end)
            crcs.append(digits)
        entries.append(entry)
        end += align_up(entry.n_bytes)
    if not has_parts:
        check_shards(shards, SHARDS[version], end)
    check_unique(entries)
    parts = part_records(shards) if has_parts else ()
    return Manifest(step, tuple(entries), tuple(crcs), meta, version, parts)


def parse(raw: bytes) -> Any:
    """Return the JSON, after bounding the cost of parsing it; refuses duplicate keys."""
    try:
        return json_of(raw)
    except Unparsable as error:
        raise Unfit(str(error)) from None


def check_version(record: Any) -> int:
    """Return the version; raises CheckpointTooNew for a later one, Unfit for none."""
    if type(record) is not dict or record.get("format") != FORMAT:
        raise Unfit(f'it does not say that it is a "{FORMAT}"')
    version = record.get("version")
    if type(version) is not int or version < 1:
        raise Unfit("its version is no positive number")
    if version > VERSION:
        raise CheckpointTooNew(
            f"is of format version {version}; this hetero reads up to {VERSION}",
            advice="load it with the version of hetero that wrote it, or a later one",
        )
    return version


def fields(what: str, record: Any, kinds: Mapping[str, type]) -> list[Any]:
    """Return the values of an object with exactly these keys and types, in their order."""
    if type(record) is not dict:
        raise Unfit(f"{what} is no object")
    if record.keys() != kinds.keys():
        odd = sorted(record.keys() ^ kinds.keys())[0]
        raise Unfit(f"{what} {'lacks' if odd in kinds else 'has the unknown'} field {odd[:80]!r}")
    for key, kind in kinds.items():
        if type(record[key]) is not kind:
            raise Unfit(f"{what}: {key} is of type {type(record[key]).__name__}")
    return [record[key] for key in kinds]


ENTRY_FIELDS = {"kind": str, "name": str, "key": str, "dtype": str, "shape": list}
SLICE_FIELDS = {"shard": int, "offset": int, "slice": str, "crcs": str}
PART_FIELDS = {"file": str, "bytes": int, "part": str, "crc": str}


def index_entry(what: str, record: Any, end: int) -> tuple[SavedTensor, str]:
    """Return an entry of the index and its CRCs; it must start at byte ``end`` of the shard."""
    *named, slices = fields(what, record, ENTRY_FIELDS | {"slices": list})
    entry = entry_of(what, named)
    if len(slices) != 1:
        raise Unfit(f"{what} has {len(slices)} slices, and one holds it all")
    shard, offset, part, crcs = fields(f"{what}'s slice", slices[0], SLICE_FIELDS)
    if shard != 0:
        raise Unfit(f"{what} lies in a shard that is not there")
    if part != whole(entry.shape):
        raise Unfit(f"{what}'s slice {part[:80]!r} is not all of it")
    if offset != end:
        wrong = "overlaps what is before it" if offset < end else "leaves a hole before it"
        raise Unfit(f"{what} {wrong}: it starts at byte {clip(offset)}, not {end}")
    if len(crcs) != 8 * entry.n_blocks or not CRCS.fullmatch(crcs):
        raise Unfit(f"{what} does not have 8 hexadecimal digits for each of its blocks")
    return entry, crcs


def entry_of(
    what: str, named: Sequence[Any], order: Sequence[Any] = (), cuts: Sequence[Any] = ()
) -> SavedTensor:
    """Return the entry of the values of `ENTRY_FIELDS`."""
    kind, name, key, dtype, shape = named
    if any(type(each) is not list for each in cuts):
        raise Unfit(f"{what}: its cuts are no lists")
    sides = tuple(tuple(each) for each in cuts)
    entry = SavedTensor(kind, name, key, dtype, tuple(shape), tuple(order), sides)
    check_entry(what, entry)
    return entry


def part_records(shards: Sequence[Any]) -> tuple[PartRecord, ...]:
    """Return what is said of shards that have parts."""
    if not 0 < len(shards) <= MAX_SHARDS:
        raise Unfit(f"there are {len(shards)} shards")
    found = []
    for number, given in enumerate(shards):
        what = f"shard {number}"
        file, n_bytes, part, crc = fields(what, given, PART_FIELDS)
        for name, right in ((file, shard_name(number)), (part, part_name(number))):
            if name != right:
                raise Unfit(f"the file {name[:300]!r} is not {right}: names are ours")
        if not 0 <= n_bytes <= MAX_BYTES or len(crc) != 8 or not CRCS.fullmatch(crc):
            raise Unfit(f"{what} has no size, or no CRC")
        found.append(PartRecord(n_bytes, crc))
    return tuple(found)


def check_entry(what: str, entry: SavedTensor) -> None:
    """Raise Unfit unless a checkpoint may have an entry of this kind, name, shape and size."""
    if not KIND.fullmatch(entry.kind):
        raise Unfit(f"{what}: the kind {entry.kind[:80]!r} is no short lower-case word")
    if len(entry.name) > MAX_NAME or len(entry.key) > MAX_KEY:
        raise Unfit(f"{what}: its name or key is longer than {MAX_NAME} or {MAX_KEY} characters")
    if entry.dtype not in ITEM_BYTES:
        raise Unfit(f"{what}: there is no dtype {entry.dtype[:80]!r}")
    if len(entry.shape) > MAX_RANK:
        raise Unfit(f"{what}: {len(entry.shape)} dimensions are more than {MAX_RANK}")
    if any(type(size) is not int or not 0 <= size <= MAX_BYTES for size in entry.shape):
        raise Unfit(f"{what}: a size in its shape is no number from 0 to {MAX_BYTES}")
    dims = [dim for dim in entry.order if type(dim) is int]
    if entry.order and (len(dims) < len(entry.order) or sorted(dims) != [*range(len(entry.shape))]):
        raise Unfit(f"{what}: its order is not one of its dimensions")
    check_cuts(what, entry)
    # empty tensors too: strides are products of the sizes that are not 0
    if prod(max(size, 1) for size in entry.shape) * ITEM_BYTES[entry.dtype] > MAX_BYTES:
        raise Unfit(f"{what} is larger than {format_bytes(MAX_BYTES)}")


def check_cuts(what: str, entry: SavedTensor) -> None:
    """Raise Unfit unless an entry is cut along its own dimensions, into boxes with elements."""
    if not entry.cuts:
        return
    if len(entry.cuts) != len(entry.shape) or not any(entry.cuts):
        raise Unfit(f"{what}: its cuts are not of its dimensions")
    for at, size in zip(entry.cuts, entry.shape, strict=True):
        if any(type(each) is not int for each in at):
            raise Unfit(f"{what}: it is cut where there is no number")
        if any(a >= b for a, b in pairwise((0, *at, size))) and at:
            raise Unfit(f"{what}: its cuts do not rise from 0 to {clip(size)}")
    if prod(len(at) + 1 for at in entry.cuts) > MAX_SHARDS:
        raise Unfit(f"{what} is cut into more than {MAX_SHARDS} boxes")


def check_shards(shards: list[Any], name: str, n_bytes: int) -> None:
    if len(shards) != 1:
        raise Unfit(f"{len(shards)} shards, and this version has one")
    file, size = fields("the shard", shards[0], {"file": str, "bytes": int})
    if file != name:
        raise Unfit(f"the file {file[:300]!r} is not {name}: names are ours")
    if size != n_bytes or n_bytes > MAX_BYTES:
        raise Unfit(f"the shard is declared with {clip(size)} bytes, its entries take {n_bytes}")


def check_unique(entries: Sequence[SavedTensor]) -> None:
    """Raise Unfit if two entries have the same kind, name and key."""
    seen: set[tuple[str, str, str]] = set()
    for entry in entries:
        key = (entry.kind, entry.name, entry.key)
        if key in seen:
            raise Unfit(f"the entry {entry.label!r} is there twice")
        seen.add(key)


def clip(number: int) -> str:
    """Return a number for a message, in few digits."""
    return str(number) if abs(number) < 10**20 else f"about 2^{number.bit_length() - 1}"

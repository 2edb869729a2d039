"""Safetensors: the one reader and writer of headers, and the CRCs of blocks (floor 0, no torch).

A file is the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and
place of every tensor) and the tensors back to back, each in row-major order.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hetero.crc import crc32
from hetero.errors import CheckpointCorrupt, ConfigError, StateError, UnsafeCheckpoint
from hetero.io import ALIGN, File, Folder
from hetero.parse import Unparsable, json_of
from hetero.types import format_bytes

SUFFIX = ".safetensors"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PART = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
MAX_HEADER = 100_000_000  # bytes: the limit of the safetensors library
NOTES_BYTES = 256  # of a header, for notes and padding
MAX_RANK = 64  # torch's own limit
MAX_INT = 2**63  # above any tensor's sizes
BLOCK = 2**20  # bytes under one CRC
SEED = struct.Struct("<QQ")  # number of the tensor, number of the block
TABLE = (  # the format's word, torch's name, bytes of an element
    ("BOOL", "bool", 1),
    ("U8", "uint8", 1),
    ("I8", "int8", 1),
    ("U16", "uint16", 2),
    ("I16", "int16", 2),
    ("U32", "uint32", 4),
    ("I32", "int32", 4),
    ("U64", "uint64", 8),
    ("I64", "int64", 8),
    ("F8_E4M3", "float8_e4m3fn", 1),
    ("F8_E4M3FNUZ", "float8_e4m3fnuz", 1),
    ("F8_E5M2", "float8_e5m2", 1),
    ("F8_E5M2FNUZ", "float8_e5m2fnuz", 1),
    ("F8_E8M0", "float8_e8m0fnu", 1),
    ("F16", "float16", 2),
    ("BF16", "bfloat16", 2),
    ("F32", "float32", 4),
    ("F64", "float64", 8),
    ("C64", "complex64", 8),
)
DTYPES = {code: dtype for code, dtype, _ in TABLE}
CODES = {dtype: code for code, dtype, _ in TABLE}
ITEM_BYTES = {dtype: n_bytes for _, dtype, n_bytes in TABLE}


class StoredTensor(NamedTuple):
    """A tensor's place in its file."""

    dtype: str
    """torch's name, as "bfloat16"."""
    shape: tuple[int, ...]
    start: int
    """First byte, from the beginning of the file."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


# -- writing -------------------------------------------------------------------------------------


def header(
    tensors: Iterable[tuple[str, str, Sequence[int]]],
    *,
    notes: Mapping[str, str] | None = None,
    align: int = 8,
) -> bytes:
    """Return the beginning of a file of tensors (name, dtype, shape), up to the first of them.
    Blanks pad it to a multiple of ``align`` bytes. Raises ConfigError if no reader would take it.
    """
    found: dict[str, Any] = {"__metadata__": notes} if notes else {}
    at = 0
    for name, dtype, shape in tensors:
        end = at + math.prod(shape) * ITEM_BYTES[dtype]
        found[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(found, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % align)
    if len(text) > MAX_HEADER:
        raise ConfigError(
            f"a file of {len(found)} tensors has a header of {len(text)} bytes; readers of"
            f" safetensors take {MAX_HEADER}",
            advice="give modules shorter names, or stack parameters of many small modules",
        )
    return len(text).to_bytes(8, "little") + text


def header_bytes(name: str, dtype: str, shape: Sequence[int]) -> int:
    """Return the most bytes that a tensor takes of a header."""
    row = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [MAX_INT, MAX_INT]}
    return len(json.dumps({name: row}, separators=(",", ":")))


def header_room() -> int:
    """Return the bytes of a header for its tensors."""
    return MAX_HEADER - NOTES_BYTES


def write(folder: Folder, name: str, n_bytes: int, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a new file of ``n_bytes``, piece by piece, durably. Raises StateError if the pieces
    have another number of bytes."""
    with folder.create(name) as file:
        file.reserve(n_bytes)
        at = 0
        for piece in pieces:
            file.write(at, memoryview(piece))
            at += len(piece)
        if at != n_bytes:
            raise StateError(
                f"{name} came to {at} bytes instead of {n_bytes}",
                advice="do not change the model while it is exported",
            )
        file.sync()


def block_crcs(number: int, start: int, data: memoryview) -> list[int]:
    """Return the CRCs of the blocks of ``data``, which lies at byte ``start`` of a tensor. Zeros
    pad the last one to a multiple of `ALIGN`. The seed detects bytes of another place."""
    crcs = [
        crc32(data[at : at + BLOCK], crc32(SEED.pack(number, (start + at) // BLOCK)))
        for at in range(0, len(data), BLOCK)
    ]
    padding = -len(data) % ALIGN
    return crcs[:-1] + [crc32(bytes(padding), crcs[-1])] if padding else crcs


# -- reading headers -----------------------------------------------------------------------------


def read_header(file: File) -> dict[str, StoredTensor]:
    """Return the tensors of a file in the order of their bytes, which they fill exactly.

    Raises CheckpointCorrupt for a file that is cut short or not safetensors, UnsafeCheckpoint for
    declarations that no writer makes, ConfigError for a dtype that torch does not have.
    """
    size = file.size()
    if size < 8:
        raise cut_short(file.path, f"has {size} bytes, fewer than the shortest header")
    first = bytes_at(file, 0, 8)
    if first == b"version ":
        raise CheckpointCorrupt(
            f"{file.path} is a pointer of Git LFS, not the file", advice="run: git lfs pull"
        )
    length = int.from_bytes(first, "little")
    if length > MAX_HEADER:
        raise unsafe(file.path, f"declares a header of {length} bytes; {MAX_HEADER} are allowed")
    if 8 + length > size:
        raise cut_short(file.path, f"has {size} bytes and declares a header of {length}")
    found = parsed(bytes_at(file, 8, length), file.path)
    notes = found.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(v, str) for v in notes.values()):
        raise unsafe(file.path, "declares a __metadata__ that is not made of strings")
    return laid_out(file.path, found, 8 + length, size)


def read_index(file: File, where: str) -> dict[str, str]:
    """Return ``{tensor: file name}`` of an index, and close it."""
    with file:
        size = file.size()
        if size > MAX_HEADER:
            raise unsafe(where, f"is an index of {format_bytes(size)}")
        names = parsed(bytes_at(file, 0, size), where).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(v, str) for v in names.values()):
        raise CheckpointCorrupt(
            f"{where} has no weight_map of names to files", advice="it is no index of safetensors"
        )
    for name in set(names.values()):
        if not name.endswith(SUFFIX) or name.startswith(".") or "/" in name or "\0" in name:
            raise unsafe(where, f"names the file {name[:200]!r}, which is no plain *{SUFFIX}")
    return names


def bytes_at(file: File, offset: int, n_bytes: int) -> bytes:
    """Return a few bytes of a file."""
    raw = bytearray(n_bytes)
    file.read(offset, memoryview(raw))
    return bytes(raw)


def parsed(text: bytes, where: str) -> dict[str, Any]:
    """Return a JSON object; duplicate names and NaN are refused."""
    try:
        found = json_of(text, constants=False)
    except Unparsable as error:
        raise CheckpointCorrupt(
            f"{where} has a header that cannot be read: {error}",
            advice="it is damaged, or no safetensors at all: use another copy",
        ) from error
    if not isinstance(found, dict):
        raise CheckpointCorrupt(
            f"{where} has a header that is no JSON object", advice="use another copy"
        )
    return found


def laid_out(
    where: str, declared: Mapping[str, Any], start: int, size: int
) -> dict[str, StoredTensor]:
    """Return tensors sorted by offset; raises unless they fill [start, size) without a gap."""
    tensors = {name: checked(where, name, raw, start) for name, raw in declared.items()}
    # an empty tensor lies where its successor begins: it comes first
    order = sorted(tensors, key=lambda name: (tensors[name].start, tensors[name].n_bytes))
    at = start
    for name in order:
        if tensors[name].start != at:
            kind = "a gap before" if tensors[name].start > at else "an overlap at"
            raise unsafe(where, f"declares {kind} {name[:200]!r}")
        at += tensors[name].n_bytes
    if at > size:
        raise cut_short(where, f"has {size} bytes; its tensors need {at}")
    if at < size:
        raise unsafe(where, f"has {size - at} bytes that belong to no tensor")
    return {name: tensors[name] for name in order}


def checked(where: str, name: str, raw: Any, start: int) -> StoredTensor:
    raw = raw if isinstance(raw, dict) else {}
    code, shape, offsets = (raw.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (isinstance(code, str) and sizes(shape) and sizes(offsets) and len(offsets) == 2):
        raise unsafe(where, f"declares {name[:200]!r} without a dtype, a shape or two offsets")
    if code not in DTYPES:
        raise ConfigError(
            f"{name[:200]!r} in {where} is of dtype {code[:40]!r}",
            advice=f"hetero reads {', '.join(DTYPES)}",
        )
    first, end = offsets
    dtype = DTYPES[code]
    if math.prod(shape) * ITEM_BYTES[dtype] != end - first:
        raise unsafe(
            where, f"declares {name[:200]!r} of {end - first} bytes, which its shape is not"
        )
    return StoredTensor(dtype, tuple(shape), start + first)


def sizes(value: Any) -> bool:
    """Whether a value is a list of sizes, at most `MAX_RANK`."""
    fits = isinstance(value, list) and len(value) <= MAX_RANK
    return fits and all(type(n) is int and 0 <= n < MAX_INT for n in value)


def unsafe(where: str, fault: str) -> UnsafeCheckpoint:
    """Return the error for a declaration that no writer would make."""
    return UnsafeCheckpoint(f"{where} {fault}", advice="do not use it: get a copy you can trust")


def cut_short(where: str, fault: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"{where} {fault}", advice="it was cut short: download or export it again"
    )

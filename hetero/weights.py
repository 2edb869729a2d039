"""Safetensors files, read in pieces (floor 0).

A file is the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and
place of every tensor) and the tensors back to back, each in row-major order. What a header or an
index declares is checked before anything is done with it.

[Note: links to weights]  The Hugging Face cache keeps files as links to blobs in another folder.
The user names a directory, so the files that lie in it may be links: they are resolved once, and
what they lead to is opened as a regular file. Names in an index are single names, so that an index
leads nowhere else.
"""

from __future__ import annotations

import difflib
import errno
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hetero.errors import (
    CheckpointCorrupt,
    ConfigError,
    DiskReadError,
    StateError,
    UnsafeCheckpoint,
)
from hetero.io import IO, File, Folder, aligned_buffer
from hetero.parse import Unparsable, json_of
from hetero.types import format_bytes

SUFFIX = ".safetensors"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes: what the safetensors library reads
MAX_INT = 2**63  # sizes beyond are no tensor's
PART = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """Where one tensor lies in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte, from the beginning of the file."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Weights:
    """The tensors of a safetensors file, or of a directory of them, without holding any.

    Args:
        directory: one ``*.safetensors`` file, or a directory with ``model.safetensors``, else with
            ``model.safetensors.index.json`` and the files it names, else with other
            ``*.safetensors`` files, which are taken together.
        io: a fake twin of the file system, for tests.

    With an index, its names are the tensors; what its files hold besides is left alone. Links: see
    [Note: links to weights].

    Raises:
        ConfigError: there is nothing of that kind (it says what there is), or a dtype that torch
            does not have.
        CheckpointCorrupt: a file is missing, cut short or not safetensors.
        UnsafeCheckpoint: a header or an index declares what no writer writes.
        StorageError: the drive failed.
    """

    def __init__(self, directory: str | Path, *, io: IO | None = None) -> None:
        self._io = io or IO()
        self._given = os.fspath(directory)
        self._files: list[File] = []
        self._entries: dict[str, tuple[File, Entry]] = {}
        self._spare: memoryview | None = None
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def names(self) -> list[str]:
        """Return the tensors' names, in the order of their bytes, file by file."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape; raises ConfigError for a name that is not there."""
        return self._find(name)[1].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype; raises ConfigError for a name that is not there."""
        return self._find(name)[1].dtype

    def pieces(self, name: str, numel: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Read a tensor piece by piece, in row-major order.

        Yields ``(first element, piece)``: pieces are 1-D CPU tensors of at most ``numel`` elements
        that cover the tensor exactly; an empty tensor has none. They are views of one buffer, so a
        piece is good until the next one is asked for. What was read leaves the page cache.

        Raises ConfigError for a name that is not there, TruncatedChunk where the file has been cut
        short since, DiskReadError where it cannot be read.
        """
        if numel < 1:
            raise ConfigError(f"pieces of {numel} elements", advice="ask for at least one")
        return self._read(*self._find(name), numel)

    def read(self, name: str, into: memoryview) -> None:
        """Read a tensor's bytes, in row-major order, into memory of that many bytes.

        What was read leaves the page cache. Raises ConfigError for a name that is not there,
        StateError for memory of another size, and otherwise as `pieces`.
        """
        file, entry = self._find(name)
        if len(into) != entry.n_bytes:
            raise StateError(
                f"{name!r} has {entry.n_bytes} bytes, and room for {len(into)} was given",
                advice="ask for shape and dtype first",
            )
        if entry.n_bytes:
            file.read(entry.start, into)

    def close(self) -> None:
        """Close the files; again is no error. Pieces that are still held stay as they are."""
        for file in self._files:
            file.close()
        self._files.clear()
        self._spare = None

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, name: str) -> tuple[File, Entry]:
        if not self._files:
            raise StateError(f"the weights of {self._given} are closed", advice="open them again")
        if name not in self._entries:
            near = difflib.get_close_matches(name, self._entries, n=3) or list(self._entries)[:3]
            raise ConfigError(
                f"{self._given} has no tensor {name!r}",
                advice=f"it has {len(self._entries)}, as {', '.join(near)}",
            )
        return self._entries[name]

    def _read(self, file: File, entry: Entry, numel: int) -> Iterator[tuple[int, torch.Tensor]]:
        if not entry.numel:
            return
        step, size = min(numel, entry.numel), entry.dtype.itemsize
        buffer, self._spare = self._spare, None  # nobody else's while this one reads
        if buffer is None or len(buffer) < step * size:
            buffer = aligned_buffer(step * size)
        try:
            for first in range(0, entry.numel, step):
                count = min(step, entry.numel - first)
                part = buffer[: count * size]
                file.read(entry.start + first * size, part)
                yield first, torch.frombuffer(part, dtype=entry.dtype, count=count)
        finally:
            self._spare = buffer

    # -- opening ---------------------------------------------------------------------------------

    def _open(self) -> None:
        folder = self._folder()
        if folder is None:
            self._open_file()
            return
        with folder:
            there = folder.names()
        parts = [name for name in there if name.endswith(SUFFIX) and not name.startswith(".")]
        if SINGLE in parts:
            self._take(SINGLE, None)
        elif INDEX in there:
            self._open_indexed(there)
        elif parts:
            check_complete(self._given, parts)
            for name in parts:
                self._take(name, None)
        else:
            raise ConfigError(
                f"{self._given} has no {SINGLE} and no other *{SUFFIX}; it has {some(there)}",
                advice="name a directory of safetensors; pickles (*.bin, *.pt) are not read:"
                " load them with torch and save them with hetero.export",
            )

    def _folder(self) -> Folder | None:
        """Return the directory that was named, or None where it is a file."""
        try:
            return Folder.open(self._given, self._io)
        except (DiskReadError, ValueError) as error:
            number = getattr(error, "errno", errno.ENOENT)
            if number == errno.ENOTDIR:
                return None
            if number == errno.ENOENT:
                raise ConfigError(
                    f"there is no {self._given}",
                    advice=f"name a directory of *{SUFFIX} files, or one such file",
                ) from error
            raise

    def _open_file(self) -> None:
        name = os.path.basename(self._given)
        if not name.endswith(SUFFIX):
            raise ConfigError(
                f"{self._given} is a file that is not called *{SUFFIX}",
                advice=f"name a *{SUFFIX} file, or the directory that holds the files",
            )
        self._given = os.path.dirname(self._given) or "."
        self._take(name, None)

    def _open_indexed(self, there: Sequence[str]) -> None:
        where = os.path.join(self._given, INDEX)
        by_file: dict[str, set[str]] = {}
        for name, file in read_index(self._regular(INDEX), where).items():
            by_file.setdefault(file, set()).add(name)
        missing = sorted(by_file.keys() - set(there))
        if missing:
            raise CheckpointCorrupt(
                f"{where} names {some(missing)}, which {self._given} does not have",
                advice="the copy is not complete: download or export it again",
            )
        for file in sorted(by_file):
            self._take(file, by_file[file])

    def _take(self, name: str, wanted: set[str] | None) -> None:
        """Open one file and note its tensors, or those of them that are wanted."""
        file = self._regular(name)
        self._files.append(file)
        entries = read_header(file)
        lost = sorted(set() if wanted is None else wanted - entries.keys())
        if lost:
            raise CheckpointCorrupt(
                f"{file.path} lacks {some(lost)}, which {INDEX} places in it",
                advice="the files are not of one export: download or export them again",
            )
        for key, entry in entries.items():
            if wanted is not None and key not in wanted:
                continue
            if key in self._entries:
                raise ConfigError(
                    f"{key!r} is in {self._entries[key][0].path} and in {file.path}",
                    advice="name the one file that is meant, or add an index",
                )
            self._entries[key] = file, entry

    def _regular(self, name: str) -> File:
        """Open a file of the directory, through links: see [Note: links to weights]."""
        real = os.path.realpath(os.path.join(self._given, name))
        with Folder.open(os.path.dirname(real), self._io) as folder:
            return folder.file(os.path.basename(real))


def some(names: Sequence[str]) -> str:
    """Return the first few names for a message."""
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return (", ".join(repr(name[:80]) for name in names[:6]) or "nothing") + more


def check_complete(where: str, names: Sequence[str]) -> None:
    """Refuse ``x-00001-of-00003.safetensors`` without its siblings, where no index lists them."""
    have: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if found := PART.fullmatch(name):
            have.setdefault((found[1], found[3]), set()).add(int(found[2]))
    for (stem, total), numbers in have.items():
        if len(numbers) != int(total):
            raise CheckpointCorrupt(
                f"{where} has {len(numbers)} of the {int(total)} files {stem}-*-of-{total}{SUFFIX}",
                advice="the copy is not complete: download or export it again",
            )


# -- what files declare --------------------------------------------------------------------------


def read_index(file: File, where: str) -> dict[str, str]:
    """Return ``{tensor: file name}`` of an index, and close it."""
    with file:
        size = file.size()
        if size > MAX_HEADER:
            raise unsafe(where, f"is an index of {format_bytes(size)}")
        found = parsed(file, 0, size, where)
    names = found.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(v, str) for v in names.values()):
        raise CheckpointCorrupt(
            f"{where} has no weight_map of names to files", advice="it is no index of safetensors"
        )
    for name in set(names.values()):
        if not name.endswith(SUFFIX) or name.startswith(".") or "/" in name or "\0" in name:
            raise unsafe(where, f"names the file {name[:200]!r}, which is no plain *{SUFFIX}")
    return names


def read_header(file: File) -> dict[str, Entry]:
    """Return the tensors of a file in the order of their bytes, which they fill exactly."""
    size = file.size()
    if size < 8:
        raise cut_short(file.path, f"has {size} bytes, fewer than the shortest header")
    first = memoryview(bytearray(8))
    file.read(0, first)
    if bytes(first) == b"version ":
        raise CheckpointCorrupt(
            f"{file.path} is a pointer of Git LFS, not the file", advice="run: git lfs pull"
        )
    length = int.from_bytes(first, "little")
    if length > MAX_HEADER:
        raise unsafe(file.path, f"declares a header of {length} bytes; {MAX_HEADER} are allowed")
    if 8 + length > size:
        raise cut_short(file.path, f"has {size} bytes and declares a header of {length}")
    found = parsed(file, 8, length, file.path)
    notes = found.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(v, str) for v in notes.values()):
        raise unsafe(file.path, "declares a __metadata__ that is not made of strings")
    return laid_out(file.path, found, 8 + length, size)


def parsed(file: File, offset: int, n_bytes: int, where: str) -> dict[str, Any]:
    """Return a JSON object of a file; a name that comes twice, or NaN, is no JSON here."""
    text = memoryview(bytearray(n_bytes))
    file.read(offset, text)
    try:
        found = json_of(bytes(text), constants=False)
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


def laid_out(where: str, declared: Mapping[str, Any], start: int, size: int) -> dict[str, Entry]:
    """Return entries sorted by offset; raises unless they fill [start, size) without a gap."""
    entries = {name: checked(where, name, raw, start) for name, raw in declared.items()}
    # an empty tensor lies where its successor begins: it comes first
    order = sorted(entries, key=lambda name: (entries[name].start, entries[name].n_bytes))
    at = start
    for name in order:
        if entries[name].start != at:
            kind = "a gap before" if entries[name].start > at else "an overlap at"
            raise unsafe(where, f"declares {kind} {name[:200]!r}")
        at += entries[name].n_bytes
    if at > size:
        raise cut_short(where, f"has {size} bytes; its tensors need {at}")
    if at < size:
        raise unsafe(where, f"has {size - at} bytes that belong to no tensor")
    return {name: entries[name] for name in order}


def checked(where: str, name: str, raw: Any, start: int) -> Entry:
    """Return one tensor's entry as its header declares it."""
    raw = raw if isinstance(raw, dict) else {}
    dtype, shape, offsets = (raw.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (isinstance(dtype, str) and sizes(shape) and sizes(offsets) and len(offsets) == 2):
        raise unsafe(where, f"declares {name[:200]!r} without a dtype, a shape or two offsets")
    if dtype not in DTYPES:
        raise ConfigError(
            f"{name[:200]!r} in {where} is of dtype {dtype[:40]!r}",
            advice=f"hetero reads {', '.join(DTYPES)}",
        )
    first, end = offsets
    if bounded_product(shape) * DTYPES[dtype].itemsize != end - first:
        raise unsafe(
            where, f"declares {name[:200]!r} of {end - first} bytes, which its shape is not"
        )
    return Entry(DTYPES[dtype], tuple(shape), start + first)


def sizes(value: Any) -> bool:
    """Whether a value is a list of sizes."""
    return isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < MAX_INT for n in value
    )


def bounded_product(shape: Sequence[int]) -> int:
    """Return the number of elements; a hostile shape's is cut off where it passes 64 bits."""
    if 0 in shape:
        return 0
    numel = 1
    for n in shape:
        numel *= n
        if numel >= MAX_INT:
            break
    return numel


def unsafe(where: str, what: str) -> UnsafeCheckpoint:
    """Return the error for a declaration that no writer makes."""
    return UnsafeCheckpoint(f"{where} {what}", advice="do not use it: get a copy you can trust")


def cut_short(where: str, what: str) -> CheckpointCorrupt:
    """Return the error for a file that ends too early."""
    return CheckpointCorrupt(
        f"{where} {what}", advice="it was cut short: download or export it again"
    )

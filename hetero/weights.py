"""Weights of one safetensors file or a directory of them, read in pieces (floor 0).

[Note: links to weights]  The Hugging Face cache keeps files as links to blobs in another folder, so
the files of a directory may be links: they are resolved once, and their targets opened as regular
files. Names in an index are single names: it leads nowhere else.
"""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from hetero.errors import CheckpointCorrupt, ConfigError, DiskReadError, StateError
from hetero.io import IO, File, Folder, aligned_buffer
from hetero.tensorfile import (
    INDEX,
    PART,
    SINGLE,
    SUFFIX,
    StoredTensor,
    read_header,
    read_index,
)


class Weights:
    """The tensors of a safetensors file, or of a directory of them, read on request.

    Args:
        directory: one ``*.safetensors`` file, or a directory with ``model.safetensors``, else with
            ``model.safetensors.index.json`` and the files it names, else with other
            ``*.safetensors`` files, all together.
        io: a fake twin of the file system, for tests.

    With an index, its names are the tensors; others in its files are ignored. Links: see
    [Note: links to weights].

    Raises:
        ConfigError: there are no such files (it lists those there are), or a dtype that torch does
            not have.
        CheckpointCorrupt: a file is missing, cut short or not safetensors.
        UnsafeCheckpoint: a header or an index declares something that no writer would.
        StorageError: the drive failed.
    """

    def __init__(self, directory: str | Path, *, io: IO | None = None) -> None:
        self._io = io or IO()
        self._given = os.fspath(directory)
        self._files: list[File] = []
        self._entries: dict[str, tuple[File, StoredTensor]] = {}
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
        """Return a tensor's shape; raises ConfigError for an unknown name."""
        return self._find(name)[1].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype; raises ConfigError for an unknown name."""
        return dtype_named(self._find(name)[1].dtype)

    def pieces(
        self, name: str, numel: int, run: slice | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Read a tensor, or a run of its elements, piece by piece, in row-major order.

        Yields ``(first element, piece)``: pieces are 1-D CPU tensors of at most ``numel`` elements
        that cover the run exactly; an empty one has none. They are views of one buffer, valid
        until the next one is asked for. Read bytes leave the page cache.

        Raises ConfigError for an unknown name, TruncatedChunk if the file has been cut short since,
        DiskReadError if it cannot be read.
        """
        if numel < 1:
            raise ConfigError(f"pieces of {numel} elements", advice="ask for at least one")
        file, entry = self._find(name)
        return self._read(file, entry, numel, run or slice(0, entry.numel))

    def read(self, name: str, into: memoryview) -> None:
        """Read a tensor's bytes, in row-major order, into memory of that many bytes.

        Read bytes leave the page cache. Raises ConfigError for an unknown name, StateError for
        memory of another size, and otherwise as `pieces`.
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
        """Close the files; a second call does nothing. Pieces that are held stay as they are."""
        for file in self._files:
            file.close()
        self._files.clear()
        self._spare = None

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, name: str) -> tuple[File, StoredTensor]:
        if not self._files:
            raise StateError(f"the weights of {self._given} are closed", advice="open them again")
        if name not in self._entries:
            near = difflib.get_close_matches(name, self._entries, n=3) or list(self._entries)[:3]
            raise ConfigError(
                f"{self._given} has no tensor {name!r}",
                advice=f"it has {len(self._entries)}, as {', '.join(near)}",
            )
        return self._entries[name]

    def _read(
        self, file: File, entry: StoredTensor, numel: int, run: slice
    ) -> Iterator[tuple[int, torch.Tensor]]:
        if run.start >= run.stop:
            return
        dtype = dtype_named(entry.dtype)
        step, size = min(numel, run.stop - run.start), dtype.itemsize
        buffer, self._spare = self._spare, None  # not shared while this one reads
        if buffer is None or len(buffer) < step * size:
            buffer = aligned_buffer(step * size)
        try:
            for first in range(run.start, run.stop, step):
                count = min(step, run.stop - first)
                part = buffer[: count * size]
                file.read(entry.start + first * size, part)
                yield first, torch.frombuffer(part, dtype=dtype, count=count)
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
        """Return the named directory, or None if it is a file."""
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
        """Open one file and note its tensors, or only those ``wanted``."""
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


def dtype_named(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def some(names: Sequence[str]) -> str:
    """Return the first few names for a message."""
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return (", ".join(repr(name[:80]) for name in names[:6]) or "nothing") + more


def check_complete(where: str, names: Sequence[str]) -> None:
    """Refuse ``x-00001-of-00003.safetensors`` without its siblings, if no index lists them."""
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

"""A directory of weights that is replaced as a whole (floor 4).

[Note: the switch]  A directory without an export gets new files under names that no loader knows
(`NEW`), and their own names once all are written; the file that loaders look for (`SINGLE`, else
`INDEX`) comes last. An export is replaced as a whole: the new one is written into a hidden
directory next to it, all other files of the old one are linked there, and the two directories
change places in one call. So a crash leaves the old directory or the new one, configs included. The
new one holds `MARKER`: if that is in the export's place, the hidden directory is the replaced one,
and the next export clears it.

If the system cannot exchange directories (and for a mount point, the working directory, another
user's directory), files are switched in place: old files are set aside first (`OLD`), configs, then
index and weights, so that nothing loads between the renames; a failure undoes them, and the next
export undoes or clears the rest of a killed process. Names of one stage are durable before those of
the next, and the file that loaders look for comes last both ways.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hetero import interrupts, tensorfile
from hetero.errors import DiskFull, StorageError
from hetero.io import IO, MAX_NAME_BYTES, Folder
from hetero.mounts import is_mount_point
from hetero.tensorfile import INDEX, PART, SINGLE
from hetero.types import format_bytes

NEW, OLD = ".hetero-new-", ".hetero-old-"
MARKER = ".hetero-exchanged"
NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBUSY, errno.EXDEV)
NO_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV, errno.ENOSYS)


class StagedFiles:
    """New files for a directory: hidden while they are written, then all visible at once. As a
    context it removes all that it made, unless committed."""

    def __init__(self, directory: Path, io: IO) -> None:
        with ExitStack() as undo:
            self._folder = undo.enter_context(open_or_make(directory, io, undo))
            sibling = Sibling.of(directory, self._folder, io)
            recover(self._folder, sibling)
            is_export = not {SINGLE, INDEX}.isdisjoint(self._folder.names())
            self._sibling = sibling if is_export else None
            undo.callback(remove, self._folder, NEW)
            self._place, self._prefix = self._folder, NEW
            if self._sibling is not None:
                self._place, self._prefix = self._sibling.make(self._folder, undo), ""
            self._undo = undo.pop_all()

    def check_room(self, n_bytes: int) -> None:
        """Raise DiskFull before hours of writing, not after."""
        have = self._place.space()
        if have < n_bytes:
            raise DiskFull(
                f"{self._place.path} has {format_bytes(have)} left;"
                f" {format_bytes(n_bytes)} are needed",
                advice="free some space there, or name another directory",
                path=self._place.path,
                op="reserve",
                wanted=n_bytes,
                got=have,
                errno=errno.ENOSPC,
            )

    def write(self, name: str, n_bytes: int, pieces: Iterable[bytes | memoryview]) -> None:
        """Write one of the files, piece by piece, durably."""
        tensorfile.write(self._place, self._prefix + name, n_bytes, pieces)

    def commit(self, parts: Sequence[str], notes: Sequence[str]) -> None:
        """Replace the directory's export by the new files, weights and others."""
        with interrupts.held():
            sibling = self._sibling
            if sibling is None or not sibling.exchange(self._folder, self._place, notes):
                switch(self._folder, parts, notes)
                self._place, sibling = self._folder, None
            self._undo.pop_all()
        # remove files that nothing refers to any more
        with self._folder, self._place:
            self._place.sync()
            if sibling is not None:
                sibling.retire(self._folder, self._place)
            sweep(self._place, parts)
            self._place.sync()

    def __enter__(self) -> StagedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()


def open_or_make(path: Path, io: IO, undo: ExitStack) -> Folder:
    """Open a directory, made with its parents if missing; ``undo`` removes those it made."""
    try:
        return Folder.open(path, io)
    except StorageError as error:
        if error.errno != errno.ENOENT or path == path.parent:
            raise
    parent = open_or_make(path.parent, io, undo)
    folder = parent.make(path.name)
    undo.callback(quietly, parent.rmdir, path.name)
    parent.sync()
    return folder


class Sibling:
    """A hidden directory that takes an export's place: see [Note: the switch]."""

    def __init__(self, parent: Folder, name: str) -> None:
        self._parent = parent
        self._name = name
        self._hidden = NEW + name

    @classmethod
    def of(cls, directory: Path, folder: Folder, io: IO) -> Sibling | None:
        """Return the sibling to change places with a directory; None if that cannot be."""
        real = os.path.realpath(directory)
        above, name = os.path.split(real)
        if not name or len(os.fsencode(NEW + name)) > MAX_NAME_BYTES or is_mount_point(real):
            return None
        if os.path.samefile(real, ".") or not os.access(above, os.R_OK | os.W_OK | os.X_OK):
            return None
        if folder.stat(".").st_uid != os.geteuid():
            return None
        return cls(Folder.open(above, io), name)

    def make(self, folder: Folder, undo: ExitStack) -> Folder:
        """Return the hidden directory, with the other's mode; ``undo`` removes it."""
        made = self._parent.make(self._hidden)
        undo.callback(quietly, self.clear, made)
        made.permit(stat.S_IMODE(folder.stat(".").st_mode))
        made.create(MARKER).close()
        return made

    def recover(self, folder: Folder) -> None:
        """Clear the rest of a killed export."""
        if self._parent.has(self._hidden):
            with self._parent.folder(self._hidden) as other:
                if folder.has(MARKER):
                    self.retire(other, folder)
                else:
                    self.clear(other)
        elif folder.has(MARKER):
            folder.unlink(MARKER)

    def exchange(self, folder: Folder, made: Folder, notes: Sequence[str]) -> bool:
        """Exchange both directories; False if the system cannot, with the new files moved over."""
        new = made.names()
        for name in folder.names():
            if not is_ours(name) and name not in notes:
                link(folder, name, made)
        made.sync()
        self._parent.sync()
        try:
            self._parent.exchange(self._name, self._hidden)
        except StorageError as error:
            if error.errno not in NO_EXCHANGE:
                raise
            for name in new:
                if name != MARKER:
                    made.rename(name, NEW + name)
                    made.move(NEW + name, folder)
            self.clear(made)
            return False
        return True

    def retire(self, old: Folder, new: Folder) -> None:
        """Remove the replaced directory; other files that have come into it move to the new."""
        self._parent.sync()
        for name in old.names():
            if is_ours(name) or new.has(name):
                old.unlink(name)
            else:
                old.move(name, new)
        new.sync()
        self._parent.rmdir(self._hidden)
        self._parent.sync()
        new.unlink(MARKER)

    def clear(self, made: Folder) -> None:
        """Remove the hidden directory of an unfinished export."""
        for name in made.names():
            made.unlink(name)
        self._parent.rmdir(self._hidden)


def link(folder: Folder, name: str, to: Folder) -> None:
    """Give a file its name in another directory too; if that cannot be, it moves there later."""
    try:
        folder.link(name, to)
    except StorageError as error:
        if error.errno not in NO_LINK:
            raise


def is_ours(name: str) -> bool:
    """Whether an export writes files of a name, apart from configs."""
    part = PART.fullmatch(name)
    whole = name in (SINGLE, INDEX, MARKER) or name.startswith((NEW, OLD))
    return whole or (part is not None and part[1] == "model")


def switch(folder: Folder, parts: Sequence[str], notes: Sequence[str]) -> None:
    """Make the staged files the live ones, or leave all as it was: see [Note: the switch]."""
    there = set(folder.names())
    last = SINGLE if SINGLE in parts else INDEX
    others = [name for name in (*parts, *notes) if name != last]
    moved: list[tuple[str, str]] = []

    def move(name: str, to: str) -> None:
        folder.rename(name, to)
        moved.append((name, to))

    # 1. the new names are durable: they tell `recover` that this did not end
    folder.sync()
    try:
        # 2. set old files aside: configs, the index, whole weights, then parts
        for name in dict.fromkeys((*notes, INDEX, SINGLE, *parts)):
            if name in there:
                move(name, OLD + name)
                if name in (INDEX, SINGLE):
                    folder.sync()
        folder.sync()
        # 3. parts and configs
        for name in others:
            move(NEW + name, name)
        folder.sync()
        # 4. the file that loaders look for
        move(NEW + last, last)
    except BaseException:
        undo(folder, moved)
        raise


def undo(folder: Folder, moved: Sequence[tuple[str, str]]) -> None:
    """Give files their names back; an index comes after the files it names."""
    for name, to in reversed(moved):
        if name in (INDEX, SINGLE):
            quietly(folder.sync)
        quietly(folder.rename, to, name)
    quietly(folder.sync)  # before the new files go, which tell `recover` to undo


def recover(folder: Folder, sibling: Sibling | None) -> None:
    """Clear up after a killed export; undo one that had not finished its switch."""
    if sibling is not None:
        sibling.recover(folder)
    folder.sync()  # a switch lasts before what it replaced goes, and that before new files come
    there = set(folder.names())
    undone = any(NEW + name in there for name in (SINGLE, INDEX)) or not there & {SINGLE, INDEX}
    aside = sorted(name for name in there if name.startswith(OLD))
    if aside and undone:
        put_back(folder, aside)
    left = [n for n in sorted(there) if n.startswith(NEW) or (n in aside and not undone)]
    for name in left:
        folder.unlink(name)
    if left:  # else a crash might leave them among this export's new files
        folder.sync()


def put_back(folder: Folder, aside: Sequence[str]) -> None:
    """Give files that a killed export set aside their names back, in the order of `undo`."""
    last = {OLD + INDEX, OLD + SINGLE}
    for names in (set(aside) - last, last & set(aside)):
        for name in sorted(names):
            folder.rename(name, name.removeprefix(OLD))
        folder.sync()


def sweep(folder: Folder, parts: Sequence[str]) -> None:
    """Remove the files of the replaced export."""
    for name in folder.names():
        part = PART.fullmatch(name)
        surplus = part is not None and part[1] == "model" and name not in parts
        stale = name == INDEX and SINGLE in parts
        if surplus or stale or name.startswith(OLD):
            folder.unlink(name)


def remove(folder: Folder, prefix: str) -> None:
    """Remove the files whose names begin so; failures are ignored."""
    with contextlib.suppress(StorageError):
        for name in folder.names():
            if name.startswith(prefix):
                quietly(folder.unlink, name)


def quietly(act: Any, *args: Any) -> None:
    """Undo one thing; ignore a failure, since another is being raised."""
    with contextlib.suppress(StorageError):
        act(*args)

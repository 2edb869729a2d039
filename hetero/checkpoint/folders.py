"""Directories of checkpoints: their names, locks and removal.

[Note: live attempts]  A save writes into ``step-N.<uuid>.tmp`` and holds a lock (flock) on that
directory until it ends; the kernel frees it with the process. If a sweep can take the lock, and the
name still leads to the locked directory (its owner may have renamed it meanwhile), the directory
is abandoned. On a file system without locks nothing is swept.

[Note: names before contents]  A directory that was visible as ``step-N`` loses that name durably
before any of its files is removed, so no crash leaves a visible checkpoint with files missing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import uuid
from collections.abc import Iterable
from typing import NamedTuple

from hetero.checkpoint.manifest import MANIFEST, SHARDS
from hetero.errors import CheckpointCorrupt, CheckpointError, StorageError, UnsafeCheckpoint
from hetero.io import Folder

STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")
TMP = re.compile(r"step-(0|[1-9][0-9]{0,17})\.[0-9a-f]{32}\.tmp")
MANIFEST_TMP = f"{MANIFEST}.tmp"
OF_ONE = (MANIFEST_TMP, MANIFEST, *SHARDS.values())
OF_RANKS = re.compile(r"model-[0-9]{1,5}\.(safetensors|json)")
TRIES = 8  # names tried for one attempt: each fails only if a sweep comes at that very moment


class CheckpointName(NamedTuple):
    step: int
    name: str

    @property
    def unfinished(self) -> bool:
        return self.name.endswith(".tmp")


def final_name(step: int) -> str:
    return f"step-{step}"


def named(root: Folder) -> list[CheckpointName]:
    """Return the checkpoint names in ``root``, by step; other names are not looked at."""
    matches = [(STEP.fullmatch(name) or TMP.fullmatch(name)) for name in root.names()]
    return sorted(CheckpointName(int(match[1]), match[0]) for match in matches if match)


def leads_to(root: Folder, name: str, folder: Folder) -> bool:
    """Whether ``name`` is still the directory open as ``folder``."""
    try:
        found = root.stat(name)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return False
        raise
    return os.path.samestat(found, folder.stat("."))


def check_safe(folder: Folder, name: str, *, is_folder: bool = False) -> None:
    """Raise UnsafeCheckpoint unless a name is a plain directory, or a regular file of its own.

    Links, devices and pipes are refused before anything is opened, and so are files with a second
    name, which may change through it. A missing name is a CheckpointCorrupt.
    """
    try:
        found = folder.stat(name)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        raise CheckpointCorrupt(
            f"{folder.where(name)} is missing", advice="use another checkpoint"
        ) from None
    right = stat.S_ISDIR if is_folder else stat.S_ISREG
    wanted = "directory" if is_folder else "regular file"
    problem = "" if right(found.st_mode) else f"is no {wanted} but a {kind_of(found)}"
    if not problem and not is_folder and found.st_nlink != 1:
        problem = f"has {found.st_nlink} names (hard links)"
    if problem:
        advice = "copy the checkpoint with its files as regular files (cp -rL), if you trust it"
        raise UnsafeCheckpoint(f"{folder.where(name)} {problem}", advice=advice)


def kind_of(found: os.stat_result) -> str:
    names = {stat.S_IFLNK: "symbolic link", stat.S_IFDIR: "directory", stat.S_IFIFO: "pipe"}
    names |= {stat.S_IFREG: "regular file", stat.S_IFSOCK: "socket"}
    return names.get(stat.S_IFMT(found.st_mode), "device")


# -- attempts ------------------------------------------------------------------------------------


class Attempt:
    """The directory of one save, from ``step-N.<uuid>.tmp`` to ``step-N`` or to nothing."""

    def __init__(self, root: Folder, step: int) -> None:
        self.root = root
        self.final = final_name(step)
        check_free(root, self.final)
        sweep(root)
        self.tmp, self.folder = claim(root, self.final)
        self._pid = os.getpid()

    def publish(self) -> None:
        """Rename the directory to ``step-N``, durably."""
        check_free(self.root, self.final)
        self.root.rename(self.tmp, self.final)
        self.root.sync()

    def discard(self) -> None:
        """Remove the directory if possible; a forked child leaves its parent's alone."""
        if self._pid != os.getpid():
            return
        with contextlib.suppress(StorageError):
            published = leads_to(self.root, self.final, self.folder)
            name = hide(self.root, self.final) if published else self.tmp
            remove(self.root, name, self.folder)
        self.folder.close()


class Joined:
    """The directory of a save that another rank made, and publishes or removes."""

    def __init__(self, root: Folder, step: int, tmp: str) -> None:
        self.root = root
        self.final = final_name(step)
        try:
            self.folder = root.folder(tmp)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            raise CheckpointError(
                f"{root.where(tmp)} is not there, which the first rank has made",
                advice="save into a directory that the machines of all ranks see",
            ) from error

    def discard(self) -> None:
        self.folder.close()


def check_free(root: Folder, name: str) -> None:
    if root.has(name):
        raise CheckpointError(
            f"{root.where(name)} is there already",
            advice="remove it, or save another step: a save overwrites nothing",
        )


def claim(root: Folder, final: str) -> tuple[str, Folder]:
    """Make a directory for an attempt and take its lock. [Note: live attempts]"""
    for _ in range(TRIES):
        name = tmp_name(final)
        try:
            folder = root.make(name)
            if held(root, name, folder):
                return name, folder
        except StorageError as error:
            remove_empty(root, name)
            if not (error.errno == errno.ENOENT and error.op == "open"):  # swept as soon as made
                raise
    raise CheckpointError(
        f"{TRIES} directories made in {root.path} were removed at once",
        advice="something removes step-*.tmp there while hetero saves: stop it",
    )


def held(root: Folder, name: str, folder: Folder) -> bool:
    """Lock a directory just made; False if a sweep was faster."""
    try:
        mine = folder.lock()
    except StorageError:  # a file system without locks: no sweeps either
        return True
    return mine and leads_to(root, name, folder)


def remove_empty(root: Folder, name: str) -> None:
    with contextlib.suppress(StorageError):
        root.rmdir(name)


def tmp_name(final: str) -> str:
    return f"{final}.{uuid.uuid4().hex}.tmp"


def hide(root: Folder, name: str) -> str:
    """Turn a visible checkpoint into an unfinished one, durably; returns its new name."""
    hidden = tmp_name(name)
    root.rename(name, hidden)
    root.sync()  # [Note: names before contents]
    return hidden


def remove(root: Folder, name: str, folder: Folder) -> None:
    """Remove a save's files, and the directory if empty; no descriptor is opened for the files of
    one rank."""
    remove_files(folder, OF_ONE)
    try:
        root.rmdir(name)
    except StorageError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        remove_files(folder, [each for each in folder.names() if OF_RANKS.fullmatch(each)])
        root.rmdir(name)


def remove_files(folder: Folder, names: Iterable[str]) -> None:
    """Remove those that are there."""
    for name in names:
        try:
            folder.unlink(name)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise


def is_ours(name: str) -> bool:
    """Whether a save writes a file of this name."""
    return name in OF_ONE or OF_RANKS.fullmatch(name) is not None


def sweep(root: Folder) -> None:
    """Remove this user's killed saves; raises only if the sync fails. [Note: live attempts]"""
    left = []
    for found in named(root):
        if found.unfinished:
            with contextlib.suppress(StorageError):
                left += abandoned(root, found.name)
    if left:
        root.sync()  # [Note: names before contents]: a failed save may have hidden one
    for name, folder in left:
        with contextlib.suppress(StorageError):
            remove(root, name, folder)
        folder.close()


def abandoned(root: Folder, name: str) -> list[tuple[str, Folder]]:
    """Return the directory with its lock, or nothing if another user or a live save has it."""
    if root.stat(name).st_uid != os.geteuid():
        return []
    folder = root.folder(name)
    return [(name, folder)] if folder.lock() and leads_to(root, name, folder) else []

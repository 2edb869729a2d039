"""Saving: the commit protocol, and the removal of older checkpoints.

    1. refuse an existing ``step-N``; sweep killed saves; mkdir ``step-N.<uuid>.tmp``
    2. create and reserve the shard; write every block; fsync it
    3. (one rank: nothing to gather)
    4. ``MANIFEST.json.tmp``: write, fsync, rename, fsync of the directory
    5. rename the directory to ``step-N``, fsync of the parent
    6. commit returns: acknowledged
    7. `retain`: rename an older one to ``step-M.<uuid>.tmp``, fsync of the parent, remove its files

After a failure before 6 the attempt is abandoned: its directory is removed, or stays as a ``.tmp``
that no load looks at, and nothing older is touched. The creator of a new root syncs the root's
parent.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from hetero.checkpoint.folders import (
    MANIFEST_TMP,
    OURS,
    Attempt,
    hide,
    remove,
)
from hetero.checkpoint.manifest import (
    MANIFEST,
    MAX_ENTRIES,
    MAX_MANIFEST_BYTES,
    MAX_STEP,
    Manifest,
    SavedTensor,
    Unfit,
    check_entry,
    check_unique,
    encode,
)
from hetero.checkpoint.reader import State, steps
from hetero.checkpoint.shard import ShardWriter, flat
from hetero.errors import CheckpointError, ConfigError, StorageError
from hetero.io import Folder
from hetero.types import format_bytes

UNFIT = "keep what a checkpoint has no place for in a file of its own"


class SavePhase(Enum):
    """The phase of a save; it only advances, but a failed COMMITTING becomes ABANDONED."""

    OPEN = "open"
    COMMITTING = "being committed"
    COMMITTED = "committed"
    ABANDONED = "abandoned"


class Writer:
    """One save into a root directory. As a context it abandons an uncommitted save.

    Raises CheckpointError if ``step-N`` exists or a checkpoint cannot have such entries,
    ConfigError if there are more than a header can name, DiskFull if the drive has no room for
    them, StorageError for other failures.
    """

    def __init__(self, root: Folder, step: int, entries: Sequence[SavedTensor]) -> None:
        self._step = step
        self._entries = tuple(entries)
        check_entries(step, self._entries)
        self._phase = SavePhase.OPEN
        self._lock = threading.Lock()
        self._attempt = Attempt(root, step)
        try:
            self._shard = ShardWriter(self._attempt.folder, self._entries)
        except BaseException:
            self._phase = SavePhase.ABANDONED
            self._attempt.discard()
            raise

    def write(self, entry: int, start: int, data: memoryview) -> None:
        """Write bytes [start, start + len(data)) of an entry, by its number; then ``data`` is free.

        ``start`` is a multiple of `BLOCK`, and so is the end unless it is the entry's own. Every
        byte is written once, in any order, from any thread; aligned, writable memory is written
        without a copy. Raises CheckpointError or StorageError, and abandons the save.
        """
        self._check_open()
        try:
            if not 0 <= entry < len(self._entries):
                raise CheckpointError(f"there is no entry {entry} of {len(self._entries)}")
            self._shard.write(entry, start, flat(data))
        except BaseException:
            self.abandon()
            raise

    def commit(self, meta: Mapping[str, Any]) -> Path:
        """Make the checkpoint durable and visible; returns its directory.

        ``meta`` is JSON: it comes back equal, with lists for tuples. Raises CheckpointError if a
        block was not written or ``meta`` is no JSON, StorageError if the drive fails; either
        abandons the save.
        """
        self._leave_open(SavePhase.COMMITTING)
        try:
            crcs = self._shard.finish()
            self._write_manifest(Manifest(self._step, self._entries, crcs, dict(meta)))
            self._attempt.publish()
            self._phase = SavePhase.COMMITTED
        except BaseException:
            self._remove()
            raise
        self._attempt.folder.close()
        return Path(self._attempt.root.path) / self._attempt.final

    def abandon(self) -> None:
        """Remove the attempt's files if possible, unless committed or removed; never raises."""
        with contextlib.suppress(CheckpointError):
            self._leave_open(SavePhase.ABANDONED)
            self._remove()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def _check_open(self) -> None:
        if self._phase is not SavePhase.OPEN:
            raise CheckpointError(f"this save is {self._phase.value}", advice="begin another one")

    def _leave_open(self, to: SavePhase) -> None:
        with self._lock:
            self._check_open()
            self._phase = to

    def _remove(self) -> None:
        self._phase = SavePhase.ABANDONED
        self._shard.stop()
        self._attempt.discard()

    def _write_manifest(self, manifest: Manifest) -> None:
        try:
            raw = encode(manifest)
        except Unfit as error:
            raise CheckpointError(f"this cannot be saved: {error}", advice=UNFIT) from None
        if len(raw) > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"the manifest has {format_bytes(len(raw))}: more than {MAX_MANIFEST_BYTES} bytes",
                advice="keep data in entries, not in meta",
            )
        folder = self._attempt.folder
        with folder.create(MANIFEST_TMP) as file:
            file.write(0, memoryview(raw))
            file.sync()
        folder.rename(MANIFEST_TMP, MANIFEST)
        folder.sync()


def check_entries(step: int, entries: Sequence[SavedTensor]) -> None:
    """Raise CheckpointError for a step or entries that no checkpoint can have."""
    try:
        if not 0 <= step <= MAX_STEP:
            raise Unfit(f"the step {step} is negative or has more than 18 digits")
        if len(entries) > MAX_ENTRIES:
            raise Unfit(f"{len(entries)} entries are more than {MAX_ENTRIES}")
        for entry in entries:
            check_entry(f"{entry.label!r}", entry)
        check_unique(entries)
    except Unfit as error:
        raise CheckpointError(f"this cannot be saved: {error}", advice=UNFIT) from None


def retain(root: Folder, keep_last: int, newest: int = MAX_STEP) -> list[int]:
    """Remove complete checkpoints but the last ``keep_last`` up to ``newest``; returns their steps.

    ``newest`` is the step just saved: later ones belong to a run that was rolled back, and stay.

    Damaged ones are not counted and stay. So do directories with foreign files, and those that
    cannot be removed; a warning names them.
    """
    if keep_last < 1:
        raise ConfigError(f"keep_last={keep_last} would keep nothing", advice="keep 1 or more")
    removed = []
    try:
        there = (found for found in steps(root) if found.step <= newest)
        complete = [found for found in there if found.state is State.COMPLETE]
        for found in complete[:-keep_last]:
            if remove_whole(root, found.name):
                removed.append(found.step)
    except StorageError as error:
        warnings.warn(f"an older checkpoint was not removed: {error}", stacklevel=2)
    return removed


def remove_whole(root: Folder, name: str) -> bool:
    """Remove a checkpoint, unless it has more files than a save writes."""
    with root.folder(name) as folder:
        more = sorted(set(folder.names()) - set(OURS))
        if more:
            warnings.warn(f"{folder.path} stays: {more[0][:80]!r} in it is not ours", stacklevel=3)
            return False
        remove(root, hide(root, name), folder)
    return True

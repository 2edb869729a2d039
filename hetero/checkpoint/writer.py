"""Saving: the commit protocol, and the removal of older checkpoints.

    1. refuse an existing ``step-N``; sweep killed saves; mkdir ``step-N.<uuid>.tmp``
    2. create and reserve the shard; write every block; fsync it
    3. of several ranks, each does 2 in that directory, writes a part of the manifest, fsyncs it and
       the directory, and tells the first one of it
    4. ``MANIFEST.json.tmp``: write, fsync, rename, fsync of the directory
    5. rename the directory to ``step-N``, fsync of the parent
    6. commit returns, on all ranks: acknowledged
    7. `retain`: rename an older one to ``step-M.<uuid>.tmp``, fsync of the parent, remove its files

The first rank does 1, 4, 5 and 7. After a failure before 6, on any rank, the attempt is abandoned:
its directory is removed, or stays as a ``.tmp`` that no load looks at, and nothing older is
touched. The creator of a new root syncs the root's parent.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from hetero.checkpoint import parts
from hetero.checkpoint.folders import MANIFEST_TMP, Attempt, Joined, hide, is_ours, remove
from hetero.checkpoint.manifest import (
    MANIFEST,
    MAX_ENTRIES,
    MAX_MANIFEST_BYTES,
    MAX_STEP,
    Manifest,
    PartRecord,
    SavedTensor,
    Unfit,
    check_entry,
    check_unique,
    encode,
    layout,
    part_name,
    version_for,
)
from hetero.checkpoint.reader import State, steps
from hetero.checkpoint.shard import ShardWriter, flat
from hetero.checkpoint.slices import Shard, Slice, whole
from hetero.checkpoint.together import ONE_RANK, Ranks, together
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

    Args:
        entries: all of the checkpoint, which the first rank alone need know as a whole.
        slices: of which this rank writes these; None: all.
        ranks: those that save together, each of which makes a writer.

    Raises CheckpointError if ``step-N`` exists or a checkpoint cannot have such entries,
    ConfigError if there are more than a header can name, DiskFull if the drive has no room for
    them, StorageError for other failures.
    """

    def __init__(
        self,
        root: Folder,
        step: int,
        entries: Sequence[SavedTensor],
        slices: Sequence[Slice] | None = None,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self._step = step
        self._entries = tuple(entries)
        self._ranks = ranks
        self._slices = whole(self._entries) if slices is None else tuple(slices)
        self._places = {each.number: place for place, each in enumerate(self._slices)}
        self._crcs: tuple[str, ...] = ()
        self._phase = SavePhase.OPEN
        self._lock = threading.Lock()
        check = partial(check_entries, step, self._entries)
        self._attempt, self._shard = begun(root, step, self._slices, ranks, check)

    def write(self, entry: int, start: int, data: memoryview) -> None:
        """Write bytes [start, start + len(data)) of this rank's slice of an entry, by the entry's
        number; then ``data`` is free.

        ``start`` is a multiple of `BLOCK`, and so is the end unless it is the slice's own. Every
        byte is written once, in any order, from any thread; aligned, writable memory is written
        without a copy. Raises CheckpointError or StorageError, and abandons the save.
        """
        self._check_open()
        try:
            if entry not in self._places:
                raise CheckpointError(f"there is no entry {entry} of {len(self._entries)}")
            self._shard.write(self._places[entry], start, flat(data))
        except BaseException:
            if self._ranks.size == 1:
                self.abandon()
            raise  # of several ranks `commit` tells the others, which write there still

    def commit(
        self,
        meta: Mapping[str, Any],
        told: Mapping[str, Any] | None = None,
        failed: BaseException | None = None,
    ) -> Path:
        """Make the checkpoint durable and visible, on all ranks or none; returns its directory.

        Args:
            meta: JSON: it comes back equal, with lists for tuples. That of the first rank counts.
            told: of several ranks, what this one says of itself.
            failed: an error that ended the save here, and ends it on all ranks.

        Raises CheckpointError if a block was not written or ``meta`` is no JSON, StorageError if
        the drive fails; either abandons the save.
        """
        ranks, what = self._ranks, f"the save of step {self._step}"
        try:
            finish = partial(self._finish, told or {}, failed)
            rows = together(ranks, what, finish, ranks.agree_aside)
            together(ranks, what, partial(self._publish, rows, meta), ranks.agree_aside)
            self._phase = SavePhase.COMMITTED
        except BaseException:
            if self._phase in (SavePhase.OPEN, SavePhase.COMMITTING):
                self._remove()
            raise
        finally:
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

    def _finish(self, told: Mapping[str, Any], failed: BaseException | None) -> bytes:
        """Make this rank's shard durable; returns what the manifest says of it and its part."""
        if failed is not None:
            raise failed
        self._leave_open(SavePhase.COMMITTING)
        self._crcs = self._shard.finish()
        if self._ranks.size == 1:
            return b""
        version = version_for(self._entries)
        shard = Shard(self._ranks.rank, self._slices, self._crcs, version)
        raw = with_advice(lambda: parts.encode(self._step, shard, dict(told)))
        write_small(self._attempt.folder, part_name(shard.number), raw)
        self._attempt.folder.sync()
        return f"{layout(self._slices)[-1]} {parts.crc_of(raw)}".encode()

    def _publish(self, rows: Sequence[bytes], meta: Mapping[str, Any]) -> bytes:
        """Let the first rank write the manifest and publish the directory."""
        if isinstance(self._attempt, Joined):
            return b""
        if self._ranks.size == 1:
            manifest = Manifest(self._step, self._entries, self._crcs, dict(meta))
        else:
            found = [row.decode().split() for row in rows]
            records = tuple(PartRecord(int(n_bytes), crc) for n_bytes, crc in found)
            version = version_for(self._entries)
            manifest = Manifest(self._step, self._entries, (), dict(meta), version, records)
        raw = with_advice(lambda: encode(manifest))
        folder = self._attempt.folder
        write_small(folder, MANIFEST_TMP, raw)
        folder.rename(MANIFEST_TMP, MANIFEST)
        folder.sync()
        self._attempt.publish()
        self._phase = SavePhase.COMMITTED  # some ranks may know, even if others are lost
        return b""


def begun(
    root: Folder,
    step: int,
    slices: Sequence[Slice],
    ranks: Ranks,
    check: Callable[[], None],
) -> tuple[Attempt | Joined, ShardWriter]:
    """Return the directory of a save, which the first rank makes, and this rank's shard in it.
    ``check`` raises what is wrong with the save itself."""
    attempts: list[Attempt | Joined] = []
    shards: list[ShardWriter] = []

    def claim() -> bytes:
        check()
        if ranks.rank:
            return b""
        attempts.append(attempt := Attempt(root, step))
        return attempt.tmp.encode()

    def open_shard(tmp: str) -> bytes:
        if ranks.rank:
            attempts.append(Joined(root, step, tmp))
        shards.append(ShardWriter(attempts[0].folder, Shard(ranks.rank, tuple(slices))))
        return b""

    what = f"a save of step {step}"
    try:
        first, *_ = together(ranks, what, claim)
        together(ranks, what, lambda: open_shard(first.decode()))
    except BaseException:  # of any rank
        for shard in shards:
            shard.stop()
        for attempt in attempts:
            attempt.discard()
        raise
    return attempts[0], shards[0]


def with_advice(encoded: Callable[[], bytes]) -> bytes:
    """Return the bytes of a manifest or a part; CheckpointError if a load would refuse them."""
    try:
        raw = encoded()
    except Unfit as error:
        raise CheckpointError(f"this cannot be saved: {error}", advice=UNFIT) from None
    if len(raw) > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"the manifest has {format_bytes(len(raw))}: more than {MAX_MANIFEST_BYTES} bytes",
            advice="keep data in entries, not in meta",
        )
    return raw


def write_small(folder: Folder, name: str, raw: bytes) -> None:
    with folder.create(name) as file:
        file.write(0, memoryview(raw))
        file.sync()


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
        more = sorted(each for each in folder.names() if not is_ours(each))
        if more:
            warnings.warn(f"{folder.path} stays: {more[0][:80]!r} in it is not ours", stacklevel=3)
            return False
        remove(root, hide(root, name), folder)
    return True

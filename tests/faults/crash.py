"""What a crash can leave of a log of file operations: the model of reliability 2.10, in memory.

Names and inodes are apart. A file's writes, and the reservation of its size, are pending until its
sync: each may be lost, kept, torn in the middle, or there as zeros, each on its own. Changes of
names are pending until a sync of their directory; of the pending ones there survives

    prefix   any prefix of them, across all directories (a journal)
    subset   any subset of them (all that POSIX promises)

One call is one change: an exchange, or a move from one directory to another, is there with all its
names or with none of them, and a sync of either directory makes it durable. A sync of a file makes
no name durable, and a sync of a directory no bytes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from hetero.io import ALIGN
from hetero.testing.faults import FileCall
from tests.faults.saves import Quick

T = TypeVar("T")

Model = Literal["prefix", "subset"]
Tree = dict[str, "bytes | Tree"]
Fate = Literal["kept", "lost", "torn", "zero"]

OPS = ("open", "mkdir", "create", "write", "reserve", "sync", "sync_folder")
OPS += ("rename", "move", "link", "exchange", "unlink", "rmdir")
FATES: tuple[Fate, ...] = ("kept", "lost", "torn", "zero")
ROOT = 0  # the inode of the directory that all others are under
SAMPLES = 8  # random mixtures of fates, beside the systematic ones


class Edit(NamedTuple):
    """What a change does to one name: it leads to ``inode`` from now on, or no longer does."""

    folder: int
    name: str
    inode: int
    leads: bool = True


Change = tuple[Edit, ...]
Names = dict[int, dict[str, int]]
"""By directory: the inodes that names lead to."""


@dataclass
class Inode:
    """A file or a directory; what is pending is lost unless a state keeps it."""

    names: dict[str, int] | None = None
    data: bytes = b""
    reserved: int = 0
    writes: list[tuple[int, bytes]] = field(default_factory=list)


class Drive:
    """What a drive holds for sure, and what it may hold, after some operations of a log."""

    def __init__(self, before: Tree, model: Model) -> None:
        self.model = model
        self.inodes: list[Inode] = []
        self.changes: list[Change] = []
        self.paths: dict[str, int] = {"": self._plant(before)}
        self.live: dict[tuple[int, str], int] = {}
        for path, number in list(self.paths.items()):
            self._enter(path, number)

    def _plant(self, tree: Tree | bytes) -> int:
        self.inodes.append(Inode())
        number, inode = len(self.inodes) - 1, self.inodes[-1]
        if isinstance(tree, bytes):
            inode.data = tree
        else:
            inode.names = {name: self._plant(each) for name, each in tree.items()}
        return number

    def _enter(self, path: str, number: int) -> None:
        """Note the names under a path; a path keeps leading to what was opened by it."""
        for name, each in (self.inodes[number].names or {}).items():
            self.live[number, name] = self.paths[os.path.join(path, name)] = each
            self._enter(os.path.join(path, name), each)

    def apply(self, op: FileCall) -> None:
        """Take one operation of a log whose paths are relative to the root."""
        head, name = os.path.split(op.where)
        folder = self.paths[head]
        if op.op == "open" and op.where:
            self.paths[op.where] = self.live[folder, name]
        elif op.op in ("mkdir", "create"):
            self.inodes.append(Inode(names={} if op.op == "mkdir" else None))
            self._change(Edit(folder, name, len(self.inodes) - 1))
            self.paths[op.where] = len(self.inodes) - 1
        elif op.op == "write":
            self.inodes[self.paths[op.where]].writes.append((op.offset, op.data))
        elif op.op == "reserve":
            self.inodes[self.paths[op.where]].reserved = op.offset
        elif op.op == "sync":
            settle(self.inodes[self.paths[op.where]])
        elif op.op == "sync_folder":
            self._sync_names(self.paths[op.where])
        elif op.op != "open":
            self._change(*self._edits(op, folder, name))

    def _edits(self, op: FileCall, folder: int, name: str) -> tuple[Edit, ...]:
        """Return what a call does to names that are there."""
        inode = self.live[folder, name]
        gone = Edit(folder, name, inode, leads=False)
        to, new = os.path.split(op.to)
        if op.op == "rename":
            return gone, Edit(folder, op.to, inode)
        if op.op == "exchange":
            return Edit(folder, name, self.live[folder, op.to]), Edit(folder, op.to, inode)
        if op.op == "move":
            return gone, Edit(self.paths[to], new, inode)
        if op.op == "link":
            return (Edit(self.paths[to], new, inode),)
        return (gone,)  # unlink, rmdir

    def _change(self, *edits: Edit) -> None:
        self.changes.append(edits)
        for folder, name, inode, leads in edits:
            if leads:
                self.live[folder, name] = inode
            else:
                del self.live[folder, name]

    def _sync_names(self, folder: int) -> None:
        """Make durable what changed in a directory, and what the same names were before."""
        mine: list[int] = []
        names: set[tuple[int, str]] = set()
        for n, change in reversed(list(enumerate(self.changes))):
            # a journal keeps the order of all: what is before them is durable too
            follows = bool(mine) if self.model == "prefix" else not names.isdisjoint(spots(change))
            if follows or any(edit.folder == folder for edit in change):
                mine.append(n)
                names.update(spots(change))
        for n in reversed(mine):
            perform(self.durable(), self.changes[n])
        self.changes = [change for n, change in enumerate(self.changes) if n not in mine]

    def durable(self) -> Names:
        return {n: inode.names for n, inode in enumerate(self.inodes) if inode.names is not None}

    def name_states(self) -> Iterator[Names]:
        """Yield the names that may be there and lead from the root: {directory: {name: inode}}.

        Subsets of changes that differ only in directories which the root does not lead to are one.
        """
        if self.model == "prefix":
            for n in range(len(self.changes) + 1):
                yield after(self.durable(), self.changes[:n])
            return
        at_root = [change for change in self.changes if touches(change, {ROOT})]
        for kept in subsets(at_root):
            root = after(self.durable(), kept)[ROOT]
            below = self._led_to(root)
            states = [{folder: dict(self.durable()[folder]) for folder in below}]
            for change in self.changes:
                if change in at_root and change not in kept:
                    continue
                if touches(change, below):
                    changed = [after(state, [change]) for state in states]
                    states = changed if change in kept else distinct([*states, *changed])
            for state in states:
                yield {**state, ROOT: root}

    def _led_to(self, root: dict[str, int]) -> set[int]:
        """Return the directories that the root's names lead to, whichever changes survive."""
        found: set[int] = set()
        ahead = list(root.values())
        while ahead:
            number = ahead.pop()
            names = self.inodes[number].names
            if names is not None and number not in found:
                found.add(number)
                edits = (edit for change in self.changes for edit in change)
                ahead += [*names.values(), *(e.inode for e in edits if e.folder == number)]
        return found

    def byte_states(self, seeded: random.Random) -> Iterator[dict[int, bytes]]:
        """Yield the bytes that files with pending writes may have."""
        pending = {n: i for n, i in enumerate(self.inodes) if i.writes or i.reserved}
        slots = [(number, k) for number, i in pending.items() for k in range(len(i.writes) + 1)]
        for fates in mixtures(slots, seeded):
            yield {
                number: surviving(inode, [fates[number, k] for k in range(len(inode.writes) + 1)])
                for number, inode in pending.items()
            }

    def trees(self, seeded: random.Random) -> Iterator[Tree]:
        """Yield what a crash may leave under the root."""
        names = list(self.name_states())
        for data in self.byte_states(seeded):
            for each in names:
                yield self._tree(ROOT, each, data)

    def _tree(self, number: int, names: Names, data: dict[int, bytes]) -> Tree:
        return {
            name: self._tree(inode, names, data)
            if self.inodes[inode].names is not None
            else data.get(inode, self.inodes[inode].data)
            for name, inode in sorted(names[number].items())
        }


def crash_states(
    before: Tree, log: Sequence[FileCall], model: Model, since: int = 0
) -> Iterator[tuple[int, Tree]]:
    """Yield what crashes of a log may leave, with how many operations were done by then."""
    seeded, drive = random.Random(0), Drive(before, model)
    for position, op in enumerate([*log, None]):
        if position >= since and (op is None or op.op != "open"):  # which changes nothing
            for tree in drive.trees(seeded):
                yield position, tree
        if op is not None:
            drive.apply(op)


def frozen(tree: Tree) -> Hashable:
    """Return a tree as a key."""
    return tuple(
        (name, each if isinstance(each, bytes) else frozen(each)) for name, each in tree.items()
    )


def settle(inode: Inode) -> None:
    inode.data = surviving(inode, ["kept"] * (len(inode.writes) + 1))
    inode.writes, inode.reserved = [], 0


def perform(names: Names, change: Change) -> None:
    """Do to ``names`` what a change does to the directories in them."""
    for folder, name, inode, leads in change:
        if folder not in names:
            continue
        if leads:
            names[folder][name] = inode
        elif names[folder].get(name) == inode:
            del names[folder][name]


def after(names: Names, changes: Iterable[Change]) -> Names:
    """Return names after changes, one after the other."""
    found = {folder: dict(entries) for folder, entries in names.items()}
    for change in changes:
        perform(found, change)
    return found


def touches(change: Change, folders: Collection[int]) -> bool:
    return any(edit.folder in folders for edit in change)


def distinct(states: Iterable[Names]) -> list[Names]:
    """Return each of some states once."""
    return list({tuple(frozenset(s[f].items()) for f in sorted(s)): s for s in states}.values())


def spots(change: Change) -> set[tuple[int, str]]:
    return {(edit.folder, edit.name) for edit in change}


def subsets(changes: Sequence[Change]) -> Iterator[tuple[Change, ...]]:
    for n in range(len(changes) + 1):
        yield from combinations(changes, n)


def mixtures(
    slots: list[tuple[int, int]], seeded: random.Random
) -> Iterator[dict[tuple[int, int], Fate]]:
    """Yield fates: all the same; one unlike the others; random ones."""
    for common in FATES:
        yield dict.fromkeys(slots, common)
    for slot in slots:
        for fate in FATES[1:]:
            yield {**dict.fromkeys(slots, FATES[0]), slot: fate}
        yield {**dict.fromkeys(slots, FATES[1]), slot: FATES[0]}
    for _ in range(SAMPLES if slots else 0):
        yield {slot: seeded.choice(FATES) for slot in slots}


def surviving(inode: Inode, fates: Sequence[Fate]) -> bytes:
    """Return a file's bytes by the fate of its reservation (first) and of each write."""
    data = bytearray(inode.data)
    if fates[0] == "kept":
        data += bytes(max(0, inode.reserved - len(data)))
    for (offset, what), fate in zip(inode.writes, fates[1:], strict=True):
        if fate == "lost":
            continue
        end = offset + (len(what) // 2 if fate == "torn" else len(what))
        data += bytes(max(0, end - len(data)))
        data[offset:end] = bytes(end - offset) if fate == "zero" else what[: end - offset]
    return bytes(data)


# -- from a directory, and into one ----------------------------------------------------------------


class Recorder(Quick):
    """Keeps the log of a scenario, with the size of a reservation in place of an offset."""

    def __init__(self) -> None:
        super().__init__(keep_data=True)

    def call(self, op: str, act: Callable[..., T], *args: Any, where: str, offset: int = 0) -> T:
        offset = args[2] if op == "reserve" else offset
        return super().call(op, act, *args, where=where, offset=offset)

    def told(self, name: Callable[[str], str]) -> list[FileCall]:
        """Return what matters to a drive, with other paths, and large writes in blocks."""
        done = [each for op in self.log if op.op in OPS for each in blocks(op)]
        return [op._replace(where=name(op.where), to=name(op.to)) for op in done]


def blocks(op: FileCall) -> Iterator[FileCall]:
    """Yield an operation, a write block by block: a crash may keep any of what one call wrote."""
    if op.op != "write":
        yield op
    for start in range(0, len(op.data), ALIGN):
        yield op._replace(offset=op.offset + start, data=op.data[start : start + ALIGN])


def lay_out(tree: Tree, path: Path) -> None:
    path.mkdir()
    for name, each in tree.items():
        if isinstance(each, bytes):
            (path / name).write_bytes(each)
        else:
            lay_out(each, path / name)


def as_tree(path: Path) -> Tree:
    return {
        each.name: as_tree(each) if each.is_dir() else each.read_bytes() for each in path.iterdir()
    }

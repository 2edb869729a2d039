"""Checkpoints that several ranks save: all of one, each its own slices (threads are the ranks)."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hetero.checkpoint.manifest import (
    ITEM_BYTES,
    MANIFEST,
    SavedTensor,
    part_name,
    shard_name,
)
from hetero.checkpoint.reader import CheckpointReader
from hetero.checkpoint.shard import ShardWriter
from hetero.checkpoint.slices import Slice
from hetero.checkpoint.verify import verify
from hetero.checkpoint.writer import Writer, retain
from hetero.errors import (
    CheckpointCorrupt,
    CheckpointError,
    DiskFull,
    HeteroError,
    UnsafeCheckpoint,
)
from hetero.io import IO, Folder
from hetero.members import all_of
from hetero.tensorfile import BLOCK
from hetero.testing.faults import FaultPlan
from tests.faults.crafted import sealed
from tests.faults.saves import SMALL, Buffered, Quick, contents, load, save

ENTRIES = (
    *SMALL,
    SavedTensor("param", "conv", "", "float32", (5, 7, 2, 3), (0, 2, 3, 1)),
    SavedTensor("param", "large", "", "uint8", (2 * BLOCK + 999,)),
)
N = 3
SECONDS = 30.0


class ThreadRank:
    """One of several ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, rows: list[bytes]) -> None:
        self.rank, self.size, self.members = rank, size, all_of(size)
        self._barrier, self._rows = barrier, rows

    def agree(self, row: bytes, what: str) -> Sequence[bytes]:
        self._rows[self.rank] = row
        self._barrier.wait(SECONDS)
        found = list(self._rows)
        self._barrier.wait(SECONDS)
        return found

    agree_aside = agree


def on_ranks(size: int, act: Callable[[ThreadRank], Any]) -> list[Any]:
    """Return what each rank returned or raised."""
    barrier, rows = threading.Barrier(size), [b""] * size

    def run(rank: int) -> Any:
        try:
            return act(ThreadRank(rank, size, barrier, rows))
        except HeteroError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def cuts(entry: SavedTensor, size: int, seeded: random.Random) -> list[int]:
    """Return where the ranks' runs of an entry begin and end; the first has what is small."""
    if entry.numel < 10:
        return [0, *[entry.numel] * size]
    return [0, *sorted(seeded.randrange(entry.numel + 1) for _ in range(size - 1)), entry.numel]


def slices_of(size: int, step: int, rank: int) -> list[Slice]:
    found, seeded = [], random.Random(step)
    for number, entry in enumerate(ENTRIES):
        first, end = cuts(entry, size, seeded)[rank : rank + 2]
        if first < end:
            found.append(Slice(number, entry, first, end))
    return found


def nothing(rank: int) -> None: ...


def save_as(
    rank: ThreadRank,
    root: Folder,
    step: int,
    before_commit: Callable[[int], None] = nothing,
) -> Path:
    """Save this rank's slices of the contents of a step."""
    _, meta, data = contents(step, ENTRIES)
    slices = slices_of(rank.size, step, rank.rank)
    failed = None
    with Writer(root, step, ENTRIES, slices, rank) as writer:
        try:
            for each in slices:
                mine = memoryview(data[each.number])[each.start_byte : each.end_byte]
                for start in range(0, len(mine), BLOCK):
                    writer.write(each.number, start, mine[start : start + BLOCK])
        except HeteroError as error:
            failed = error
        before_commit(rank.rank)
        return writer.commit(meta, {"rank": rank.rank}, failed)


def save_on(size: int, path: Path, step: int, io: Sequence[IO] = ()) -> list[Any]:
    def act(rank: ThreadRank) -> Path:
        with Folder.open(path, io[rank.rank] if io else Quick()) as root:
            return save_as(rank, root, step)

    return on_ranks(size, act)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_ranks_save_is_read_as_a_whole(size: int, tmp_path: Path) -> None:
    for step in range(6):
        assert save_on(size, tmp_path, step) == [tmp_path / f"step-{step}"] * size

        assert load(tmp_path) == contents(step, ENTRIES)
    assert verify(tmp_path).ok
    assert [v.step for v in verify(tmp_path).checkpoints] == [*range(6)]


def test_any_bytes_are_read_across_shards(tmp_path: Path) -> None:
    save_on(N, tmp_path, 1)
    data, seeded = contents(1, ENTRIES)[2], random.Random(0)

    with CheckpointReader.open(tmp_path) as reader:
        assert reader.entries == ENTRIES
        assert [told.get("rank") for told in reader.of_ranks] == [*range(N)]
        for _ in range(200):
            number = seeded.randrange(len(ENTRIES))
            start, end = sorted(seeded.randrange(len(data[number]) + 1) for _ in range(2))
            into = bytearray(end - start)
            reader.read(number, start, memoryview(into))
            assert into == data[number][start:end]


def test_an_old_one_goes_as_a_whole(tmp_path: Path) -> None:
    save_on(N, tmp_path, 1)
    save_on(N, tmp_path, 2)
    with Folder.open(tmp_path) as root:
        save(root, 3)
        assert retain(root, 1) == [1, 2]

    assert os.listdir(tmp_path) == ["step-3"]


def test_bytes_that_change_in_any_file_are_refused(tmp_path: Path) -> None:
    path, seeded = save_on(N, tmp_path, 1)[0], random.Random(1)
    files = [MANIFEST, *map(shard_name, range(N)), *map(part_name, range(N))]
    assert sorted(os.listdir(path)) == sorted(files)

    for name in files:
        raw = (path / name).read_bytes()
        for _ in range(40):
            at = seeded.randrange(len(raw))
            changed = bytearray(raw)
            changed[at] ^= 1 << seeded.randrange(8)
            (path / name).write_bytes(changed)
            with pytest.raises(CheckpointError):
                load(tmp_path)
            assert not verify(tmp_path, Buffered()).ok
        (path / name).write_bytes(raw)
    assert load(tmp_path) == contents(1, ENTRIES)


@pytest.mark.parametrize("name", [part_name(1), shard_name(1)])
def test_files_of_another_rank_or_save_are_refused(name: str, tmp_path: Path) -> None:
    path = save_on(N, tmp_path / "a", 1)[0] if (tmp_path / "a").mkdir() is None else tmp_path
    (tmp_path / "b").mkdir()
    other = save_on(N, tmp_path / "b", 2)[0]
    before = (path / name).read_bytes()

    for foreign in (path / name.replace("1", "2"), other / name):
        (path / name).write_bytes(foreign.read_bytes())
        with pytest.raises(CheckpointError):
            load(tmp_path / "a")
    (path / name).unlink()
    with pytest.raises(CheckpointCorrupt, match="missing"):
        load(tmp_path / "a")
    (path / name).write_bytes(before)
    assert load(tmp_path / "a") == contents(1, ENTRIES)


def crafted(path: Path, number: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what a part says, under right CRCs."""
    record = json.loads((path / part_name(number)).read_bytes())
    del record["crc32"]
    change(record)
    raw = sealed(json.dumps(record)[1:].encode())
    (path / part_name(number)).write_bytes(raw)
    manifest = json.loads((path / MANIFEST).read_bytes())
    del manifest["crc32"]
    manifest["shards"][number]["crc"] = raw[10:18].decode()
    (path / MANIFEST).write_bytes(sealed(json.dumps(manifest)[1:].encode()))


def row(at: int, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return a change of a slice's entry, first element, end or CRCs."""

    def change(record: dict[str, Any]) -> None:
        record["slices"][-1][at] = value

    return change


LARGE = ENTRIES[-1].numel
CHANGES: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (row(0, len(ENTRIES)), "not there"),
    (row(0, -1), "not there"),
    (row(0, 0), "order of their entries|not inside|hexadecimal"),
    (row(1, -5), "not inside"),
    (row(2, LARGE + 1), "not inside"),
    (row(2, 2**70), "not inside"),
    (row(1, True), "three numbers"),
    (row(3, "00"), "hexadecimal"),
    (row(3, 7), "three numbers"),
    (lambda record: record["slices"].append(record["slices"][-1]), "order of their entries"),
    (lambda record: record["slices"].pop(), "is declared with"),
    (lambda record: record["slices"].append(7), "three numbers"),
    (lambda record: record.update(step=2), "part 1 of step 2"),
    (lambda record: record.update(shard=2), "part 2 of step 1"),
    (lambda record: record.update(version=9), "part of this version"),
    (lambda record: record.update(meta=None), "meta is of type"),
    (lambda record: record.update(more=1), "unknown field"),
]


@pytest.mark.parametrize(("change", "text"), CHANGES, ids=[text for _, text in CHANGES])
def test_parts_that_no_save_writes_are_refused(
    change: Callable[[dict[str, Any]], None], text: str, tmp_path: Path
) -> None:
    path = save_on(N, tmp_path, 1)[0]

    crafted(path, 1, change)

    with pytest.raises(UnsafeCheckpoint, match=text):
        load(tmp_path)


@pytest.mark.parametrize(("by", "text"), [(-64, "twice|in no shard"), (64, "in no shard|twice")])
def test_elements_that_are_twice_or_nowhere_are_refused(by: int, text: str, tmp_path: Path) -> None:
    path = save_on(N, tmp_path, 1)[0]

    def change(record: dict[str, Any]) -> None:
        last = record["slices"][-1]
        last[1], last[2] = last[1] + by, last[2] + by

    crafted(path, 1, change)

    with pytest.raises(UnsafeCheckpoint, match=text):
        load(tmp_path)


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("rank", range(N))
@pytest.mark.parametrize("op", ["create", "reserve", "write", "sync", "sync_folder", "rename"])
def test_a_drive_that_fails_one_rank_fails_all(rank: int, op: str, tmp_path: Path) -> None:
    save_on(N, tmp_path, 1)
    counted = FaultPlan()
    save_on(N, tmp_path, 2, [counted if r == rank else Quick() for r in range(N)])
    n_calls = counted.seen[op]
    assert n_calls or (op == "rename" and rank)

    for call in range(n_calls):
        full = FaultPlan()
        full.fail_at(op, call, errno.ENOSPC)
        found = save_on(N, tmp_path, 3, [full if r == rank else Quick() for r in range(N)])

        assert not isinstance(found[rank], Path), f"{op} {call}"
        for other, error in enumerate(found):
            assert isinstance(error, HeteroError)
            if other != rank:
                assert f"rank {rank}" in str(error)
        assert load(tmp_path) == contents(2, ENTRIES)
    assert save_on(N, tmp_path, 4) == [tmp_path / "step-4"] * N
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2", "step-4"]


@pytest.mark.parametrize("failing", range(N))
def test_a_rank_that_fails_early_removes_nothing_under_the_others(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, write = threading.Event(), ShardWriter.write

    def full(self: ShardWriter, *args: Any) -> None:
        if self._shard.number == failing:
            failed.set()
            raise DiskFull("planted", op="write", path="", errno=errno.ENOSPC)
        write(self, *args)

    def late(rank: int) -> None:
        assert rank == failing or failed.wait(SECONDS)
        time.sleep(0.1 * (rank != failing))

    def act(rank: ThreadRank) -> Path:
        with Folder.open(tmp_path, Quick()) as root:
            return save_as(rank, root, 1, before_commit=late)

    monkeypatch.setattr(ShardWriter, "write", full)
    for rank, error in enumerate(on_ranks(N, act)):
        assert isinstance(error, DiskFull if rank == failing else CheckpointError)
        assert rank == failing or f"failed on rank {failing}" in str(error)
    assert os.listdir(tmp_path) == []


def test_ranks_without_a_common_directory_are_told(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()

    def act(rank: ThreadRank) -> Path:
        with Folder.open(tmp_path / str(rank.rank), Quick()) as root:
            return save_as(rank, root, 1)

    first, second = on_ranks(2, act)

    assert isinstance(second, CheckpointError) and "first rank has made" in str(second)
    assert isinstance(first, CheckpointError) and "rank 1" in str(first)
    assert "machines of all ranks" in first.advice
    assert os.listdir(tmp_path / "0") == []


def test_entries_need_no_shard_if_they_are_empty(tmp_path: Path) -> None:
    assert any(entry.numel == 0 for entry in ENTRIES)
    assert all(ITEM_BYTES[entry.dtype] for entry in ENTRIES)
    save_on(2, tmp_path, 1)

    with CheckpointReader.open(tmp_path) as reader:
        assert sum(each.n_bytes for each in reader.slices()) == sum(e.n_bytes for e in ENTRIES)

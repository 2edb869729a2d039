"""Every operation of a save and of a load fails in every way: typed, clean, and without loss."""

from __future__ import annotations

import errno
import shutil
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hetero.checkpoint.manifest import SHARD, SavedTensor
from hetero.checkpoint.reader import CheckpointReader
from hetero.checkpoint.shard import GATHERED
from hetero.checkpoint.verify import verify
from hetero.checkpoint.writer import Writer, retain
from hetero.errors import (
    CheckpointCorrupt,
    DiskFull,
    DiskReadError,
    DiskWriteError,
    HeteroError,
    StorageError,
)
from hetero.io import ALIGN, IO, Folder, aligned_buffer
from hetero.testing.faults import FaultPlan
from tests.faults.saves import SMALL, Quick, contents, everything, load, save, unfinished

T = TypeVar("T")
ERRORS = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EINTR]
CHANGES = ["mkdir", "create", "reserve", "write", "sync", "sync_folder", "rename"]
REMOVALS = ["unlink", "rmdir", "lock"]
FULL = (errno.ENOSPC, errno.EDQUOT)
PUBLISHED, HIDDEN = 1, 2  # syncs of names: of the new checkpoint, of the removal of an old one


class Fresh:
    """Makes directories that hold the checkpoints of steps 1 and 2."""

    def __init__(self, place: Path) -> None:
        self.place, self.count = place, 0
        self.first = place / "first"
        self.first.mkdir()
        with Folder.open(self.first, Quick()) as root:
            save(root, 1)
            save(root, 2)

    def __call__(self) -> Path:
        self.count += 1
        return Path(shutil.copytree(self.first, self.place / str(self.count)))


@pytest.fixture
def fresh(tmp_path: Path) -> Fresh:
    return Fresh(tmp_path)


def save_and_retain(path: Path, io: IO, step: int) -> None:
    with Folder.open(path, io) as root:
        save(root, step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an old one that stays is a warning
            retain(root, keep_last=2)


def each_operation(fresh: Fresh, ops: list[str]) -> Iterator[tuple[str, int]]:
    """Yield (op, index) for every operation of these kinds in a save that removes an old one."""
    clean = Quick()
    save_and_retain(fresh(), clean, 3)
    for op in ops:
        assert clean.seen[op]
        yield from ((op, k) for k in range(clean.seen[op]))


def outcome(act: Callable[[], object]) -> str:
    """Return the name of the typed error that an act ends with, or "success"."""
    try:
        act()
    except HeteroError as error:
        assert error.advice
        return type(error).__name__
    return "success"


# -- saves ---------------------------------------------------------------------------------------


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("times", [1, None], ids=["once", "forever"])
@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_an_operation_that_fails_loses_nothing_and_the_next_save_works(
    fresh: Fresh, number: int, times: int | None
) -> None:
    counts: Counter[str] = Counter()
    for op, k in each_operation(fresh, [*CHANGES, *REMOVALS]):
        path, plan = fresh(), Quick()
        plan.fail_at(op, k, number, times)
        result = outcome(lambda path=path, plan=plan: save_and_retain(path, plan, 3))

        counts[result] += 1
        assert plan.fired
        check_what_is_left(path, op, k, result, forever=times is None)
        check_the_next_save(path, plan)
    print(f"{sum(counts.values())} failures, {dict(counts)}")


def check_what_is_left(path: Path, op: str, k: int, result: str, forever: bool) -> None:
    newest = load(path)
    assert newest in ((contents(3),) if result == "success" else (contents(2), contents(3)))
    assert load(path, 2) == contents(2)
    unsure = op == "sync_folder" and (k == HIDDEN or (k == PUBLISHED and forever))
    assert unsure or op in REMOVALS or not unfinished(path)


def check_the_next_save(path: Path, plan: FaultPlan) -> None:
    plan.clear()
    step = load(path)[0] + 1
    save_and_retain(path, plan, step)
    assert load(path) == contents(step)
    assert not unfinished(path)


@pytest.mark.parametrize("number", ERRORS[:4], ids=errno.errorcode.get)
def test_a_failure_says_whether_space_was_missing_and_where(fresh: Fresh, number: int) -> None:
    for op, k in each_operation(fresh, CHANGES):
        path, plan = fresh(), Quick()
        plan.fail_at(op, k, number)
        try:
            with Folder.open(path, plan) as root:
                save(root, 3)
        except StorageError as error:
            assert type(error) is (DiskFull if number in FULL else DiskWriteError)
            assert error.errno == number
            assert error.op == op
            assert error.path.startswith(str(path))
        else:
            assert k == HIDDEN  # removing old ones is not a part of the save


def test_everything_failing_from_some_operation_on_loses_nothing(fresh: Fresh) -> None:
    clean, counts = Quick(), Counter[str]()
    save_and_retain(fresh(), clean, 3)
    for k in range(clean.seen["any"]):
        path, plan = fresh(), Quick()
        plan.fail_at("any", k, errno.EIO, None)
        result = outcome(lambda path=path, plan=plan: save_and_retain(path, plan, 3))

        counts[result] += 1
        assert load(path) in ((contents(3),) if result == "success" else (contents(2), contents(3)))
        check_the_next_save(path, plan)
    print(f"{clean.seen['any']} drives that died, {dict(counts)}")


@pytest.mark.parametrize("times", [1, None], ids=["once", "forever"])
@pytest.mark.parametrize("got", [1, 511, 512, ALIGN - 1, ALIGN])
@pytest.mark.parametrize("direct", [False, True])
def test_writes_that_are_cut_short_are_continued(
    tmp_path: Path, direct: bool, got: int, times: int | None
) -> None:
    for k in range(5):
        path, plan = tmp_path / str(k), FaultPlan() if direct else Quick()
        path.mkdir()
        plan.short_at("write", k, got, times)
        result = outcome(lambda path=path, plan=plan: save_and_retain(path, plan, 3))

        if result == "success":
            assert load(path) == contents(3)
        else:  # a direct write that never moves a whole block
            assert (result, direct, got < ALIGN) == ("DiskWriteError", True, True)
            assert list(path.iterdir()) == []


@pytest.mark.parametrize("op", ["sync", "sync_folder"])
def test_a_sync_that_fails_is_not_tried_again_on_the_same_file(fresh: Fresh, op: str) -> None:
    for k in range(2):
        path, plan = fresh(), Quick()
        plan.fail_at(op, k, errno.EIO)
        with Folder.open(path, plan) as root, pytest.raises(DiskWriteError) as failure:
            save(root, 3)

        synced = [each.where for each in plan.log if each.op == op]
        assert failure.value.path not in synced or (op, k) == ("sync_folder", PUBLISHED)
        assert not (path / "step-3").exists()


@pytest.mark.parametrize("how", ["drop", "misdirect", "flip"])
def test_a_drive_that_lies_about_a_write_is_found_out_by_the_load(fresh: Fresh, how: str) -> None:
    for _, k in each_operation(fresh, ["write"]):
        path, plan = fresh(), Quick()
        plan.lie_at(k, how)
        save_and_retain(path, plan, 3)

        assert plan.fired
        with pytest.raises(CheckpointCorrupt) as failure:
            load(path)
        assert "step 2 is the newest good one" in failure.value.advice
        assert load(path, 2) == contents(2)


LARGE = (SavedTensor("param", "large", "", "uint8", (GATHERED,)), SMALL[0])


def test_a_failed_write_ends_the_save_for_every_thread(fresh: Fresh) -> None:
    path, plan = fresh(), Quick()
    plan.fail_at("write", 0, errno.EIO)
    with Folder.open(path, plan) as root:
        writer = Writer(root, 3, LARGE)
        with pytest.raises(DiskWriteError):
            writer.write(0, 0, aligned_buffer(GATHERED))
        with pytest.raises(HeteroError, match="abandoned"):
            writer.write(1, 0, memoryview(bytes(SMALL[0].n_bytes)))

    assert not unfinished(path)


def test_a_gathered_write_that_fails_is_told_by_a_later_write_or_the_commit(fresh: Fresh) -> None:
    path, plan = fresh(), Quick()
    plan.fail_at("write", 0, errno.EIO)
    many = [SavedTensor("param", f"{n}", "", "uint8", (GATHERED - 1,)) for n in range(5)]
    with Folder.open(path, plan) as root:
        with Writer(root, 3, SMALL[:1]) as writer:
            writer.write(0, 0, memoryview(bytes(SMALL[0].n_bytes)))
            with pytest.raises(DiskWriteError):
                writer.commit({})
        plan.fail_at("write", plan.seen["write"], errno.EIO)
        with Writer(root, 4, many) as writer, pytest.raises(DiskWriteError):
            for n in range(5):  # two of them fill a buffer, and there are two buffers
                writer.write(n, 0, memoryview(bytearray(GATHERED - 1)))

    assert not unfinished(path)


def test_many_small_tensors_go_to_the_drive_together(fresh: Fresh) -> None:
    path, plan = fresh(), Quick()
    many = [SavedTensor("param", f"{n}", "", "uint8", (ALIGN + n,)) for n in range(300)]
    with Folder.open(path, plan) as root, Writer(root, 3, many) as writer:
        for n in reversed(range(300)):  # in whatever order they come
            writer.write(n, 0, memoryview(bytes([n % 251]) * (ALIGN + n)))
        writer.commit({})

    writes = [op for op in plan.log if op.op == "write" and op.where.endswith(SHARD)]
    assert len(writes) == 1
    assert load(path, 3)[2] == tuple(bytes([n % 251]) * (ALIGN + n) for n in range(300))


class Stuck(IO):
    """A drive whose writes to the shard wait for a word, and then fail."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def call(self, op: str, act: Callable[..., T], *args: Any, where: str, offset: int = 0) -> T:
        if op == "write" and where.endswith(SHARD):
            self.reached.set()
            self.go_on.wait()
            raise OSError(errno.EIO, "late")
        return super().call(op, act, *args, where=where, offset=offset)


def test_a_commit_before_a_write_has_returned_does_not_outrun_its_failure(fresh: Fresh) -> None:
    path, drive = fresh(), Stuck()
    with Folder.open(path, drive) as root, ThreadPoolExecutor(2) as threads:
        writer = Writer(root, 3, LARGE[:1])
        writing = threads.submit(writer.write, 0, 0, aligned_buffer(GATHERED))
        drive.reached.wait()
        while min(writer._shard._crcs) < 0:  # its CRCs are there, its bytes are not
            pass
        committing = threads.submit(writer.commit, {})
        drive.go_on.set()

        assert isinstance(writing.exception(), HeteroError)
        assert isinstance(committing.exception(), HeteroError)
    assert not unfinished(path)
    assert load(path) == contents(2)


def test_a_drive_that_cannot_reserve_is_written_anyway(fresh: Fresh) -> None:
    path, plan = fresh(), Quick()
    plan.fail_at("reserve", 0, errno.EOPNOTSUPP)

    save_and_retain(path, plan, 3)

    assert load(path) == contents(3)


# -- loads ---------------------------------------------------------------------------------------


def load_with(plan: FaultPlan, path: Path) -> None:
    """Load with real direct I/O, and check what came."""
    with CheckpointReader.open(path, io=plan) as reader:
        assert everything(reader) == contents(2)


@pytest.mark.parametrize("times", [1, 2, None], ids=["once", "twice", "forever"])
@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_a_read_that_fails_is_an_error_or_is_read_again(
    fresh: Fresh, number: int, times: int | None
) -> None:
    path, clean = fresh(), FaultPlan()
    load_with(clean, path)
    for k in range(clean.seen["read"]):
        plan = FaultPlan()
        plan.fail_at("read", k, number, times)
        result = outcome(lambda plan=plan: load_with(plan, path))

        again = (number == errno.EIO and times == 1) or (number == errno.EINTR and times)
        assert result == ("success" if again else "DiskFull" if number in FULL else "DiskReadError")
        plan.clear()
        load_with(plan, path)


@pytest.mark.parametrize("op", ["open", "stat", "list"])
def test_a_look_at_names_that_fails_is_a_typed_error(fresh: Fresh, op: str) -> None:
    path, clean, counts = fresh(), FaultPlan(), Counter[str]()
    load_with(clean, path)
    for k in range(clean.seen[op]):
        plan = FaultPlan()
        plan.fail_at(op, k, errno.EIO, None)
        counts[outcome(lambda plan=plan: load_with(plan, path))] += 1

    assert "success" not in counts


@pytest.mark.parametrize("times", [1, None], ids=["once", "forever"])
@pytest.mark.parametrize("got", [1, 512, ALIGN - 1, ALIGN])
def test_reads_that_are_cut_short_are_continued(fresh: Fresh, got: int, times: int | None) -> None:
    path, clean = fresh(), FaultPlan()
    load_with(clean, path)
    for k in range(clean.seen["read"]):
        plan = FaultPlan()
        plan.short_at("read", k, got, times)
        result = outcome(lambda plan=plan: load_with(plan, path))

        stuck = got < ALIGN and times is None  # a direct read that never moves a whole block
        assert result == ("DiskReadError" if stuck else "success")


def test_verifying_tells_of_a_drive_that_cannot_be_read(fresh: Fresh) -> None:
    path, plan = fresh(), Quick()
    plan.fail_at("read", 1, errno.EIO, None)

    report = verify(path, plan)

    assert [found.ok for found in report.checkpoints] == [False, False]
    assert all("DiskReadError" in found.problem for found in report.checkpoints)


def test_damage_in_the_newest_is_told_even_where_older_ones_cannot_be_read(fresh: Fresh) -> None:
    path, plan = fresh(), FaultPlan()
    (path / "step-2" / SHARD).write_bytes(b"")
    plan.fail_at("read", 1, errno.EIO, None)

    with pytest.raises(CheckpointCorrupt, match="has 0 bytes") as failure:
        CheckpointReader.open(path, io=plan)

    assert "no other good one" in failure.value.advice
    with pytest.raises(DiskReadError):
        CheckpointReader.open(path, 1, plan)

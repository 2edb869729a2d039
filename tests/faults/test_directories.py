"""Who may remove what: attempts alive and dead, names of others, and checkpoints of old."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hetero.checkpoint import folders
from hetero.checkpoint.manifest import MANIFEST, SHARD
from hetero.checkpoint.reader import State, steps
from hetero.checkpoint.writer import Writer, retain
from hetero.errors import CheckpointError, ConfigError, StorageError
from hetero.io import IO, Folder, make_folder
from hetero.testing.faults import FaultPlan
from tests.faults.saves import SMALL, Quick, contents, load, save, unfinished

T = TypeVar("T")
LEFT = f"step-3.{'0' * 32}.tmp"


@pytest.fixture
def root(tmp_path: Path) -> Folder:
    return Folder.open(tmp_path, Quick())


def leave(path: Path, name: str = LEFT) -> Path:
    """Leave what a killed save leaves."""
    (path / name).mkdir()
    for file in (SHARD, MANIFEST):
        (path / name / file).write_bytes(b"half")
    return path / name


class Meanwhile(IO):
    """Lets something happen just before calls of one op, as another process would."""

    def __init__(
        self, op: str, act: Callable[[], object], times: int = 1, ending: str = ".tmp"
    ) -> None:
        self.op, self.act, self.times, self.ending = op, act, times, ending

    def call(self, op: str, act: Callable[..., T], *args: Any, where: str, offset: int = 0) -> T:
        if op == self.op and where.endswith(self.ending) and self.times:
            self.times -= 1
            self.act()
        return super().call(op, act, *args, where=where, offset=offset)


# -- attempts ------------------------------------------------------------------------------------


def test_what_a_killed_save_left_goes_with_the_next_save(tmp_path: Path, root: Folder) -> None:
    leave(tmp_path)

    save(root, 1)

    assert root.names() == ["step-1"]


def test_a_save_that_is_under_way_in_this_process_stays(tmp_path: Path, root: Folder) -> None:
    first = Writer(root, 1, [])
    save(root, 2)
    assert len(unfinished(tmp_path)) == 1

    first.commit({})

    assert root.names() == ["step-1", "step-2"]


def test_a_save_that_is_under_way_in_another_process_stays_until_that_dies(
    tmp_path: Path, root: Folder
) -> None:
    code = (
        "import sys\n"
        "from hetero.checkpoint.writer import Writer\n"
        "from hetero.io import Folder\n"
        f"writer = Writer(Folder.open({str(tmp_path)!r}), 1, [])\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        (alive,) = unfinished(tmp_path)
        save(root, 2)
        assert unfinished(tmp_path) == [alive]
        other.kill()

    save(root, 3)

    assert root.names() == ["step-2", "step-3"]


def test_a_checkpoint_that_is_published_while_it_is_swept_stays(
    tmp_path: Path, root: Folder
) -> None:
    first = Writer(root, 1, [])
    sweeping = Meanwhile("lock", lambda: first.commit({"whole": True}))

    Writer(Folder.open(tmp_path, sweeping), 2, []).abandon()

    assert sweeping.times == 0
    assert load(tmp_path) == (1, {"whole": True}, ())


def test_without_a_second_look_at_the_name_that_checkpoint_would_go(
    tmp_path: Path, root: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "leads_to", lambda root, name, folder: name.endswith(".tmp"))
    first = Writer(root, 1, [])
    sweeping = Meanwhile("lock", lambda: first.commit({}))

    Writer(Folder.open(tmp_path, sweeping), 2, []).abandon()

    assert steps(tmp_path)[0].state is State.DAMAGED


@pytest.mark.parametrize("op", ["open", "lock"])
def test_an_attempt_that_is_swept_as_soon_as_it_is_made_is_made_again(
    tmp_path: Path, root: Folder, op: str
) -> None:
    making = Meanwhile(op, lambda: folders.sweep(root))

    save(Folder.open(tmp_path, making), 1)

    assert making.times == 0
    assert load(tmp_path) == contents(1)
    assert not unfinished(tmp_path)


def test_attempts_that_are_always_swept_end_with_advice(tmp_path: Path, root: Folder) -> None:
    making = Meanwhile("lock", lambda: folders.sweep(root), times=100)

    with pytest.raises(CheckpointError, match="removed at once") as failure:
        Writer(Folder.open(tmp_path, making), 1, [])

    assert "stop it" in failure.value.advice


def test_where_there_are_no_locks_saves_work_and_nothing_is_swept(tmp_path: Path) -> None:
    left = leave(tmp_path)
    plan = Quick()
    plan.fail_at("lock", 0, errno.EOPNOTSUPP, None)

    save(Folder.open(tmp_path, plan), 1)

    assert load(tmp_path) == contents(1)
    assert left.exists()


@pytest.mark.parametrize(
    "name",
    ["step-3.tmp", "step-03", "step-3.0.tmp", f"step-3.{'0' * 32}.tmp.bak", f"a-3.{'0' * 32}.tmp"],
)
def test_a_name_that_is_not_ours_is_never_touched(tmp_path: Path, root: Folder, name: str) -> None:
    left = leave(tmp_path, name)

    save(root, 4)
    save(root, 5)
    retain(root, 1)

    assert (left / MANIFEST).read_bytes() == b"half"


def test_a_link_with_a_name_of_ours_is_never_followed(tmp_path: Path, root: Folder) -> None:
    elsewhere = leave(tmp_path, "elsewhere")
    (tmp_path / LEFT).symlink_to(elsewhere)

    save(root, 4)

    assert (tmp_path / LEFT).is_symlink()
    assert (elsewhere / MANIFEST).exists()


def test_another_users_attempt_stays(tmp_path: Path, root: Folder) -> None:
    left = leave(tmp_path)
    try:
        os.chown(left, os.geteuid() + 1, -1)
    except PermissionError:
        pytest.skip("only root gives directories away")

    save(root, 4)

    assert (left / MANIFEST).exists()


def test_a_file_of_others_in_a_dead_attempt_stays(tmp_path: Path, root: Folder) -> None:
    left = leave(tmp_path)
    (left / "notes.txt").write_text("mine")

    save(root, 4)

    assert os.listdir(left) == ["notes.txt"]


def test_an_existing_step_is_refused_and_nothing_is_made(tmp_path: Path, root: Folder) -> None:
    save(root, 1)
    made = len(root._io.log)

    with pytest.raises(CheckpointError, match="step-1 is there already") as failure:
        Writer(root, 1, SMALL)

    done = {op.op for op in root._io.log[made:]}
    assert done <= {"stat"}
    assert "overwrites nothing" in failure.value.advice
    assert load(tmp_path) == contents(1)


def test_of_two_saves_of_one_step_the_first_to_commit_stands(tmp_path: Path, root: Folder) -> None:
    first, second = Writer(root, 1, []), Writer(root, 1, [])
    second.commit({"who": "second"})

    with pytest.raises(CheckpointError, match="is there already"):
        first.commit({"who": "first"})

    assert load(tmp_path) == (1, {"who": "second"}, ())
    assert root.names() == ["step-1"]


def test_a_save_that_ends_in_an_exception_leaves_nothing(root: Folder) -> None:
    with pytest.raises(KeyError), Writer(root, 1, SMALL):
        raise KeyError

    assert root.names() == []


def test_a_forked_child_leaves_the_save_of_its_parent_alone(tmp_path: Path, root: Folder) -> None:
    writer = Writer(root, 1, SMALL)
    data = contents(1)[2]
    writer.write(0, 0, memoryview(data[0]))
    pid = os.fork()
    if pid == 0:
        writer.abandon()
        os._exit(0)
    os.waitpid(pid, 0)

    for number in range(1, len(SMALL)):
        writer.write(number, 0, memoryview(data[number]))
    writer.commit(contents(1)[1])

    assert load(tmp_path) == contents(1)


def test_what_is_saved_is_for_its_owner_alone(tmp_path: Path, root: Folder) -> None:
    path = save(root, 1)

    assert path.stat().st_mode & 0o777 == 0o700
    assert {each.stat().st_mode & 0o777 for each in path.iterdir()} == {0o600}


# -- old checkpoints -----------------------------------------------------------------------------


def test_the_last_ones_are_kept_by_step(root: Folder) -> None:
    for step in (30, 100, 9, 20):
        save(root, step)

    assert retain(root, 2) == [9, 20]
    assert root.names() == ["step-100", "step-30"]
    assert retain(root, 2) == []


def test_a_damaged_checkpoint_neither_counts_nor_goes(tmp_path: Path, root: Folder) -> None:
    for step in (1, 2, 3, 4):
        save(root, step)
    os.truncate(tmp_path / "step-4" / SHARD, 0)
    (tmp_path / "step-1" / MANIFEST).write_bytes(b"{}")

    assert retain(root, 1) == [2]
    assert root.names() == ["step-1", "step-3", "step-4"]


def test_a_checkpoint_with_files_of_others_stays_whole_with_a_warning(
    tmp_path: Path, root: Folder
) -> None:
    for step in (1, 2, 3):
        save(root, step)
    (tmp_path / "step-1" / "notes.txt").write_text("mine")

    with pytest.warns(UserWarning, match=r"step-1 stays: 'notes.txt'"):
        assert retain(root, 1) == [2]

    assert load(tmp_path, 1) == contents(1)


def test_a_removal_that_fails_is_a_warning(tmp_path: Path) -> None:
    plan = Quick()
    root = Folder.open(tmp_path, plan)
    for step in (1, 2):
        save(root, step)
    plan.fail_at("rename", 4, errno.EROFS)

    with pytest.warns(UserWarning, match="an older checkpoint was not removed: .*Read-only"):
        assert retain(root, 1) == []

    assert load(tmp_path, 1) == contents(1)


def test_keeping_nothing_is_refused(root: Folder) -> None:
    with pytest.raises(ConfigError, match="keep_last=0"):
        retain(root, 0)


def test_what_there_is_is_listed_with_its_state(tmp_path: Path, root: Folder) -> None:
    for step in (10, 9):
        save(root, step)
    (tmp_path / "step-10" / SHARD).unlink()
    leave(tmp_path)

    found = [(each.step, each.name, each.state) for each in steps(tmp_path)]

    assert found == [
        (3, LEFT, State.UNFINISHED),
        (9, "step-9", State.COMPLETE),
        (10, "step-10", State.DAMAGED),
    ]
    assert f"{SHARD} is missing" in steps(tmp_path)[2].problem


# -- the directory itself ------------------------------------------------------------------------


def test_a_directory_that_another_job_makes_at_the_same_moment_is_taken(tmp_path: Path) -> None:
    where = tmp_path / "a" / "b"
    io = Meanwhile("mkdir", lambda: where.mkdir(parents=True), ending="a")

    with make_folder(where, io) as folder:
        assert folder.path == str(where)
    assert io.times == 0


def test_each_directory_that_is_made_is_durable_before_the_next_one(tmp_path: Path) -> None:
    io = FaultPlan()

    make_folder(tmp_path / "a" / "b", io).close()

    made = [op.op for op in io.log if op.op in ("mkdir", "sync_folder")]
    assert made == ["mkdir", "sync_folder", "mkdir", "sync_folder"]


def test_jobs_that_make_one_directory_all_get_it(tmp_path: Path) -> None:
    for number in range(20):
        where = tmp_path / str(number) / "a" / "b"
        with ThreadPoolExecutor(4) as jobs:
            made = list(jobs.map(lambda _, where=where: make_folder(where, Quick()), range(4)))
        assert [folder.path for folder in made] == [str(where)] * 4


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("x" * 300, "leads to no directory"),
        ("file/x", "leads to no directory"),
        ("file", "leads to no directory"),
        ("a\0b", "name one"),
        ("\ud800", "name one"),
    ],
    ids=lambda value: repr(value)[:12],
)
def test_a_directory_that_cannot_be_is_a_typed_error(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises((StorageError, ConfigError)) as refused:
        make_folder(tmp_path / name)

    assert said in refused.value.advice


def test_a_directory_that_may_not_be_looked_into_is_a_typed_error(tmp_path: Path) -> None:
    io = FaultPlan()
    io.fail_at("open", 0, errno.EACCES, None)

    with pytest.raises(StorageError, match="Permission denied") as refused:
        make_folder(tmp_path / "a", io)
    assert "permissions" in refused.value.advice


def test_a_save_without_a_descriptor_left_leaves_nothing(tmp_path: Path) -> None:
    with Folder.open(tmp_path, Quick()) as root:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        spare = [os.open(tmp_path, os.O_RDONLY) for _ in range(2)]  # those of an attempt
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(spare) + 1, limits[1]))
        os.close(spare.pop())
        try:
            with pytest.raises(StorageError, match="Too many open files") as refused:
                Writer(root, 1, SMALL)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            os.close(spare.pop())

    assert "ulimit" in refused.value.advice
    assert not list(tmp_path.iterdir())

"""The door to files: loops, typed errors, direct and buffered, folders, refusals, and its twin."""

from __future__ import annotations

import errno
import os
import random
import socket
import stat
import subprocess
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hetero.io as io_module
from hetero import mounts
from hetero.errors import (
    ConfigError,
    DiskFull,
    DiskReadError,
    DiskWriteError,
    HeteroError,
    StorageError,
    TruncatedChunk,
)
from hetero.io import (
    ALIGN,
    IO,
    PATIENCE,
    WINDOW,
    File,
    Folder,
    align_up,
    aligned_buffer,
    spill_folder,
)
from hetero.mounts import Mount, mount_of
from hetero.testing.faults import FaultPlan

SIZE = 5 * ALIGN
DIRECT = pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])


def block(seed: int, n_bytes: int = SIZE) -> memoryview:
    buffer = aligned_buffer(n_bytes)[:n_bytes]
    buffer[:] = random.Random(seed).randbytes(n_bytes)
    return buffer


def read(file: File, offset: int = 0, n_bytes: int = SIZE) -> bytes:
    buffer = aligned_buffer(n_bytes)[:n_bytes]
    file.read(offset, buffer)
    return bytes(buffer)


def private(disk: Path, io: IO | None = None, *, direct: bool = True) -> File:
    return Folder.open(disk, io).private(direct=direct)


# -- transfers -----------------------------------------------------------------------------------


@DIRECT
def test_what_is_written_is_read(disk: Path, direct: bool) -> None:
    file = private(disk, direct=direct)
    assert file.direct == direct
    for number, offset in enumerate((0, SIZE, 7 * SIZE, 3 * 2**32)):
        file.write(offset, block(number))
    for number, offset in enumerate((0, SIZE, 7 * SIZE, 3 * 2**32)):
        assert read(file, offset) == bytes(block(number))
    assert file.size() == 3 * 2**32 + SIZE and file.allocated() < 2**20


def test_buffered_transfers_need_no_alignment(disk: Path) -> None:
    file = private(disk, direct=False)
    for n_bytes in (1, 511, 512, 513, 4095, 4097):
        file.write(3, block(n_bytes, n_bytes))
        assert read(file, 3, n_bytes) == bytes(block(n_bytes, n_bytes))


@pytest.mark.parametrize(("offset", "n_bytes"), [(1, ALIGN), (0, ALIGN - 1)])
def test_a_direct_transfer_out_of_step_is_a_typed_error(
    disk: Path, offset: int, n_bytes: int
) -> None:
    file = private(disk)
    with pytest.raises(DiskWriteError) as failure:
        file.write(offset, aligned_buffer(2 * ALIGN)[:n_bytes])
    assert failure.value.errno == errno.EINVAL


@DIRECT
def test_a_read_past_the_end_says_what_there_was(disk: Path, direct: bool) -> None:
    file = private(disk, direct=direct)
    file.write(0, block(0))

    with pytest.raises(TruncatedChunk) as failure:
        read(file, ALIGN, SIZE)

    found = failure.value
    assert (found.op, found.offset, found.wanted, found.got) == ("read", ALIGN, SIZE, 4 * ALIGN)
    assert found.path == str(disk) and "another copy" in found.advice


@pytest.mark.parametrize(
    ("direct", "got"),
    [
        *((False, got) for got in (1, 511, 512, 4095, 4096, SIZE - 1)),
        *((True, got) for got in (ALIGN, ALIGN + 1, ALIGN + 512, SIZE - 1)),
    ],
)
def test_short_transfers_go_on_where_they_ended(disk: Path, direct: bool, got: int) -> None:
    plan = FaultPlan()
    plan.short_at("write", 0, got, times=None)
    plan.short_at("read", 0, got, times=None)
    file = private(disk, plan, direct=direct)

    file.write(ALIGN, block(1))

    assert read(file, ALIGN) == bytes(block(1))
    calls = -(-SIZE // (got // ALIGN * ALIGN if direct else got))
    assert plan.seen["write"] == plan.seen["read"] == calls and plan.fired == 2 * calls


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_direct_transfer_that_never_moves_a_whole_block_ends(disk: Path, op: str) -> None:
    plan = FaultPlan()
    file = private(disk, plan)
    file.write(0, block(0))
    plan.short_at(op, 1 if op == "write" else 0, ALIGN - 1, times=None)

    with pytest.raises(StorageError, match="no progress"):
        read(file) if op == "read" else file.write(0, block(1))

    assert PATIENCE < plan.fired <= 2 * PATIENCE + 2


@DIRECT
@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN], ids=errno.errorcode.get)
def test_what_is_interrupted_is_continued_but_not_for_ever(
    disk: Path, direct: bool, number: int
) -> None:
    plan = FaultPlan()
    file = private(disk, plan, direct=direct)
    plan.fail_at("write", 0, number, times=PATIENCE)
    plan.fail_at("read", 0, number, times=PATIENCE)
    file.write(0, block(1))
    assert read(file) == bytes(block(1))
    assert plan.fired == 2 * PATIENCE

    plan.fail_at("write", plan.seen["write"], number, times=None)
    with pytest.raises(DiskWriteError, match="no progress"):
        file.write(0, block(2))


def test_a_read_that_fails_is_tried_once_more(disk: Path) -> None:
    plan = FaultPlan()
    file = private(disk, plan)
    file.write(0, block(1))
    plan.fail_at("read", 0, errno.EIO)
    assert read(file) == bytes(block(1))
    assert plan.fired == 1 and plan.seen["read"] == 2

    plan.fail_at("read", 2, errno.EIO, times=2)
    with pytest.raises(DiskReadError) as failure:
        read(file)
    assert plan.fired == 3 and plan.seen["read"] == 4
    assert failure.value.errno == errno.EIO


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, DiskFull),
        (errno.EDQUOT, DiskFull),
        (errno.EFBIG, DiskFull),
        (errno.EIO, DiskWriteError),
        (errno.EROFS, DiskWriteError),
        (errno.EACCES, DiskWriteError),
    ],
)
def test_a_write_that_fails_says_everything(
    disk: Path, number: int, kind: type[StorageError]
) -> None:
    plan = FaultPlan()
    file = private(disk, plan)
    plan.short_at("write", 0, 2 * ALIGN)
    plan.fail_at("write", 1, number)

    with pytest.raises(kind) as failure:
        file.write(ALIGN, block(1))

    found = failure.value
    assert type(found) is kind and issubclass(kind, HeteroError) and issubclass(kind, OSError)
    assert (found.op, found.offset, found.wanted, found.got) == (
        *("write", 3 * ALIGN, SIZE),
        2 * ALIGN,
    )
    assert found.errno == number and found.path == str(disk) and found.advice
    assert os.strerror(number) in str(found)
    assert plan.fired == 2 and plan.seen["write"] == 2  # a failed write is not repeated here


def test_advice_tells_what_to_do(disk: Path) -> None:
    said = {}
    for number in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO):
        plan = FaultPlan()
        plan.fail_at("reserve", 0, number)
        with pytest.raises(StorageError) as failure:
            private(disk, plan).reserve(2**20)
        said[number] = failure.value.advice
    assert "free 1 MiB" in said[errno.ENOSPC]
    assert "remount" in said[errno.EROFS]
    assert "permissions" in said[errno.EACCES]
    assert "system log" in said[errno.EIO]


class Calls(IO):
    """Notes the names of calls, in order."""

    def __init__(self) -> None:
        self.ops: list[str] = []

    def call(
        self, op: str, act: Callable[..., Any], *args: Any, where: str, offset: int = 0
    ) -> Any:
        self.ops.append(op)
        return super().call(op, act, *args, where=where, offset=offset)


def test_every_call_goes_through_the_door(disk: Path) -> None:
    calls = Calls()
    folder = Folder.open(disk, calls)
    with folder.create("a") as file:
        file.write(0, block(0))
        file.read(0, block(0))
        file.sync()
        file.size()
        file.reserve(2 * SIZE)
    folder.rename("a", "b")
    assert folder.has("b") and folder.names() == ["b"]
    folder.make("c").close()
    folder.sync()
    folder.rmdir("c")
    folder.unlink("b")
    folder.private().close()
    wanted = "open create write read sync stat reserve rename stat list mkdir open sync_folder"
    assert calls.ops == [*wanted.split(), "rmdir", "unlink", "private"]


def test_what_passes_a_buffered_file_is_pushed_out_of_the_page_cache(disk: Path) -> None:
    plan = FaultPlan()
    file = private(disk, plan, direct=False)
    piece = block(0, WINDOW // 4)
    for at in range(9):
        file.write(at * len(piece), piece)
    assert plan.seen["sync"] == 2


def test_a_sync_that_fails_in_the_window_is_a_write_that_failed(disk: Path) -> None:
    plan = FaultPlan()
    file = private(disk, plan, direct=False)
    plan.fail_at("sync", 0, errno.EIO)
    with pytest.raises(DiskWriteError):
        file.write(0, block(0, WINDOW))
    assert plan.fired == 1


def test_reserving_takes_the_space_now(disk: Path) -> None:
    file = private(disk)
    file.reserve(2**20)
    assert file.size() == file.allocated() == 2**20
    file.reserve(0)
    assert file.size() == 2**20


def test_a_closed_file_is_closed_once(disk: Path) -> None:
    file = private(disk)
    fd = file.fileno()
    file.close()
    other = os.open(disk, os.O_RDONLY)
    if other != fd:
        os.dup2(other, fd)
    file.close()  # the number is in use again, by somebody else
    del file
    os.fstat(fd)
    os.close(fd)


def test_a_closed_folder_shows_nothing(disk: Path) -> None:
    """Least of all the working directory, which some calls take -1 for."""
    folder = Folder.open(disk)
    folder.close()
    folder.close()
    for act in (folder.names, folder.private, folder.sync, folder.space):
        with pytest.raises((StorageError, ValueError)):
            act()


def test_a_forked_child_does_not_close_what_is_its_parents(disk: Path) -> None:
    folder = Folder.open(disk)
    file = folder.create("a")
    fd = file.fileno()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            file.close()
            folder.close()
            os.fstat(fd)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    file.write(0, block(0))


def test_files_are_not_inherited_by_programs(disk: Path) -> None:
    folder = Folder.open(disk)
    files = [folder.private(), folder.create("a"), folder.create("b", direct=True)]
    assert not any(os.get_inheritable(file.fileno()) for file in files)


def test_threads_may_share_a_file(disk: Path) -> None:
    file, wrong = private(disk), []

    def work(number: int) -> None:
        for turn in range(20):
            data = block(100 * number + turn)
            file.write(number * SIZE, data)
            if read(file, number * SIZE) != bytes(data):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -- direct or buffered --------------------------------------------------------------------------


def test_alignment(disk: Path) -> None:
    assert [align_up(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
    assert len(aligned_buffer(5)) == ALIGN and len(aligned_buffer(0)) == ALIGN
    assert not any(aligned_buffer(ALIGN))


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_where_direct_is_refused_a_file_is_buffered_for_life(disk: Path, number: int) -> None:
    plan = FaultPlan()
    folder = Folder.open(disk, plan)
    plan.fail_at("private", 0, number)
    plan.fail_at("create", 0, number)
    plan.fail_at("open", 1, number)

    for file in (folder.private(), folder.create("a", direct=True), folder.file("a", direct=True)):
        assert not file.direct
    assert plan.fired == 3
    assert folder.names() == ["a"]


def test_what_was_made_before_direct_was_refused_is_made_again(disk: Path) -> None:
    """Some file systems refuse only after they have made the file."""

    class Late(IO):
        fired = 0

        def call(
            self, op: str, act: Callable[..., Any], *args: Any, where: str, offset: int = 0
        ) -> Any:
            result = super().call(op, act, *args, where=where, offset=offset)
            if op == "create" and not self.fired:
                self.fired = 1
                os.close(result)
                raise OSError(errno.EINVAL, "no O_DIRECT here")
            return result

    io = Late()
    file = Folder.open(disk, io).create("a", direct=True)
    assert io.fired and not file.direct
    file.write(0, block(0))
    assert (disk / "a").stat().st_size == SIZE


@pytest.mark.parametrize("number", sorted(io_module.NO_TMPFILE), ids=errno.errorcode.get)
def test_where_files_cannot_be_made_without_a_name_they_lose_it_at_once(
    disk: Path, number: int
) -> None:
    plan = FaultPlan()
    plan.fail_at("private", 0, number, None)
    file = Folder.open(disk, plan).private()

    assert plan.fired and os.listdir(disk) == []
    assert os.fstat(file.fileno()).st_nlink == 0
    file.write(0, block(0))
    assert read(file) == bytes(block(0))


def test_other_failures_of_a_private_file_are_told(disk: Path) -> None:
    plan = FaultPlan()
    plan.fail_at("private", 0, errno.EROFS)
    with pytest.raises(DiskWriteError, match="read-only"):
        Folder.open(disk, plan).private()
    assert plan.fired == 1 and os.listdir(disk) == []


# -- folders -------------------------------------------------------------------------------------

BAD_NAMES = ["", ".", "..", "a/b", "/etc/passwd", "../x", "a\0b", "n" * 256, "é" * 128]


@pytest.mark.parametrize("name", BAD_NAMES, ids=range(len(BAD_NAMES)))
def test_a_name_that_leaves_its_folder_is_refused(disk: Path, name: str) -> None:
    folder = Folder.open(disk)
    (disk / "a").mkdir()
    (disk / "a" / "b").write_text("mine")
    for act in (folder.file, folder.create, folder.make, folder.folder):
        if name == "." and act == folder.folder:
            continue  # that is this folder itself
        with pytest.raises(StorageError):
            act(name)
    assert sorted(path.name for path in disk.rglob("*")) == ["a", "b"]


def plant(disk: Path, kind: str) -> None:
    """Put something at the name "x" that is no regular file of ours."""
    outside = disk / "outside"
    outside.write_bytes(b"mine")
    if kind == "symlink":
        (disk / "x").symlink_to(outside)
    elif kind == "dangling":
        (disk / "x").symlink_to(disk / "nowhere")
    elif kind == "hard link":
        (disk / "x").hardlink_to(outside)
    elif kind == "fifo":
        os.mkfifo(disk / "x")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.relpath(disk / "x"))
    elif kind == "directory":
        (disk / "x").mkdir()
    else:
        os.mknod(disk / "x", stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero


KINDS = ["symlink", "dangling", "hard link", "fifo", "socket", "directory"]
KINDS += ["device"] if os.geteuid() == 0 else []


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_file_never_takes_the_place_of_what_is_there(disk: Path, kind: str) -> None:
    plant(disk, kind)
    with pytest.raises(DiskWriteError) as failure:
        Folder.open(disk).create("x")
    assert failure.value.errno == errno.EEXIST
    assert (disk / "outside").read_bytes() == b"mine"
    assert not (disk / "nowhere").exists()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "hard link"])
def test_only_regular_files_are_read_and_links_are_not_followed(disk: Path, kind: str) -> None:
    plant(disk, kind)
    with pytest.raises(DiskReadError):
        Folder.open(disk).file("x")


def test_a_hard_link_is_the_file_itself(disk: Path) -> None:
    plant(disk, "hard link")
    assert read(Folder.open(disk).file("x"), 0, 4) == b"mine"


@pytest.mark.parametrize("kind", ["symlink", "dangling", "hard link"])
def test_removing_a_link_leaves_where_it_leads(disk: Path, kind: str) -> None:
    plant(disk, kind)
    folder = Folder.open(disk)
    assert folder.has("x")
    folder.unlink("x")
    assert not folder.has("x") and (disk / "outside").read_bytes() == b"mine"


def test_a_link_to_a_folder_is_not_followed(disk: Path) -> None:
    (disk / "real").mkdir()
    (disk / "x").symlink_to(disk / "real")
    folder = Folder.open(disk)
    with pytest.raises(DiskReadError):
        folder.folder("x")
    with pytest.raises(DiskWriteError):
        folder.make("x")
    with Folder.open(disk / "x"):  # one that the user names is theirs
        pass


def test_a_new_folder_is_for_its_owner_alone(disk: Path) -> None:
    folder = Folder.open(disk)
    made = folder.make("a")
    made.create("b")
    assert (disk / "a").stat().st_mode & 0o777 == 0o700
    assert (disk / "a" / "b").stat().st_mode & 0o777 == 0o600
    with pytest.raises(DiskWriteError):
        folder.make("a")
    with pytest.raises(DiskWriteError):
        folder.rmdir("a")
    assert made.where("b") == str(disk / "a" / "b") and folder.space() > 0


@pytest.mark.parametrize(
    ("op", "act"),
    [
        ("mkdir", lambda folder: folder.make("new")),
        ("create", lambda folder: folder.create("new")),
        ("rename", lambda folder: folder.rename("a", "b")),
        ("unlink", lambda folder: folder.unlink("a")),
        ("rmdir", lambda folder: folder.rmdir("c")),
        ("sync_folder", lambda folder: folder.sync()),
        ("list", lambda folder: folder.names()),
        ("stat", lambda folder: folder.space()),
        ("open", lambda folder: folder.file("a")),
    ],
)
def test_every_change_of_a_folder_that_fails_is_a_typed_error(
    disk: Path, op: str, act: Callable[[Folder], Any]
) -> None:
    (disk / "a").write_bytes(b"1")
    (disk / "c").mkdir()
    for number, times in ((errno.EIO, 1), (errno.ENOSPC, 1), (errno.EINTR, None)):
        plan = FaultPlan()
        folder = Folder.open(disk, plan)
        plan.fail_at(op, plan.seen[op], number, times)
        with pytest.raises(StorageError) as failure:
            act(folder)
        assert plan.fired and failure.value.errno == number
        assert failure.value.op == op and failure.value.path.startswith(str(disk))
    assert sorted(os.listdir(disk)) == ["a", "c"]
    plan = FaultPlan()
    folder = Folder.open(disk, plan)
    plan.fail_at(op, plan.seen[op], errno.EINTR, PATIENCE - 1)
    act(folder)
    assert plan.fired == PATIENCE - 1


# -- where homes may go --------------------------------------------------------------------------


def test_a_directory_of_ones_own_on_a_drive_is_taken(disk: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spill_folder(disk).close()
        (disk / "link").symlink_to(disk)
        spill_folder(disk / "link").close()
        disk.chmod(0o1777)
        spill_folder(str(disk)).close()


@pytest.mark.parametrize("name", ["nowhere", "file", "file/below", "fifo", "a\0b", "n" * 300])
def test_what_is_no_directory_is_refused(disk: Path, name: str) -> None:
    (disk / "file").write_text("")
    os.mkfifo(disk / "fifo")
    with pytest.raises(ConfigError, match="nvme=") as failure:
        spill_folder(f"{disk}/{name}")
    assert "existing directories" in failure.value.advice


def test_a_directory_that_everybody_may_write_is_refused(disk: Path) -> None:
    disk.chmod(0o777)
    with pytest.raises(ConfigError, match="mode 777") as failure:
        spill_folder(disk)
    assert f"chmod o-w {disk}" in failure.value.advice


@pytest.mark.skipif(mount_of("/dev/shm").kind != "tmpfs", reason="no tmpfs here")
def test_memory_that_looks_like_a_disk_is_refused() -> None:
    with pytest.raises(ConfigError, match="lies on tmpfs, which is RAM") as failure:
        spill_folder("/dev/shm")
    assert "raise host=" in failure.value.advice


@pytest.mark.parametrize("kind", ["ramfs", "tmpfs"])
def test_every_kind_of_memory_is_refused(
    disk: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(mounts, "mount_of", lambda path: Mount(kind))
    with pytest.raises(ConfigError, match="RAM"):
        spill_folder(disk)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "overlay", "9p"])
def test_a_directory_far_away_is_taken_with_a_warning(
    disk: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(mounts, "mount_of", lambda path: Mount(kind))
    with pytest.warns(UserWarning, match=kind):
        spill_folder(disk).close()


def test_what_a_directory_lies_on_is_told_by_its_device(tmp_path: Path) -> None:
    found = os.stat(tmp_path).st_dev
    here = f"{os.major(found)}:{os.minor(found)}"
    (tmp_path / "proc/self").mkdir(parents=True)
    table = tmp_path / "proc/self/mountinfo"
    table.write_text(
        "21 1 0:19 / /sys rw,nosuid - sysfs sysfs rw\n"
        f"25 1 {here} /a /b rw,relatime shared:1 master:2 - xfs /dev/sda1 rw\n"
        f"26 1 {here} / /c rw - other none rw\n"
    )
    assert mount_of(tmp_path, tmp_path) == Mount("xfs")
    table.write_text("21 1 0:19 / /sys rw - sysfs sysfs rw\n")
    assert mount_of(tmp_path, tmp_path) == Mount("")
    table.unlink()
    assert mount_of(tmp_path, tmp_path) == mount_of(tmp_path / "nowhere") == Mount("")


# -- the fault plan ------------------------------------------------------------------------------


def test_calls_are_counted_from_nought_for_each_op_and_for_all(disk: Path) -> None:
    plan = FaultPlan(keep_data=True)
    folder = Folder.open(disk, plan)
    plan.fail_at("write", 1, errno.EIO)
    file = folder.create("a")
    file.write(0, block(0))
    with pytest.raises(DiskWriteError):
        file.write(SIZE, block(1))
    file.write(SIZE, block(2))
    folder.rename("a", "b")

    assert plan.seen == Counter({"open": 1, "create": 1, "write": 3, "rename": 1, "any": 5})
    assert [op.op for op in plan.log] == ["open", "create", "write", "write", "rename"]
    assert plan.log[3].data == bytes(block(2)) and plan.log[3].offset == SIZE
    assert plan.log[4].to == "b" and plan.log[4].where == str(disk / "a")
    assert plan.fired == 1


def test_a_plan_for_any_call_counts_what_changes_something(disk: Path) -> None:
    plan = FaultPlan()
    plan.fail_at("any", 2, errno.EIO, None)
    folder = Folder.open(disk, plan)
    folder.names()
    file = folder.create("a")
    file.write(0, block(0))
    assert folder.has("a") and file.size() == SIZE
    with pytest.raises(DiskWriteError):
        file.write(0, block(0))
    with pytest.raises(DiskWriteError):
        file.sync()
    with pytest.raises(DiskWriteError):
        folder.unlink("a")
    assert plan.fired == 3
    plan.clear()
    folder.unlink("a")


@DIRECT
@pytest.mark.parametrize(("how", "at"), [("drop", None), ("misdirect", ALIGN), ("flip", 0)])
def test_lies_are_told_as_they_are_planned(
    disk: Path, direct: bool, how: Any, at: int | None
) -> None:
    plan = FaultPlan()
    file = private(disk, plan, direct=direct)
    file.reserve(2 * SIZE)
    plan.lie_at(0, how)

    file.write(0, block(1))

    found, wanted = read(file, 0, 2 * SIZE), bytes(block(1))
    assert plan.fired == 1
    if how == "flip":
        different = [i for i, byte in enumerate(wanted) if found[i] != byte]
        assert len(different) == 1 and different[0] == SIZE // 2
    elif at is None:
        assert not any(found)
    else:
        assert found[at : at + SIZE] == wanted and not any(found[:at])


def test_a_process_dies_at_the_call_that_was_planned(disk: Path) -> None:
    code = (
        "import sys\n"
        "from hetero.io import Folder\n"
        "from hetero.testing.faults import FaultPlan\n"
        "plan = FaultPlan()\n"
        "plan.kill_at(3)\n"
        "folder = Folder.open(sys.argv[1], plan)\n"
        "for name in 'abcdef':\n"
        "    folder.create(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, disk], check=False, timeout=60)
    assert done.returncode == -9
    assert sorted(os.listdir(disk)) == ["a", "b", "c"]

"""The only door to files (floor 0, no torch).

Every system call that touches a file goes through `IO.call`, where tests count, record, fail,
shorten, falsify or kill it (`hetero.testing`). Above it, `File` and `Folder` loop until a transfer
is complete, check every result and turn failures into typed errors. Folders are descriptors, names
are never paths, and symbolic links are not followed.

[Note: direct I/O]  With O_DIRECT the buffer's address, the offset and the length are multiples of
`ALIGN`. If a file system refuses it, a file is buffered, and its pages are dropped from the page
cache after each transfer. A file is one or the other for life.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hetero.errors import (
    ConfigError,
    DiskFull,
    DiskReadError,
    DiskWriteError,
    StorageError,
    TruncatedChunk,
)
from hetero.mounts import check_spill
from hetero.types import format_bytes

T = TypeVar("T")
D = TypeVar("D", bound="Descriptor")

ALIGN = 4096  # bytes: a multiple of any logical block, 512 or 4096
MAX_CALL = 2**30  # bytes of one system call; Linux moves at most 2^31 - 4096
MAX_PARTS = 1024  # pieces of memory of one system call: IOV_MAX
WINDOW = 32 * 2**20  # bytes written through the page cache before they are pushed out of it
PATIENCE = 64  # calls in a row without progress
MAX_NAME_BYTES = 255
RENAME_EXCHANGE = 2  # of linux/fs.h
READ_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
CLOSED = -2  # a descriptor; -1 is the working directory to os.listdir
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
ADVICE = {  # for errors that are not the drive's
    errno.EROFS: "the file system is read-only: remount it, or name another directory",
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM),
        "the directory's permissions do not allow it: name another one",
    ),
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
        "the path leads to no directory: name another one",
    ),
    **dict.fromkeys(
        (errno.EMFILE, errno.ENFILE),
        "too many files are open: close some, or raise the limit (ulimit -n)",
    ),
}


def align_up(n_bytes: int) -> int:
    """Return the next multiple of `ALIGN`."""
    return -(-n_bytes // ALIGN) * ALIGN


def aligned_buffer(n_bytes: int) -> memoryview:
    """Return zeroed memory of ``n_bytes`` rounded up to `ALIGN`, for direct transfers. It is shared
    with children, so that a fork cannot divert a transfer under way."""
    return memoryview(mmap.mmap(-1, max(ALIGN, align_up(n_bytes))))


class IO:
    """Carries out each call as given."""

    def call(self, op: str, act: Callable[..., T], *args: Any, where: str, offset: int = 0) -> T:
        """Return ``act(*args)``; ``where`` names the file or folder, ``offset`` is for transfers.

        ``op`` is one of open, create, private, mkdir, chmod, list, stat, lock, read, write,
        reserve, sync, sync_folder, rename, move, link, exchange, unlink, rmdir. A read or write has
        the arguments (descriptor, pieces of memory, offset).
        """
        return act(*args)


class Descriptor:
    """An open file or directory; it is closed with this object."""

    def __init__(self, io: IO, fd: int, path: str) -> None:
        self.path = path
        self._io = io
        self._fd = fd
        self._pid = os.getpid()

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """Close the descriptor; a second call does nothing, nor does a forked child's."""
        fd, self._fd = self._fd, CLOSED
        if fd >= 0 and self._pid == os.getpid():
            os.close(fd)

    def __enter__(self: D) -> D:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _call(self, op: str, act: Callable[..., T], *args: Any, wanted: int = 0) -> T:
        return patiently(self._io, op, act, *args, where=self.path, wanted=wanted)


class File(Descriptor):
    """One open file; transfers are complete, or a typed error."""

    def __init__(self, io: IO, fd: int, path: str, *, direct: bool = False) -> None:
        super().__init__(io, fd, path)
        self.direct = direct
        self._window = 0

    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from byte ``offset`` on; a failed read is tried once more. Raises
        TruncatedChunk at the end of the file, DiskReadError otherwise."""
        try:
            self._transfer("read", os.preadv, offset, [into])
        except DiskReadError as error:
            if error.errno != errno.EIO:
                raise
            self._transfer("read", os.preadv, offset, [into])
        if not self.direct:
            self._uncache(offset, len(into))

    def write(self, offset: int, *parts: memoryview) -> None:
        """Write pieces of memory, one after the other, from byte ``offset`` on, in one call. Raises
        DiskFull or DiskWriteError."""
        self._window += self._transfer("write", os.pwritev, offset, parts)
        if not self.direct and self._window >= WINDOW:
            self._window = 0
            self._call("sync", os.fdatasync, self._fd)
            self._uncache(0, 0)

    def reserve(self, n_bytes: int) -> None:
        """Reserve ``n_bytes`` on the file's disk now; raises DiskFull."""
        if n_bytes > 0:
            self._call("reserve", os.posix_fallocate, self._fd, 0, n_bytes, wanted=n_bytes)

    def sync(self) -> None:
        """Return when everything written is durable. A failure is final: write to a new file."""
        self._call("sync", os.fsync, self._fd)
        if not self.direct:
            self._uncache(0, 0)

    def size(self) -> int:
        return self._call("stat", os.fstat, self._fd).st_size

    def allocated(self) -> int:
        """Return the bytes that the file occupies on its disk."""
        return 512 * self._call("stat", os.fstat, self._fd).st_blocks

    def _transfer(
        self,
        op: str,
        act: Callable[[int, Sequence[memoryview], int], int],
        offset: int,
        parts: Sequence[memoryview],
    ) -> int:
        """Move pieces of memory completely; returns their bytes."""
        wanted = sum(map(len, parts))
        done = idle = 0
        while done < wanted:
            at, left = offset + done, within(parts, done, done + MAX_CALL)
            try:
                got = self._io.call(op, act, self._fd, left, at, where=self.path, offset=at)
            except (InterruptedError, BlockingIOError):
                got = -1
            except OSError as error:
                raise failed(op, error, self.path, offset=at, wanted=wanted, got=done) from error
            if got == 0 and op == "read":
                raise TruncatedChunk(
                    f"{self.path} ends at byte {at}; {wanted} bytes from {offset} were wanted",
                    advice="the file was cut short: use another copy",
                    path=self.path,
                    op=op,
                    offset=offset,
                    wanted=wanted,
                    got=done,
                )
            # a short direct transfer goes on from the last aligned byte
            step = got - got % ALIGN if self.direct and done + got < wanted else got
            idle = 0 if step > 0 else idle + 1
            if idle > PATIENCE:
                stuck = OSError(errno.EIO, f"no progress in {idle} calls")
                raise failed(op, stuck, self.path, offset=at, wanted=wanted, got=done)
            done += max(step, 0)
        return wanted

    def _uncache(self, offset: int, n_bytes: int) -> None:
        with contextlib.suppress(OSError, AttributeError):  # only a hint; some systems lack it
            os.posix_fadvise(self._fd, offset, n_bytes, os.POSIX_FADV_DONTNEED)


def failed(
    op: str, error: OSError, path: str, *, offset: int = 0, wanted: int = 0, got: int = 0
) -> StorageError:
    """Return the typed error for a failed system call."""
    full = error.errno in NO_SPACE
    reading = ("read", "open", "stat", "list")
    kind = DiskFull if full else DiskReadError if op in reading else DiskWriteError
    amount = f" of {format_bytes(wanted)} at byte {offset}" if wanted else ""
    advice = ADVICE.get(
        error.errno or 0, "look at the system log: the drive or its file system reports an error"
    )
    if full:
        room = format_bytes(wanted) if wanted else "some space"
        advice = f"free {room} there, or name another directory"
    return kind(
        f"{op}{amount} failed on {path}: {error.strerror or error}",
        advice=advice,
        path=path,
        op=op,
        offset=offset,
        wanted=wanted,
        got=got,
        errno=error.errno,
    )


def patiently(io: IO, op: str, act: Callable[..., T], *args: Any, where: str, wanted: int = 0) -> T:
    """Make one call, again while it is interrupted; any other failure is a typed error."""
    for _ in range(PATIENCE):
        try:
            return io.call(op, act, *args, where=where)
        except (InterruptedError, BlockingIOError):
            continue
        except OSError as error:
            raise failed(op, error, where, wanted=wanted) from error
    stuck = OSError(errno.EINTR, f"interrupted {PATIENCE} times")
    raise failed(op, stuck, where, wanted=wanted)


def within(parts: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
    """Return bytes [start, end) of pieces of memory as pieces, at most `MAX_PARTS`."""
    found: list[memoryview] = []
    for part in parts:
        if end <= 0 or len(found) == MAX_PARTS:
            break
        if start < len(part):
            found.append(part[max(start, 0) : end])
        start, end = start - len(part), end - len(part)
    return found


class Folder(Descriptor):
    """An open directory. Names in it are single names; links are not followed."""

    @classmethod
    def open(cls, path: str | Path, io: IO | None = None) -> Folder:
        """Open an existing directory that the user named; links in its path are followed. Raises
        DiskReadError if it is missing or not a directory."""
        io = io or IO()
        where = os.fspath(path)
        return cls(io, patiently(io, "open", os.open, where, READ_FOLDER, where=where), where)

    def folder(self, name: str) -> Folder:
        fd = self._open("open", name, READ_FOLDER | os.O_NOFOLLOW)
        return Folder(self._io, fd, self.where(name))

    def make(self, name: str, mode: int = 0o700) -> Folder:
        """Make a directory and open it; an existing one is a DiskWriteError."""
        self._at("mkdir", lambda n, mode: os.mkdir(n, mode, dir_fd=self._fd), name, mode)
        return self.folder(name)

    def file(self, name: str, *, direct: bool = False) -> File:
        """Open a regular file for reading; anything else is a DiskReadError."""
        # O_NONBLOCK: opening a FIFO would wait for its other end
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return self._file("open", name, flags, direct=direct)

    def create(self, name: str, *, direct: bool = False) -> File:
        """Make a new file (mode 0600) for writing; an existing one is a DiskWriteError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return self._file("create", name, flags, direct=direct)

    def private(self, *, direct: bool = True) -> File:
        """Make a file without a name (mode 0600): it always vanishes with its process."""
        if hasattr(os, "O_TMPFILE"):
            try:
                # O_EXCL: it can never be given a name
                flags = os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
                return self._file("private", ".", flags, direct=direct)
            except StorageError as error:
                if error.errno not in NO_TMPFILE:
                    raise
        name = f"hetero-{os.getpid()}-{os.urandom(8).hex()}"
        file = self.create(name, direct=direct)
        self.unlink(name)
        return file

    def names(self) -> list[str]:
        return sorted(self._call("list", os.listdir, self._fd))

    def stat(self, name: str) -> os.stat_result:
        """Return the system's facts about a name; of a link itself, not its target."""
        return self._at("stat", lambda n: os.stat(n, dir_fd=self._fd, follow_symlinks=False), name)

    def permit(self, mode: int) -> None:
        """Set this directory's mode, ignoring the process's mask."""
        self._call("chmod", os.fchmod, self._fd, mode)

    def lock(self) -> bool:
        """Lock this directory while it is open; False if another process has it. Raises
        StorageError if the file system has no locks."""
        return self._call("lock", _lock, self._fd)

    def has(self, name: str) -> bool:
        """Whether the name exists, even as a broken link."""
        try:
            self.stat(name)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        return True

    def rename(self, name: str, to: str) -> None:
        """Rename a file or directory in here; an existing one of the new name is replaced."""
        fds = {"src_dir_fd": self._fd, "dst_dir_fd": self._fd}
        self._at("rename", lambda n, to: os.replace(n, to, **fds), name, self.checked(to))

    def move(self, name: str, to: Folder) -> None:
        """Move a file or directory, under its name, to another directory of the file system."""
        fds = {"src_dir_fd": self._fd, "dst_dir_fd": to.fileno()}
        self._at("move", lambda n, _: os.rename(n, n, **fds), name, to)

    def link(self, name: str, to: Folder) -> None:
        """Give a file in here the same name in another directory of the file system too."""
        fds = {"src_dir_fd": self._fd, "dst_dir_fd": to.fileno()}
        self._at("link", lambda n, _: os.link(n, n, **fds, follow_symlinks=False), name, to)

    def exchange(self, name: str, to: str) -> None:
        """Exchange two names in here atomically. Raises StorageError of ENOSYS or EINVAL if the
        system has no such call."""
        self._at("exchange", lambda n, to: _exchange(n, to, self._fd), name, self.checked(to))

    def unlink(self, name: str) -> None:
        self._at("unlink", lambda n: os.unlink(n, dir_fd=self._fd), name)

    def rmdir(self, name: str) -> None:
        self._at("rmdir", lambda n: os.rmdir(n, dir_fd=self._fd), name)

    def sync(self) -> None:
        """Return when the names in this directory are durable."""
        self._call("sync_folder", os.fsync, self._fd)

    def space(self) -> int:
        """Return the bytes that this user can still write here."""
        found = self._call("stat", os.fstatvfs, self._fd)
        return found.f_bavail * found.f_frsize

    def where(self, name: str) -> str:
        """Return a name with this directory's path, for messages."""
        return self.path if name == "." else os.path.join(self.path, name)

    @staticmethod
    def checked(name: str) -> str:
        """Return a name that stays in its directory, or raise DiskReadError."""
        odd = name in ("", "..") or "/" in name or "\0" in name
        if odd or len(os.fsencode(name)) > MAX_NAME_BYTES:
            raise DiskReadError(
                f"{name[:300]!r} is not the name of a file", advice="a single name is needed"
            )
        return name

    def _file(self, op: str, name: str, flags: int, *, direct: bool) -> File:
        direct = direct and hasattr(os, "O_DIRECT")
        try:
            fd = self._open(op, name, flags | (os.O_DIRECT if direct else 0))
        except StorageError as error:
            if not direct or error.errno not in NO_DIRECT:
                raise
            if op == "create":  # some file systems refuse after making it
                with contextlib.suppress(StorageError):
                    self.unlink(name)
            return self._file(op, name, flags, direct=False)
        file = File(self._io, fd, self.where(name), direct=direct)
        if op == "open" and not stat.S_ISREG(os.fstat(fd).st_mode):
            file.close()
            raise DiskReadError(
                f"{self.where(name)} is not a regular file",
                advice="only regular files are read",
                path=self.where(name),
                op=op,
            )
        return file

    def _open(self, op: str, name: str, flags: int) -> int:
        return self._at(op, lambda n, flags: os.open(n, flags, 0o600, dir_fd=self._fd), name, flags)

    def _at(self, op: str, act: Callable[..., T], name: str, *args: Any) -> T:
        return patiently(self._io, op, act, self.checked(name), *args, where=self.where(name))


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _exchange(name: str, to: str, folder: int) -> None:
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if call(folder, os.fsencode(name), folder, os.fsencode(to), RENAME_EXCHANGE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def make_folder(path: str | Path, io: IO | None = None, mode: int = 0o700) -> Folder:
    """Open a directory, made durably with its parents if missing.

    Other processes may make it meanwhile. Raises ConfigError if it is not a path, StorageError if
    it cannot be made or opened.
    """
    missing, place = [], Path(path)
    while (folder := existing(place, io)) is None:
        missing.append(place.name)
        place = place.parent
    for name in reversed(missing):
        try:
            child = folder.make(name, mode)
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise
            child = folder.folder(name)
        folder.sync()  # also if another process made it and did not sync yet
        folder.close()
        folder = child
    return folder


def existing(place: Path, io: IO | None) -> Folder | None:
    """Open a directory that a user named; None if it is missing."""
    try:
        return Folder.open(place, io)
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise ConfigError(f"{os.fspath(place)!r} is no path: {error}", advice="name one") from error
    except StorageError as error:
        if error.errno == errno.ENOENT and place != place.parent:
            return None
        raise


def spill_folder(path: str | Path, io: IO | None = None) -> Folder:
    """Open a directory to spill to. Raises ConfigError if it is missing, is RAM itself, or may be
    written by others; warns if it lies on a network."""
    where = os.fspath(path)
    try:
        folder = Folder.open(path, io)
    except (StorageError, ValueError) as error:
        raise ConfigError(
            f"nvme={where!r} cannot be opened: {getattr(error, 'args', [error])[0]}",
            advice="nvme= takes existing directories on a local drive",
        ) from error
    check_spill(where)
    return folder

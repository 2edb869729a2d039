"""What forked children do not get, and may not destroy (floor 0, no torch).

[Note: forks]  A fork shares pages between parent and child. CUDA copies to and from the parent's
pages, so the kernel copies all page-locked ones at the fork, or else the first write moves one of
the two elsewhere. So page-locked memory stays out of children: a worker of a DataLoader forks at
the speed of a process without it.

A child has the parent's objects, and nothing at the addresses that these name. Its next mappings
would be there: it would read them as weights, and unmap them as it drops the parent's objects
(a segmentation fault, at any time later). So a child keeps these addresses from all use, and these
mappings for good; `hetero.memory.home` refuses to read them.

Memory that ranks of a machine share stays out of children, too: what they write there, the parent
and other ranks would read.

Nor has a child the threads of a process group, which the group's end waits for (it hangs, or is
such a fault), be it that the group was closed long ago and the child's collector finds it. So it
keeps the objects that have groups, too; and the ranks' calls are its parent's alone (`Owner`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from hetero.errors import ForkedProcessError

_UNSHARED: weakref.WeakKeyDictionary[mmap.mmap, bool] = weakref.WeakKeyDictionary()
_KEPT: weakref.WeakKeyDictionary[object, bool] = weakref.WeakKeyDictionary()
_HELD: dict[int, list[object]] = {}
"""All of them, which a thread that forks keeps alive until it has; by the thread."""
_ABSENT: set[int] = set()
"""The ids of mappings that this process has from its parent, without their memory."""

_MAP_NORESERVE, _MAP_FIXED_NOREPLACE = 0x4000, 0x100000  # Linux's; Python names them from 3.13 on
_FAILED = ctypes.c_void_p(-1).value


def keep_out(mapping: mmap.mmap) -> None:
    """Leave a mapping out of the children that this process forks from now on."""
    if hasattr(mmap, "MADV_DONTFORK"):
        _UNSHARED[mapping] = True  # first: another thread may fork
        mapping.madvise(mmap.MADV_DONTFORK)


def let_in(mapping: mmap.mmap) -> None:
    """Undo `keep_out`."""
    if hasattr(mmap, "MADV_DOFORK"):
        mapping.madvise(mmap.MADV_DOFORK)
        _UNSHARED.pop(mapping, None)


def keep_in_children(owner: object) -> None:
    """Let no child that this process forks destroy an object, and what it refers to."""
    _KEPT[owner] = True


class Owner:
    """The process that made something: none that it forks may use it.

    Args:
        what: that it is.
        kept: which children may not destroy either, as `keep_in_children`.
    """

    def __init__(self, what: str, kept: object = None) -> None:
        self._pid = os.getpid()
        self._what = what
        if kept is not None:
            keep_in_children(kept)

    @property
    def is_here(self) -> bool:
        return self._pid == os.getpid()

    def check(self) -> None:
        """Raise ForkedProcessError in a child."""
        if not self.is_here:
            raise refused(self._what)


def refused(what: str) -> ForkedProcessError:
    """Return what a child raises that uses what is its parent's."""
    return ForkedProcessError(
        f"a forked process uses {what}",
        advice="start it with the 'spawn' method, and pass values, not the model",
    )


def is_absent(mapping: mmap.mmap | None) -> bool:
    """Whether a mapping is the parent's, and its memory is not here."""
    return bool(_ABSENT) and id(mapping) in _ABSENT


def _all() -> list[object]:
    """Return what is known now; other threads add to it."""
    refs: list[weakref.ref[Any]] = [*_UNSHARED.keyrefs(), *_KEPT.keyrefs()]  # each at one go
    return [found for ref in refs if (found := ref()) is not None]


def _before() -> None:
    _HELD[threading.get_ident()] = _all()


def _in_parent() -> None:
    _HELD.pop(threading.get_ident(), None)


def _in_child() -> None:
    found = [*_HELD.pop(threading.get_ident(), ()), *_all()]
    for each in found:  # for good, whatever finalizers do, and in whichever order
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    absent = {id(each): each for each in found if isinstance(each, mmap.mmap)}
    _reserve(absent.values())
    _UNSHARED.clear()
    _ABSENT.update(absent)


def _reserve(mappings: Iterable[mmap.mmap]) -> None:
    """Map the addresses of mappings, so that nothing else is there: an access ends the process."""
    with suppress(OSError, AttributeError):  # without such calls, others may be there
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE
        for mapping in mappings:
            wanted = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
            size = ctypes.c_size_t(len(mapping))
            got = libc.mmap(ctypes.c_void_p(wanted), size, 0, flags, -1, ctypes.c_long(0))
            if got not in (wanted, _FAILED):  # a kernel before 4.17 took the address for a wish
                libc.munmap(ctypes.c_void_p(got), size)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)

"""Why a rank left, told in memory that outlives it (floor 3)."""

from __future__ import annotations

import atexit
import mmap
import os
import sys
import weakref
from types import TracebackType

REASON_BYTES = 400
AT_ITS_END = "its loop was over, or it called sys.exit"


class Farewell:
    """A rank's reason to end, in memory that the other ranks of its machine map."""

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self._memory = memory
        self._place = slice(start, start + REASON_BYTES)

    def write(self, reason: str) -> None:
        self._memory[self._place] = reason.encode(errors="replace")[:REASON_BYTES].ljust(
            REASON_BYTES, b"\0"
        )

    def read(self) -> str:
        """Return the reason; empty if the rank lives, or was killed."""
        return self._memory[self._place].rstrip(b"\0").decode(errors="ignore")


def tell_at_end(farewell: Farewell) -> None:
    """Write an error that nothing catches to ``farewell``, as long as it lives, or that the process
    ends without one."""
    _install()
    _told[farewell] = os.getpid()


def reason_of(error: BaseException) -> str:
    """Return an error as others read it: its class, and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


_told: weakref.WeakKeyDictionary[Farewell, int] = weakref.WeakKeyDictionary()
"""With the process that is the rank: a child that it forks is none."""
_replaced: list[object] = []


def tell(reason: str) -> None:
    """Write a reason for all ranks that this process is."""
    for farewell, pid in list(_told.items()):
        if pid == os.getpid() and not farewell.read():
            farewell.write(reason)


def _install() -> None:
    """Come before the interpreter's report of an error that nothing caught."""
    if _replaced:
        return
    before = sys.excepthook
    _replaced.append(before)

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        tell(reason_of(error))
        before(kind, error, trace)

    sys.excepthook = report
    atexit.register(tell, AT_ITS_END)

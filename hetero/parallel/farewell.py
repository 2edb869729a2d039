"""What a process tells the ranks that it shares models with when it leaves (floor 3)."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from enum import IntEnum
from types import TracebackType
from typing import Protocol

from hetero.errors import DivergenceError

AT_ITS_END = "its loop was over, or it called sys.exit"


class Parting(IntEnum):
    """How a rank leaves. Of several that have left, the first in this order is the cause."""

    FAILED = 1
    """By an error of its own."""
    DIVERGED = 2
    """By an error that is perhaps about another rank's."""
    ENDED = 3
    """At the end of its program, or of its model's use."""
    KILLED = 4
    """Without a word."""
    SILENT = 5
    """Not at all: it does not answer."""


class Teller(Protocol):
    """Tells the other ranks of one model."""

    def tell(self, how: Parting, why: str) -> None:
        """Say how this rank leaves; only the first time counts."""

    def tell_error(self, error: BaseException) -> None:
        """Say that it leaves by an error, or because of a rank that the error is about."""


def tell_at_end(teller: Teller) -> None:
    """Tell an error that nothing catches, as long as ``teller`` lives, or that the process ends
    without one."""
    _install()
    _tellers[teller] = os.getpid()


def tell_error(error: BaseException) -> None:
    """Tell an error with which this process leaves, where the interpreter does not see it."""
    for teller in tellers():
        teller.tell_error(error)


def parting_of(error: BaseException) -> Parting:
    return Parting.DIVERGED if isinstance(error, DivergenceError) else Parting.FAILED


def reason_of(error: BaseException) -> str:
    """Return an error as others read it: its class and its first line, and those of the error that
    code has put into it (torch's pipelines do, with a stage's)."""
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    return said_of(error) if first is error else f"{said_of(error)} {said_of(first)}"


def said_of(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


_tellers: weakref.WeakKeyDictionary[Teller, int] = weakref.WeakKeyDictionary()
"""With the process that is the rank: a child that it forks is none."""
_replaced: list[object] = []


def tellers() -> list[Teller]:
    """Return those of all ranks that this process is."""
    return [teller for teller, pid in list(_tellers.items()) if pid == os.getpid()]


def tell_end() -> None:
    """Tell that this process ends without an error."""
    for teller in tellers():
        teller.tell(Parting.ENDED, AT_ITS_END)


def _install() -> None:
    """Come before the interpreter's report of an error that nothing caught."""
    if _replaced:
        return
    before = sys.excepthook
    _replaced.append(before)

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        tell_error(error)
        before(kind, error, trace)

    sys.excepthook = report
    atexit.register(tell_end)

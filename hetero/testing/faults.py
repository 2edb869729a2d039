"""File access that fails on purpose, with a log."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

from hetero.io import ALIGN, IO, align_up, aligned_buffer, within

T = TypeVar("T")


class FileCall(NamedTuple):
    """One recorded call. ``data`` is the bytes of a write; ``to`` as in `target`."""

    op: str
    where: str
    offset: int
    data: bytes
    to: str


class FaultPlan(IO):
    """An `IO` that fails on purpose, and logs the calls that it carries out.

    ``k`` counts the calls of one op from 0; op "any" counts all calls but open, list and stat.
    """

    PASSIVE = ("open", "list", "stat")

    def __init__(self, *, keep_data: bool = False) -> None:
        self.log: list[FileCall] = []
        self.seen: Counter[str] = Counter()
        self.fired = 0
        self._keep_data = keep_data
        self._rules: list[tuple[str, int, int | None, Callable[..., Any]]] = []
        self._lock = threading.Lock()

    def fail_at(self, op: str, k: int, number: int, times: int | None = 1) -> None:
        """Let calls from the ``k``-th on fail, ``times`` times, or for ever with None."""

        def fail(act: Callable[..., Any], args: tuple[Any, ...]) -> Any:
            raise OSError(number, os.strerror(number))

        self._rules.append((op, k, times, fail))

    def short_at(self, op: str, k: int, got: int, times: int | None = 1) -> None:
        """Let a read or write move at most ``got`` bytes."""

        def shorten(act: Callable[..., Any], args: tuple[Any, ...]) -> Any:
            fd, parts, offset = args
            try:
                return act(fd, within(parts, 0, got), offset)
            except OSError:  # a direct file: only whole blocks can really be moved
                return min(act(fd, within(parts, 0, align_up(got)), offset), got)

        self._rules.append((op, k, times, shorten))

    def lie_at(self, k: int, how: Literal["drop", "misdirect", "flip"]) -> None:
        """Let the ``k``-th write claim success and do something else."""

        def lie(act: Callable[..., Any], args: tuple[Any, ...]) -> Any:
            fd, parts, offset = args
            n_bytes = sum(map(len, parts))
            if how == "misdirect":
                act(fd, parts, offset + ALIGN)
            elif how == "flip":
                wrong = aligned_buffer(n_bytes)[:n_bytes]
                wrong[:] = b"".join(parts)
                wrong[n_bytes // 2] ^= 1
                act(fd, [wrong], offset)
            return n_bytes

        self._rules.append(("write", k, 1, lie))

    def kill_at(self, k: int) -> None:
        """Let this process die of SIGKILL in place of the ``k``-th call of any op."""

        def kill(act: Callable[..., Any], args: tuple[Any, ...]) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

        self._rules.append(("any", k, 1, kill))

    def clear(self) -> None:
        """Let everything succeed from now on."""
        self._rules.clear()

    def call(self, op: str, act: Callable[..., T], *args: Any, where: str, offset: int = 0) -> T:
        with self._lock:
            wrong = self._wrong(op)
            self.seen[op] += 1
            if op not in self.PASSIVE:
                self.seen["any"] += 1
        result = act(*args) if wrong is None else wrong(act, args)
        with self._lock:
            n_bytes: Any = result if op == "write" and self._keep_data else 0
            data = b"".join(args[1])[:n_bytes] if n_bytes else b""
            self.log.append(FileCall(op, where, offset, data, target(op, args)))
        return result

    def _wrong(self, op: str) -> Callable[..., Any] | None:
        for rule, k, times, act in self._rules:
            active = rule == op or (rule == "any" and op not in self.PASSIVE)
            n = self.seen[rule]
            if active and n >= k and (times is None or n < k + times):
                self.fired += 1
                return act
        return None


def target(op: str, args: tuple[Any, ...]) -> str:
    """Return the second name of a call: in its directory, or as a path elsewhere."""
    if op in ("rename", "exchange"):
        return str(args[1])
    return str(args[1].where(args[0])) if op in ("move", "link") else ""

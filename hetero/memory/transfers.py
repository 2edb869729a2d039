"""Copies in flight, oldest first (floor 1, mechanism)."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from hetero.device import Ticket
from hetero.memory.link import Link
from hetero.types import Kind

T = TypeVar("T")


class Pending(Protocol):
    """Something under way: a copy on a link, or a job on HOST."""

    @property
    def done(self) -> bool:
        """Whether it is over."""

    def wait(self) -> None:
        """Block until it is over; raises its error."""


@dataclass(slots=True)
class Landing:
    """The end of one copy, and the log fields of a stall on it."""

    link: Link
    ticket: Ticket
    kind: Kind
    bucket: int = -1
    _is_over: bool = False
    """Whether someone saw it land: the device is asked no more."""

    @property
    def done(self) -> bool:
        self._is_over = self._is_over or self.link.has_landed(self.ticket)
        return self._is_over

    def wait(self) -> None:
        if not self._is_over:
            self.link.sync(self.ticket, kind=self.kind, bucket=self.bucket)
            self._is_over = True


@dataclass(frozen=True, slots=True)
class QueuedTransfer(Generic[T]):
    """One copy under way, the objects it needs until it has landed, and a callback."""

    end: Pending
    keep_alive: T
    n_bytes: int
    then: Callable[[], None] | None


class Transfers(Generic[T]):
    """A queue of copies; each keeps its objects alive until it has landed."""

    __slots__ = ("_queue", "bytes_in_flight")

    def __init__(self) -> None:
        self._queue: deque[QueuedTransfer[T]] = deque()
        self.bytes_in_flight = 0
        """Bytes queued and not known to have landed."""

    def queue(
        self,
        end: Pending,
        keep_alive: T,
        *,
        n_bytes: int = 0,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Add a copy; ``then`` is called when it has landed."""
        self._queue.append(QueuedTransfer(end, keep_alive, n_bytes, then))
        self.bytes_in_flight += n_bytes

    def kept(self) -> Iterator[T]:
        """Yield the objects kept alive, oldest first."""
        return (transfer.keep_alive for transfer in self._queue)

    def poll(self, limit_bytes: int = sys.maxsize) -> None:
        """Drop landed copies; wait for the oldest while more than the limit is in flight."""
        queue = self._queue
        while queue and (self.bytes_in_flight > limit_bytes or queue[0].end.done):
            self.finish_oldest()

    def finish(self) -> None:
        """Wait until everything has landed."""
        while self._queue:
            self.finish_oldest()

    def finish_oldest(self) -> None:
        transfer = self._queue.popleft()
        self.bytes_in_flight -= transfer.n_bytes
        transfer.end.wait()
        if transfer.then is not None:
            transfer.then()

"""The event log: an append-only ring of fixed tuples (floor 0).

Events are data. A row is ``(lane, op, t0, t1, subject, n_bytes, why)`` with times in seconds of the
device's clock; printing and exporting are other rooms' business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from hetero.types import Lane


class Event(NamedTuple):
    """One thing that happened on one lane."""

    lane: Lane
    op: str
    t0_seconds: float
    t1_seconds: float
    subject: str
    n_bytes: int
    why: str


class EventLog:
    """Keeps the last ``capacity`` events; appending costs about a microsecond."""

    __slots__ = ("_ring", "append")

    def __init__(self, capacity: int = 20_000) -> None:
        self._ring: deque[tuple[Lane, str, float, float, str, int, str]] = deque(maxlen=capacity)
        self.append = self._ring.append  # the hot path appends plain tuples

    def __iter__(self) -> Iterator[Event]:
        return (Event(*row) for row in self._ring)

    def __len__(self) -> int:
        return len(self._ring)

    def clear(self) -> None:
        """Forget everything recorded so far."""
        self._ring.clear()

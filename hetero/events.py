"""The event log: events as fixed tuples in a ring (floor 0).

The hot path only appends a tuple: the thread that drains the ring makes names and nanoseconds of
it, and other rooms print and export them.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple, Protocol

from hetero.types import Kind, Lane, Tier

_thread = threading.local()
CAPACITY = 50_000  # events kept until they are drained


class What(Enum):
    """Kinds of events."""

    STEP = "step"
    """A whole step; ``why`` is empty."""
    PHASE = "phase"
    """A part of a step on the launching thread: ``why`` is forward, backward or step."""
    ACCESS = "access"
    """A unit computes with its parameters; ``n_bytes`` of them are pinned."""
    MOVE = "move"
    """Bytes of a bucket (or of activations) on a lane."""
    WAIT = "wait"
    """Compute, or the thread that launches it, waits; ``why`` says for what."""
    UPDATE = "update"
    """The update of a bucket, on updating threads."""
    ALLOC = "alloc"
    """Bytes of a bucket have a place in a tier from here on; ``why`` as for the move."""
    FREE = "free"
    """That place is given back: ``why`` is evict, discard ..."""
    LEVEL = "level"
    """``n_bytes`` of a tier are charged to a category from here on."""
    LIVE = "live"
    """``n_bytes`` of a category were counted in a tier, on top of the charges."""
    DECISION = "decision"
    """A policy chose; ``why`` names the choice."""


class Event(NamedTuple):
    """One row, with the columns of the log's files."""

    seq: int
    """Counts up; gaps are dropped events."""
    t_ns: int
    """Begin, in nanoseconds of the log's clock."""
    dur_ns: int
    """0 for an instant."""
    what: str
    step: int
    phase: str
    """init, forward, backward, step, or between."""
    lane: str
    tier: str
    unit: int
    """Position among the run's units; -1 for none."""
    bucket: int
    """Id of a bucket; -1 for none."""
    n_bytes: int
    category: str
    why: str
    cause: int
    """``seq`` of the access under way at that moment; -1 for none."""


class Timed(Protocol):
    """Something asynchronous that knows its times once it is over."""

    def span(self) -> tuple[float, float]:
        """Return begin and end in seconds of the log's clock; waits until they are known."""


class EventLog:
    """Keeps the last ``capacity`` events (None: all); appending costs about a microsecond.

    Args:
        clock: seconds; virtual if time is modelled.
    """

    __slots__ = (
        "_count",
        "_ring",
        "access",
        "annotates",
        "append",
        "clock",
        "enabled",
        "first_seq",
        "phase",
        "step",
    )

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, capacity: int | None = CAPACITY
    ) -> None:
        self._ring: deque[Any] = deque(maxlen=capacity)
        self._count = itertools.count()
        self.append = self._ring.append
        self.clock = clock
        self.enabled = True
        self.annotates = False
        """Whether accesses are also ranges of the vendor's profiler."""
        self.step = 0
        self.phase = "init"
        self.access = -1
        """``seq`` of the access under way."""
        self.first_seq = 0
        """``seq`` of the first event since the log began, or was cleared."""

    def add(
        self,
        what: What,
        t0: float,
        t1: float | Timed,
        *,
        lane: Lane | None = None,
        tier: Tier | None = None,
        unit: int = -1,
        bucket: int = -1,
        n_bytes: int = 0,
        category: Kind | str | None = None,
        why: str = "",
    ) -> None:
        """Append an event from ``t0`` to ``t1``, in seconds of the clock. ``t1`` may be a `Timed`,
        which knows both later."""
        if self.enabled:
            self.append((next(self._count), t0, t1, what, self.step, self.phase, lane, tier, unit,
                         bucket, n_bytes, category, why, self.access))  # fmt: skip

    def now(
        self,
        what: What,
        *,
        lane: Lane | None = None,
        tier: Tier | None = None,
        unit: int = -1,
        bucket: int = -1,
        n_bytes: int = 0,
        category: Kind | str | None = None,
        why: str = "",
    ) -> None:
        """Append an instant; see `add`."""
        if self.enabled:
            t = self.clock()
            self.append((next(self._count), t, t, what, self.step, self.phase, lane, tier, unit,
                         bucket, n_bytes, category, why, self.access))  # fmt: skip

    @contextmanager
    def during(self, what: What, **columns: Any) -> Iterator[None]:
        """Append an event from the begin of a block to its end; see `add`."""
        t0 = self.clock()
        try:
            yield
        finally:
            self.add(what, t0, self.clock(), **columns)

    @contextmanager
    def standing(self, why: str, whom: Callable[[], str] = str) -> Iterator[None]:
        """Append a WAIT for the length of a block, unless on a background thread; ``whom`` returns
        its category when it is over."""
        if is_behind():
            yield
            return
        t0 = self.clock()
        try:
            yield
        finally:
            self.add(What.WAIT, t0, self.clock(), why=why, category=whom())

    def begin_access(self) -> int:
        """Begin an access and return its ``seq``, the cause of the events from here on."""
        self.access = next(self._count)
        return self.access

    def end_access(self, seq: int, t0: float, unit: int, n_bytes: int) -> None:
        """Append a finished access."""
        if self.enabled:
            self.append((seq, t0, self.clock(), What.ACCESS, self.step, self.phase, Lane.COMPUTE,
                         None, unit, -1, n_bytes, None, "", -1))  # fmt: skip

    def drain(self) -> Iterator[Event]:
        """Yield all events and forget them; safe while other threads append."""
        ring = self._ring
        while ring:
            try:
                row = ring.popleft()
            except IndexError:  # another thread was faster
                return
            yield event_of(row)

    def __iter__(self) -> Iterator[Event]:
        return (event_of(row) for row in list(self._ring))

    def __len__(self) -> int:
        return len(self._ring)

    def clear(self) -> None:
        self._ring.clear()
        self.first_seq = next(self._count) + 1


def go_behind() -> None:
    """Mark this thread as a background thread: compute does not wait while it waits."""
    _thread.behind = True


@contextmanager
def behind() -> Iterator[None]:
    """Let this thread stand for a background thread inside a block."""
    before = is_behind()
    _thread.behind = True
    try:
        yield
    finally:
        _thread.behind = before


def is_behind() -> bool:
    """Whether this is a background thread."""
    return getattr(_thread, "behind", False)


def event_of(row: Any) -> Event:
    """Return a row of the ring with names and nanoseconds; waits until it is over."""
    seq, t0, t1, what, step, phase, lane, tier, unit, bucket, n_bytes, category, why, cause = row
    if not isinstance(t1, (float, int)):
        t0, t1 = t1.span()
    return Event(
        seq,
        round(t0 * 1e9),
        max(0, round((t1 - t0) * 1e9)),
        what.value,
        step,
        phase,
        "" if lane is None else lane.value,
        "" if tier is None else tier.name,
        unit,
        bucket,
        n_bytes,
        category.value if isinstance(category, Kind) else category or "",
        why,
        cause,
    )

"""The residency of each bucket on HBM: how long it stayed, why it came and why it went.

A **stay** runs from an ALLOC to the FREE of the same bucket. It is a *miss* if an access already
needed the bytes (reasons F, B, E ...), a *prefetch* if the plan fetched it ahead. An access
**hits** a bucket that was resident, or on its way, before the access began.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetero.events import Event, What
from hetero.report.run import Meta
from hetero.report.spans import Interval, Stack, flatten
from hetero.report.timing import span_of
from hetero.report.words import DEMAND


@dataclass(frozen=True, slots=True)
class AccessSpan:
    """One computation of a unit."""

    seq: int
    unit: int
    phase: str
    step: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Stay:
    """One stay of a bucket on HBM."""

    bucket: int
    n_bytes: int
    begin_ns: int
    """When its room was taken."""
    ready_ns: int
    """When its bytes had arrived."""
    end_ns: int
    why_in: str
    why_out: str
    """``end``: still resident when recording ended."""
    step: int
    cause: int
    """The access that caused it, or -1."""
    accesses: int
    """Number of accesses that used it."""
    first_use_ns: int | None
    waited_ns: int
    """How long anything waited for its bytes."""

    @property
    def missed(self) -> bool:
        return self.why_in in DEMAND

    @property
    def slack_ns(self) -> int | None:
        """Time from arrival to first use: negative if it arrived too late; None: not used."""
        return None if self.first_use_ns is None else self.first_use_ns - self.ready_ns


@dataclass(frozen=True, slots=True)
class Counts:
    """How often a bucket was needed, and how it was found."""

    accesses: int = 0
    misses: int = 0
    """Fetches that an access had to wait for."""
    hits: int = 0
    """Accesses that found it resident, or on its way."""
    prefetches: int = 0
    late: int = 0
    """Prefetches that something waited for."""
    unused: int = 0
    """Prefetches that were gone before any use."""
    miss_wait_ns: int = 0
    """Exposed: how long anything waited for misses."""
    late_wait_ns: int = 0
    """Exposed: the same for prefetches."""


@dataclass(frozen=True, slots=True)
class Residency:
    """All stays of a run, in order of their begin, and the accesses that used them."""

    stays: tuple[Stay, ...]
    accesses: tuple[AccessSpan, ...]

    def of_bucket(self, bucket: int) -> list[Stay]:
        return [stay for stay in self.stays if stay.bucket == bucket]

    def first_uses(self) -> list[int]:
        """Return buckets in the order in which they were first resident."""
        return list(dict.fromkeys(stay.bucket for stay in self.stays))


def residency_of(events: Sequence[Event], meta: Meta) -> Residency:
    accesses = tuple(
        AccessSpan(e.seq, e.unit, e.phase, e.step, e.t_ns, e.t_ns + e.dur_ns)
        for e in events
        if e.what == What.ACCESS.value
    )
    begins: dict[int, list[int]] = defaultdict(list)
    for access in accesses:
        begins[access.unit].append(access.begin_ns)
    waits = waits_of(events)
    end_ns = max((e.t_ns + e.dur_ns for e in events), default=0)
    stays = []
    for bucket, history in histories(events, len(meta.buckets)).items():
        used = begins.get(meta.buckets[bucket].unit, [])
        stays += [finished(raw, used, waits[bucket], end_ns) for raw in pairs(history)]
    return Residency(tuple(sorted(stays, key=lambda s: (s.begin_ns, s.bucket))), accesses)


def waits_of(events: Sequence[Event]) -> dict[int, Stack]:
    """Return the waits for each bucket's H2D copy; outermost waits only."""
    spans = flatten(
        span_of(e, str(e.bucket if e.why == "h2d" else -1))
        for e in events
        if e.what == What.WAIT.value
    )
    found: dict[int, list[Interval]] = defaultdict(list)
    for span in spans:
        found[int(span.label)].append(span)
    return defaultdict(lambda: Stack([]), {b: Stack(rows) for b, rows in found.items()})


def histories(events: Iterable[Event], count: int) -> dict[int, list[Event]]:
    """Return the events of each bucket's replicas, ordered by ``seq``: clocks may disagree."""
    found: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        moved = event.what == What.MOVE.value and (event.lane, event.category) == ("h2d", "param")
        if 0 <= event.bucket < count and (
            moved or event.what in (What.ALLOC.value, What.FREE.value)
        ):
            found[event.bucket].append(event)
    return {bucket: sorted(rows, key=lambda e: e.seq) for bucket, rows in found.items()}


@dataclass(frozen=True, slots=True)
class Raw:
    alloc: Event
    move: Event | None
    free: Event | None


def pairs(history: Sequence[Event]) -> list[Raw]:
    """Return each ALLOC with its copy and its FREE, as far as they are recorded."""
    found: list[Raw] = []
    for event in history:
        if event.what == What.ALLOC.value:
            found.append(Raw(event, None, None))
        elif found and found[-1].free is None:
            last = found[-1]
            if event.what == What.FREE.value:
                found[-1] = Raw(last.alloc, last.move, event)
            elif last.move is None and last.alloc.why != "before":
                found[-1] = Raw(last.alloc, event, None)
    return found


def finished(raw: Raw, used: list[int], waits: Stack, end_ns: int) -> Stay:
    """Return a stay with its uses and the waits for it."""
    alloc, move, free = raw.alloc, raw.move, raw.free
    gone_ns = free.t_ns if free is not None else end_ns
    since_ns = alloc.t_ns
    missed = alloc.why in DEMAND  # the access that misses begins before the ALLOC
    first = (bisect_right if missed else bisect_left)(used, since_ns)
    last = max(first, bisect_right(used, gone_ns))
    first_use_ns = since_ns if missed else used[first] if first < last else None
    return Stay(
        bucket=alloc.bucket,
        n_bytes=alloc.n_bytes,
        begin_ns=since_ns,
        ready_ns=since_ns if move is None else max(since_ns, move.t_ns + move.dur_ns),
        end_ns=gone_ns,
        why_in=alloc.why,
        why_out="end" if free is None else free.why,
        step=alloc.step,
        cause=alloc.cause,
        accesses=last - first + missed,
        first_use_ns=first_use_ns,
        waited_ns=sum(span.dur_ns for span in waits.within(since_ns, gone_ns)),
    )


def counts_of(residency: Residency, meta: Meta, begin_ns: int, end_ns: int) -> dict[int, Counts]:
    """Return how each bucket was needed in a window."""
    accesses: dict[int, int] = defaultdict(int)
    for access in residency.accesses:
        accesses[access.unit] += begin_ns <= access.begin_ns < end_ns
    stays: dict[int, list[Stay]] = defaultdict(list)
    for stay in residency.stays:
        if begin_ns <= stay.begin_ns < end_ns:
            stays[stay.bucket].append(stay)
    return {
        bucket: tally(stays[bucket], accesses[row.unit]) for bucket, row in enumerate(meta.buckets)
    }


def tally(stays: Sequence[Stay], accesses: int) -> Counts:
    missed = [stay for stay in stays if stay.missed]
    planned = [stay for stay in stays if stay.why_in == "plan"]
    return Counts(
        accesses=accesses,
        misses=len(missed),
        hits=accesses - sum(stay.why_in in ("F", "B", "E") for stay in missed),
        prefetches=len(planned),
        late=sum(stay.waited_ns > 0 for stay in planned),
        unused=sum(stay.first_use_ns is None and stay.why_out != "end" for stay in planned),
        miss_wait_ns=sum(stay.waited_ns for stay in missed),
        late_wait_ns=sum(stay.waited_ns for stay in planned),
    )

"""Traffic on each lane: how much, how fast, for what and why; and the least possible."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from hetero.events import Event, What
from hetero.report.levels import Timeline
from hetero.report.residency import AccessSpan, Residency
from hetero.report.run import Meta
from hetero.report.spans import Interval, flatten, total_ns
from hetero.report.timing import Steps
from hetero.report.words import COPY_LANES, LANES, three

BINS = 600  # of a lane's chart
USUAL_DRIVE_BYTES = 600 * 10**12  # of writes that a usual drive of 1 TB is rated for


class DriveLife(NamedTuple):
    """How long drives last if every step writes as a steady one does."""

    steps: float
    rated_bytes: int
    is_usual: bool
    """Whether no profile says what these are rated for: it is the rating of a usual drive."""

    @property
    def rated(self) -> str:
        """What they are rated for, as the subject of a sentence."""
        said = f"{three(self.rated_bytes / 1e12)} TB of writes"
        return f"{said}, as a usual drive is rated for," if self.is_usual else f"the rated {said}"


def drive_life(meta: Meta, written_bytes: float) -> DriveLife | None:
    """Return how long drives last; None if a step writes nothing."""
    rated = meta.rated_write_bytes
    bytes_in_all = USUAL_DRIVE_BYTES if rated is None else rated
    if not written_bytes:
        return None
    return DriveLife(bytes_in_all / written_bytes, bytes_in_all, rated is None)


@dataclass(frozen=True, slots=True)
class LaneUse:
    """A lane during steady steps."""

    lane: str
    n_bytes: int
    moves: int
    timed_bytes: int
    """Of the moves that have a duration: others were counted, and never timed."""
    busy_ns: int
    """Length of the union of its moves: simultaneous ones count once."""
    wall_ns: int
    """Length of the steady steps."""
    ceiling_bytes_per_second: float | None
    """The profile's measured rate of this lane alone, if any."""

    @property
    def bytes_per_second(self) -> float | None:
        """Rate while it was busy; None if its moves were not timed, or moved nothing."""
        return self.timed_bytes * 1e9 / self.busy_ns if self.busy_ns and self.timed_bytes else None

    @property
    def busy_share(self) -> float:
        return self.busy_ns / self.wall_ns if self.wall_ns else 0.0


def spans_by_lane(events: Sequence[Event]) -> dict[str, list[tuple[Interval, int]]]:
    """Return (span, bytes) of the work on each lane, in order of begin."""
    kinds = (What.MOVE.value, What.UPDATE.value)
    found: dict[str, list[tuple[Interval, int]]] = defaultdict(list)
    for event in events:
        if event.what in kinds and event.lane:
            moved = event.n_bytes if event.what == What.MOVE.value else 0
            found[event.lane].append((Interval(event.t_ns, event.t_ns + event.dur_ns), moved))
    known = [lane for lane in LANES if lane in found]
    return {lane: found[lane] for lane in (*known, *sorted(found.keys() - set(known)))}


def lanes_of(events: Sequence[Event], meta: Meta, begin_ns: int, end_ns: int) -> list[LaneUse]:
    """Return the use of each lane in a window; a move counts where it begins."""
    return [
        LaneUse(
            lane,
            n_bytes=sum(n for span, n in rows if begin_ns <= span.begin_ns < end_ns),
            moves=sum(begin_ns <= span.begin_ns < end_ns for span, _ in rows),
            timed_bytes=timed_bytes(rows, begin_ns, end_ns),
            busy_ns=total_ns(clipped(rows, begin_ns, end_ns)),
            wall_ns=end_ns - begin_ns,
            ceiling_bytes_per_second=meta.ceilings.get(lane),
        )
        for lane, rows in spans_by_lane(events).items()
    ]


def timed_bytes(rows: Sequence[tuple[Interval, int]], begin_ns: int, end_ns: int) -> int:
    """Return the bytes that timed moves carried inside a window: of one across its border, the part
    that is as long as its time inside."""
    cut = ((s, n, min(s.end_ns, end_ns) - max(s.begin_ns, begin_ns)) for s, n in rows if s.dur_ns)
    return sum(n * inside // span.dur_ns for span, n, inside in cut if inside > 0)


def clipped(rows: Sequence[tuple[Interval, int]], begin_ns: int, end_ns: int) -> list[Interval]:
    cut = (Interval(max(s.begin_ns, begin_ns), min(s.end_ns, end_ns)) for s, _ in rows)
    return [span for span in cut if span.end_ns > span.begin_ns]


@dataclass(frozen=True, slots=True)
class LaneChart:
    """Bytes of a lane over equal bins of time; their sum is all that it moved."""

    lane: str
    begin_ns: int
    bin_ns: int
    n_bytes: tuple[int, ...]
    busy_ns: tuple[int, ...]


def lane_charts(events: Sequence[Event], begin_ns: int, end_ns: int) -> list[LaneChart]:
    """Return each lane's bytes and busy time in `BINS` equal parts of the time."""
    bin_ns = (end_ns - begin_ns) // BINS + 1
    return [
        binned(lane, rows, begin_ns, bin_ns)
        for lane, rows in spans_by_lane(events).items()
        if lane in COPY_LANES
    ]


def binned(
    lane: str, rows: Sequence[tuple[Interval, int]], begin_ns: int, bin_ns: int
) -> LaneChart:
    n_bytes, busy = [0] * BINS, [0] * BINS
    for span, moved in rows:
        for place, share in spread(span, moved, begin_ns, bin_ns):
            n_bytes[place] += share
    for span in flatten(span for span, _ in rows):
        for place, share in spread(span, span.dur_ns, begin_ns, bin_ns):
            busy[place] += share
    return LaneChart(lane, begin_ns, bin_ns, tuple(n_bytes), tuple(busy))


def spread(span: Interval, amount: int, begin_ns: int, bin_ns: int) -> list[tuple[int, int]]:
    """Return (bin, part) of an amount spread evenly over a span, without parts outside bins."""
    first, last = ((t - begin_ns) // bin_ns for t in (span.begin_ns, max(span[0], span.end_ns - 1)))
    if not span.dur_ns:
        return [(first, amount)] if 0 <= first < BINS else []
    edges = [begin_ns + place * bin_ns for place in range(max(0, first), min(BINS - 1, last) + 2)]
    inside = (min(max(edge, span.begin_ns), span.end_ns) - span.begin_ns for edge in edges)
    given = [amount * ns // span.dur_ns for ns in inside]
    return [(max(0, first) + i, b - a) for i, (a, b) in enumerate(pairwise(given))]


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """Bytes moved on a lane for one category and reason, during steady steps."""

    lane: str
    category: str
    why: str
    moves: int
    n_bytes: int


def ledger_of(events: Sequence[Event], begin_ns: int, end_ns: int) -> list[LedgerRow]:
    """Return the traffic of a window; its rows sum to the lanes' bytes."""
    moves: Counter[tuple[str, str, str]] = Counter()
    n_bytes: Counter[tuple[str, str, str]] = Counter()
    for e in events:
        if e.what == What.MOVE.value and begin_ns <= e.t_ns < end_ns:
            moves[e.lane, e.category, e.why] += 1
            n_bytes[e.lane, e.category, e.why] += e.n_bytes
    rows = [LedgerRow(*key, moves[key], n_bytes[key]) for key in moves]
    return sorted(rows, key=lambda row: (COPY_LANES.index(row.lane), -row.n_bytes))


@dataclass(frozen=True, slots=True)
class Bound:
    """The least that parameters can cost on H2D in a step, for any eviction order.

    With updates at home, a step makes every trainable replica on HBM stale. Let C be the most bytes
    that parameters could take on HBM at a moment: the budget less all other bytes then, maximised
    over steady steps. A step then fetches at least::

        forward   T + max(0, F - C)    T trainable bytes that are used, F frozen ones;
                                       C when the step's first unit begins
        backward  max(0, B - C)        B bytes that backward uses, of which at most C stayed;
                                       C when the first unit of backward begins

    Without a budget for HBM, C is unlimited; updates in place make nothing stale (T = 0). Bytes
    beyond C are fetched in code if they are in code at home: at least the smallest share that any
    bucket's code has.
    """

    trainable_bytes: int
    frozen_bytes: int
    backward_bytes: int
    forward_room_bytes: int | None
    """C at the begin of forward; None: no limit."""
    backward_room_bytes: int | None
    """C at the begin of backward."""
    moved_share: float = 1.0
    """The least bytes on the link per byte in frames."""

    @property
    def n_bytes(self) -> int:
        again = beyond(self.frozen_bytes, self.forward_room_bytes)
        again += beyond(self.backward_bytes, self.backward_room_bytes)
        return self.trainable_bytes + int(self.moved_share * again)


def beyond(n_bytes: int, room_bytes: int | None) -> int:
    return 0 if room_bytes is None else max(0, n_bytes - room_bytes)


def bound_of(meta: Meta, residency: Residency, hbm: Timeline | None, steps: Steps) -> Bound:
    """Return the fewest parameter bytes that a steady step can fetch; see `Bound`."""
    begin_ns, end_ns = steps.begin_ns, steps.end_ns
    accesses = [a for a in residency.accesses if begin_ns <= a.begin_ns < end_ns]
    backward = [a for a in accesses if a.phase == "backward"]
    units, back = {a.unit for a in accesses}, {a.unit for a in backward}
    buckets = [b for b in meta.buckets if residency.stays and b.unit in units]
    stale = meta.update_place.startswith("home")
    return Bound(
        sum(b.n_bytes for b in buckets if b.trainable and stale),
        sum(b.n_bytes for b in buckets if not (b.trainable and stale)),
        sum(b.n_bytes for b in buckets if b.unit in back),
        room_of(meta, hbm, first_of_steps(accesses)),
        room_of(meta, hbm, first_of_steps(backward)),
        min((b.moved_bytes / b.n_bytes for b in buckets if b.n_bytes), default=1.0),
    )


def first_of_steps(accesses: Sequence[AccessSpan]) -> list[int]:
    first: dict[int, int] = {}
    for access in accesses:
        first.setdefault(access.step, access.begin_ns)
    return list(first.values())


def room_of(meta: Meta, hbm: Timeline | None, times_ns: Sequence[int]) -> int | None:
    """Return the most HBM that parameters could take at any of these times; None: no limit."""
    budget = meta.budgets.get("HBM")
    if budget is None or hbm is None or not times_ns:
        return budget
    params = hbm.column("param")
    rows = [max(0, bisect_right(hbm.times_ns, t_ns) - 1) for t_ns in times_ns]
    return budget - min(hbm.totals[row] - params[row] for row in rows)

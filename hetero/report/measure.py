"""The figures of a run: everything that any output of the report shows (floor 4, no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hetero.errors import ConfigError
from hetero.events import What
from hetero.report.levels import Timeline, timelines
from hetero.report.peaks import Peak, peak_of
from hetero.report.residency import Counts, Residency, counts_of, residency_of
from hetero.report.run import Allocations, Meta, Run
from hetero.report.timing import Steps, steps_of, sums
from hetero.report.traffic import (
    Bound,
    DriveLife,
    LaneUse,
    LedgerRow,
    bound_of,
    drive_life,
    lanes_of,
    ledger_of,
)
from hetero.report.values import TOKENS, told
from hetero.report.words import TIERS

SUMMARY_SCHEMA = 1
NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Measured:
    """A run and its figures. Steady figures leave ``steps.warmup`` out."""

    run: Run
    begin_ns: int
    end_ns: int
    timelines: dict[str, Timeline]
    """By tier, in the order of `TIERS`."""
    peaks: dict[str, Peak]
    steps: Steps
    residency: Residency
    counts: dict[int, Counts]
    """By bucket, over steady steps."""
    lanes: tuple[LaneUse, ...]
    """Over steady steps, as are ``ledger`` and ``bound``."""
    ledger: tuple[LedgerRow, ...]
    bound: Bound

    @property
    def meta(self) -> Meta:
        return self.run.meta

    @property
    def parts(self) -> dict[str, int]:
        """Nanoseconds of all steady steps by part."""
        return sums(self.steps.steady)

    @property
    def steady_count(self) -> int:
        return len(self.steps.steady)

    @property
    def steady_ns(self) -> int:
        return sum(step.wall_ns for step in self.steps.steady)

    @property
    def step_seconds(self) -> float:
        """Mean over steady steps."""
        return self.per_step(self.steady_ns) / NS

    @property
    def tokens_per_second(self) -> float | None:
        """None: unknown."""
        seconds, steps = self.steady_ns / NS, self.steps
        told_here = (
            row.value
            for row in told(self.run.values, TOKENS)
            if steps.begin_ns <= row.t_ns < steps.end_ns
        )
        tokens = sum(told_here) or self.meta.step_tokens * self.steady_count
        return tokens / seconds if tokens and seconds else None

    @property
    def waited_ns(self) -> int:
        """Exposed: how long anything waited in all steady steps."""
        return sum(ns for part, ns in self.parts.items() if part.startswith("wait_"))

    def per_step(self, amount: float) -> float:
        return amount / self.steady_count if self.steady_count else 0.0

    def lane(self, name: str) -> LaneUse | None:
        return next((lane for lane in self.lanes if lane.lane == name), None)

    @property
    def drive_life(self) -> DriveLife | None:
        """How long drives last; None if steady steps write nothing to disk."""
        lane = self.lane("write")
        return drive_life(self.meta, self.per_step(lane.n_bytes if lane is not None else 0))

    def h2d_params(self) -> int:
        """Return the parameter bytes that steady steps fetched."""
        return sum(
            row.n_bytes for row in self.ledger if (row.lane, row.category) == ("h2d", "param")
        )


def measure(run: Run) -> Measured:
    """Return the figures of a run; ConfigError if it has no events."""
    events = run.events
    if not events:
        raise ConfigError(
            "the run has no events: nothing was recorded",
            advice="train at least one step inside `with hetero.profile(model, directory):`",
        )
    steps = steps_of(events, run.meta.warmup)
    residency = residency_of(events, run.meta)
    # a plain model's activations are counted, not reserved: LIVE repeats LEVEL
    split = run.meta.mode != "plain"
    lines = timelines(events if split else [e for e in events if e.what != What.LIVE.value])
    known = [tier for tier in TIERS if tier in lines]
    lines = {tier: lines[tier] for tier in (*known, *sorted(lines.keys() - set(known)))}
    begin_ns, end_ns = steps.begin_ns, steps.end_ns
    return Measured(
        run,
        events[0].t_ns,
        max(e.t_ns + e.dur_ns for e in events),
        lines,
        {tier: peak_of(line, events, run.meta, residency, steps) for tier, line in lines.items()},
        steps,
        residency,
        counts_of(residency, run.meta, begin_ns, end_ns),
        tuple(lanes_of(events, run.meta, begin_ns, end_ns)),
        tuple(ledger_of(events, begin_ns, end_ns)),
        bound_of(run.meta, residency, lines.get("HBM"), steps),
    )


# -- the summary ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TierFigures:
    peak_bytes: int
    budget_bytes: int | None
    unattributed_bytes: int
    """Bytes of the peak without a known module."""
    peak_step: int
    peak_phase: str
    peak_unit: str
    at_peak_bytes: dict[str, int]
    """By category; they add up to ``peak_bytes``."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Length of steps: means over steady ones, but for ``count``."""

    count: int
    """Complete steps in the recording."""
    steady_count: int
    warmup: tuple[int, ...]
    """Steps left out of steady figures."""
    mean_seconds: float
    median_seconds: float
    min_seconds: float
    max_seconds: float
    exposed_seconds: float
    """Mean time of waits."""
    exposed_share: float
    tokens_per_second: float | None = None
    """Samples, if a step has no tokens; None: a step says of neither."""


@dataclass(frozen=True, slots=True)
class LaneFigures:
    """A lane, per steady step."""

    moved_bytes: float
    moves: float
    busy_seconds: float
    busy_share: float
    bytes_per_second: float | None
    """Rate while it was busy."""


@dataclass(frozen=True, slots=True)
class FetchFigures:
    """How accesses found their buckets, per steady step."""

    hits: float
    misses: float
    prefetches: float
    late: float
    unused: float
    miss_wait_seconds: float
    late_wait_seconds: float


@dataclass(frozen=True, slots=True)
class TrafficFigures:
    """Bytes per steady step."""

    h2d_param_bytes: float
    bound_bytes: int
    """The least that parameters can cost on H2D; see `hetero.report.traffic.Bound`."""
    disk_read_bytes: float
    disk_write_bytes: float


@dataclass(frozen=True, slots=True)
class AllocationFigures:
    """What lived when most bytes did, from one step's begin to its backward."""

    step: int
    """-1: no step was seen, and the rest is empty."""
    peak_bytes: int
    outside_bytes: int
    """Of it, what the program made outside of the model."""
    rows: tuple[dict[str, str | int], ...]
    """``module``, ``where`` (lines of the program) and ``n_bytes``; the largest first."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run under stable keys: the contents of ``summary.json``, named in claims."""

    kind: str
    model: str
    device: str
    mode: str
    n_params: int
    tiers: dict[str, TierFigures]
    """By tier, in lower case."""
    step: StepFigures
    time: dict[str, float]
    """Seconds of a mean steady step by part, ``<part>_seconds``; their sum is its length."""
    lanes: dict[str, LaneFigures]
    fetch: FetchFigures
    traffic: TrafficFigures
    allocations: AllocationFigures
    events: int
    dropped_events: int
    schema: int = SUMMARY_SCHEMA
    advice: tuple[str, ...] = field(default=())

    def as_json(self) -> dict[str, Any]:
        """Return JSON-ready data; tiers and lanes are at the top level under their own names."""
        data = asdict(self)
        named = {**data.pop("tiers"), **data.pop("lanes")}
        return {**data, **named}

    def figures(self) -> dict[str, float]:
        """Return every number by its dotted key, as ``hbm.peak_bytes``."""
        return figures(self.as_json())


def figures(data: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of JSON data by dotted keys; other values are left out."""
    found: dict[str, float] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            found |= figures(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[prefix + key] = value
    return found


def summarize(measured: Measured, advice: tuple[str, ...] = ()) -> Summary:
    meta, run = measured.meta, measured.run
    return Summary(
        kind=meta.kind,
        model=meta.model,
        device=meta.device,
        mode=meta.mode,
        n_params=meta.n_params,
        tiers={tier.lower(): tier_figures(peak) for tier, peak in measured.peaks.items()},
        step=step_figures(measured),
        time={f"{p}_seconds": measured.per_step(ns) / NS for p, ns in measured.parts.items()},
        lanes={lane.lane: lane_figures(measured, lane) for lane in measured.lanes},
        fetch=fetch_figures(measured),
        traffic=traffic_figures(measured),
        allocations=allocation_figures(meta.allocations),
        events=len(run.events),
        dropped_events=run.dropped,
        advice=advice,
    )


def tier_figures(peak: Peak) -> TierFigures:
    return TierFigures(
        peak.n_bytes,
        peak.budget_bytes,
        peak.unattributed_bytes,
        peak.step,
        peak.phase,
        peak.unit,
        dict(peak.categories),
    )


def allocation_figures(found: Allocations) -> AllocationFigures:
    outside_bytes = sum(row.n_bytes for row in found.rows if not row.module)
    rows = tuple(asdict(row) for row in found.rows)
    return AllocationFigures(found.step, found.n_bytes, outside_bytes, rows)


def step_figures(measured: Measured) -> StepFigures:
    walls = sorted(step.wall_ns / NS for step in measured.steps.steady) or [0.0]
    waited_ns, steady_ns = measured.waited_ns, measured.steady_ns
    return StepFigures(
        len(measured.steps.all),
        measured.steady_count,
        measured.steps.warmup,
        measured.step_seconds,
        walls[len(walls) // 2],
        walls[0],
        walls[-1],
        measured.per_step(waited_ns) / NS,
        waited_ns / steady_ns if steady_ns else 0.0,
        measured.tokens_per_second,
    )


def lane_figures(measured: Measured, lane: LaneUse) -> LaneFigures:
    return LaneFigures(
        measured.per_step(lane.n_bytes),
        measured.per_step(lane.moves),
        measured.per_step(lane.busy_ns) / NS,
        lane.busy_share,
        lane.bytes_per_second,
    )


def fetch_figures(measured: Measured) -> FetchFigures:
    rows = list(measured.counts.values())
    names = ("hits", "misses", "prefetches", "late", "unused", "miss_wait_ns", "late_wait_ns")
    sums = [measured.per_step(sum(getattr(row, name) for row in rows)) for name in names]
    return FetchFigures(*sums[:5], *(ns / NS for ns in sums[5:]))


def traffic_figures(measured: Measured) -> TrafficFigures:
    read, write = (
        measured.per_step(lane.n_bytes if (lane := measured.lane(name)) else 0)
        for name in ("read", "write")
    )
    h2d = measured.per_step(measured.h2d_params())
    return TrafficFigures(h2d, measured.bound.n_bytes, read, write)

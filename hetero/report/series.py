"""A run as columns of small whole numbers, for the page's script: reduced, relative, as deltas.

Times are microseconds since the run's begin. A column that only grows, or changes little, is
written as differences from the value before; `undelta` is the inverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from hetero.events import What
from hetero.report.levels import Timeline, reduced
from hetero.report.measure import Measured
from hetero.report.peaks import unit_name
from hetero.report.residency import AccessSpan, Stay
from hetero.report.traffic import LaneChart, lane_charts
from hetero.report.values import curves
from hetero.report.words import LANE_LABELS, REASONS, tier_label

MICRO = 1000
PIXELS = 4000  # of the whole run: closer points are drawn as one
STAYS = 12_000  # kept one by one
PHASES = 6_000
T = TypeVar("T", Stay, AccessSpan)


def delta(values: Sequence[int]) -> list[int]:
    """Return the first value, then differences."""
    return [b - a for a, b in zip((0, *values), values, strict=False)]


def undelta(values: Sequence[int]) -> list[int]:
    """Return the values that `delta` was given."""
    return list(accumulate(values))


def series_of(measured: Measured) -> dict[str, Any]:
    """Return the data that the page's script draws, JSON-ready."""
    return {
        "end": (measured.end_ns - measured.begin_ns) // MICRO,
        "typical": typical(measured),
        "steps": steps(measured),
        "phases": phases(measured),
        "tiers": [tier(measured, line) for line in measured.timelines.values()],
        "values": values(measured),
        "lanes": lanes(measured),
        "gantt": gantt(measured),
        "reasons": REASONS,
    }


def since(measured: Measured, times_ns: Iterable[int]) -> list[int]:
    """Return deltas of microseconds since the run's begin."""
    return delta([(t_ns - measured.begin_ns) // MICRO for t_ns in times_ns])


def windows(measured: Measured) -> list[tuple[int, int]]:
    """Return the windows shown exactly in a run of any length: the typical steady step."""
    step = measured.steps.typical()
    return [(step.begin_ns, step.end_ns)] if step is not None else []


def typical(measured: Measured) -> list[int]:
    """Return begin and end of the steady step of median length, in microseconds."""
    return [(t_ns - measured.begin_ns) // MICRO for window in windows(measured) for t_ns in window]


def steps(measured: Measured) -> dict[str, list[int]]:
    rows = measured.steps.all
    return {
        "number": delta([step.number for step in rows]),
        "begin": since(measured, (step.begin_ns for step in rows)),
        "end": since(measured, (step.end_ns for step in rows)),
    }


def phases(measured: Measured) -> dict[str, Any]:
    """Return when forward, backward and step ran; of too many, only the first."""
    rows = [e for e in measured.run.events if e.what == What.PHASE.value][:PHASES]
    names = sorted({row.why for row in rows})
    return {
        "names": names,
        "name": [names.index(row.why) for row in rows],
        "begin": since(measured, (row.t_ns for row in rows)),
        "end": since(measured, (row.t_ns + row.dur_ns for row in rows)),
    }


def tier(measured: Measured, line: Timeline) -> dict[str, Any]:
    """Return a tier's timeline, reduced to the pixels of a screen."""
    small, peak = reduced(line, windows(measured)), measured.peaks[line.tier]
    shown = [i for i, column in enumerate(line.columns) if any(column)]
    return {
        "tier": line.tier,
        "label": tier_label(line.tier, measured.meta.mode),
        "budget": peak.budget_bytes,
        "peak": peak.n_bytes,
        "peakRow": small.peak_row,
        "points": len(line.times_ns),
        "categories": [line.categories[i] for i in shown],
        "t": since(measured, small.times_ns),
        "v": [delta(small.columns[i]) for i in shown],
    }


def values(measured: Measured) -> list[dict[str, Any]]:
    """Return what the loop told; of too many values, some."""
    found = []
    for curve in curves(measured.run.values, measured.begin_ns):
        every = -(-len(curve.numbers) // PIXELS)
        times, numbers = curve.times_ns[::every], curve.numbers[::every]
        short = [float(f"{number:.6g}") for number in numbers]
        found.append({"name": curve.name, "t": since(measured, times), "v": short})
    return found


def lanes(measured: Measured) -> list[dict[str, Any]]:
    """Return each lane's rates over the run, and finer ones over the typical step."""
    spans = [(measured.begin_ns, measured.end_ns), *windows(measured)]
    charts = [lane_charts(measured.run.events, *span) for span in spans]
    return [
        {
            "lane": parts[0].lane,
            "label": LANE_LABELS.get(parts[0].lane, parts[0].lane),
            "ceiling": measured.meta.ceilings.get(parts[0].lane),
            "bins": [bins(measured, chart) for chart in parts],
        }
        for parts in zip(*charts, strict=True)
    ]


def bins(measured: Measured, chart: LaneChart) -> dict[str, Any]:
    return {
        "begin": (chart.begin_ns - measured.begin_ns) / MICRO,
        "width": chart.bin_ns / MICRO,
        "bytes": delta(chart.n_bytes),
        "busy": delta([ns // MICRO for ns in chart.busy_ns]),
    }


# -- the Gantt chart -----------------------------------------------------------------------------


def gantt(measured: Measured) -> dict[str, Any]:
    """Return stays by bucket, in the order in which buckets were first resident, and accesses."""
    buckets = measured.residency.first_uses()
    units = {measured.meta.buckets[bucket].unit for bucket in buckets}
    stays = thinned(measured, measured.residency.stays, lambda stay: stay.bucket)
    accesses = thinned(measured, measured.residency.accesses, lambda access: access.unit)
    accesses = [access for access in accesses if access.unit in units]
    return {
        "buckets": [bucket_of(measured, bucket) for bucket in buckets],
        "stays": stay_columns(measured, stays, {b: i for i, b in enumerate(buckets)}),
        "uses": {
            "unit": [a.unit for a in accesses],
            "begin": since(measured, (a.begin_ns for a in accesses)),
            "length": [(a.end_ns - a.begin_ns) // MICRO for a in accesses],
        },
        "merged": len(measured.residency.stays) - len(stays),
    }


def bucket_of(measured: Measured, bucket: int) -> dict[str, Any]:
    row = measured.meta.buckets[bucket]
    return {
        "id": bucket,
        "unit": row.unit,
        "name": unit_name(measured.meta, row.unit) or f"bucket {bucket}",
        "bytes": row.n_bytes,
        "trainable": row.trainable,
        "params": row.names,
    }


def stay_columns(
    measured: Measured, stays: Sequence[Stay], rows: dict[int, int]
) -> dict[str, list[Any]]:
    known = list(REASONS)
    return {
        "row": [rows[stay.bucket] for stay in stays],
        "begin": since(measured, (stay.begin_ns for stay in stays)),
        "ready": [(stay.ready_ns - stay.begin_ns) // MICRO for stay in stays],
        "length": [(stay.end_ns - stay.begin_ns) // MICRO for stay in stays],
        "in": [known.index(stay.why_in) if stay.why_in in known else -1 for stay in stays],
        "out": [known.index(stay.why_out) if stay.why_out in known else -1 for stay in stays],
        "bytes": delta([stay.n_bytes for stay in stays]),
        "uses": [stay.accesses for stay in stays],
        "waited": [stay.waited_ns // MICRO for stay in stays],
        "slack": [None if stay.slack_ns is None else stay.slack_ns // MICRO for stay in stays],
        "step": delta([stay.step for stay in stays]),
    }


def thinned(measured: Measured, rows: Sequence[T], owner: Callable[[T], int]) -> list[T]:
    """Return all stays or accesses, or, of too many, those that a screen can tell apart.

    Outside the typical step, those within a pixel of the last one shown of their owner are left
    out.
    """
    if len(rows) <= STAYS:
        return list(rows)
    pixel_ns = pixel(measured, len(set(map(owner, rows))))
    shown_ns: dict[int, int] = {}
    kept = []
    for row in rows:
        last_ns = shown_ns.get(owner(row), row.begin_ns - pixel_ns)
        if row.begin_ns >= last_ns + pixel_ns or exact(measured, row.begin_ns):
            kept.append(row)
            shown_ns[owner(row)] = row.begin_ns
    return kept


def pixel(measured: Measured, rows: int) -> int:
    """Return the time of one pixel, so that all rows together keep about `STAYS`."""
    columns = max(1, min(PIXELS, STAYS // max(1, rows)))
    return max(1, (measured.end_ns - measured.begin_ns) // columns)


def exact(measured: Measured, t_ns: int) -> bool:
    """Whether a time lies in a window that is shown exactly."""
    return any(begin_ns <= t_ns < end_ns for begin_ns, end_ns in windows(measured))

"""A run as a trace for Perfetto's viewer: Chrome's JSON format, compressed (floor 4).

Each lane is one track, or several where its moves overlap (slices of a track must not). Each tier
and category is a counter; residency is asynchronous slices; arrows lead from a copy to its first
use. Times are microseconds since the run's begin.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hetero.events import Event, What
from hetero.report.measure import Measured
from hetero.report.peaks import unit_name
from hetero.report.run import storing
from hetero.report.timing import StepTime
from hetero.report.words import LANE_LABELS, LANES, REASONS, tier_label

RUN, MEMORY, RESIDENCY = 1, 2, 3  # processes
STEPS = 3  # in a trace, from the first steady one on
TRACKS = 2_000  # of residency
Row = dict[str, Any]


def write_perfetto(measured: Measured, path: str | Path) -> None:
    """Write a trace of the first three steady steps, or of the whole run if no step is complete."""
    with storing(path), gzip.open(path, "wt", encoding="utf-8", compresslevel=6) as file:
        json.dump({"displayTimeUnit": "ms", "traceEvents": trace(measured)}, file)


def trace(measured: Measured) -> list[Row]:
    begin_ns, end_ns = window(measured)
    inside = [e for e in measured.run.events if begin_ns <= e.t_ns < end_ns]
    rows = [*slices(measured, inside), *counters(measured, begin_ns, end_ns)]
    rows += residency(measured, begin_ns, end_ns)
    return [*names(rows), *sorted(rows, key=lambda row: row["ts"])]


def window(measured: Measured) -> tuple[int, int]:
    steps: Sequence[StepTime] = measured.steps.steady[:STEPS]
    if not steps:
        return measured.begin_ns, measured.end_ns + 1
    return steps[0].begin_ns, steps[-1].end_ns


def micros(measured: Measured, t_ns: int) -> float:
    return (t_ns - measured.begin_ns) / 1000


# -- slices --------------------------------------------------------------------------------------


def slices(measured: Measured, events: Iterable[Event]) -> Iterator[Row]:
    """Yield the slices of each track, and an arrow from each fetch to its first use."""
    placed = [
        (event, track_id(name, number))
        for name, rows in tracks(events).items()
        for number, track in enumerate(serial(rows))
        for event in track
    ]
    yield from (slice_of(measured, event, tid) for event, tid in placed)
    yield from arrows(measured, placed)


def arrows(measured: Measured, placed: Sequence[tuple[Event, int]]) -> Iterator[Row]:
    """Yield an arrow from each copy of parameters to the access it was made for."""
    accesses = [(event, tid) for event, tid in placed if event.what == What.ACCESS.value]
    used = {
        (stay.bucket, stay.ready_ns): max(stay.ready_ns, stay.first_use_ns)
        for stay in measured.residency.stays
        if stay.first_use_ns is not None
    }
    for event, tid in placed:
        at_ns = used.get((event.bucket, event.t_ns + event.dur_ns), -1)
        here = [t for a, t in accesses if a.t_ns <= at_ns < a.t_ns + a.dur_ns]
        if event.what == What.MOVE.value and event.lane == "h2d" and here:
            row = {"pid": RUN, "cat": "fetch", "name": "fetched for", "id": event.seq}
            yield {**row, "ph": "s", "tid": tid, "ts": micros(measured, event.t_ns)}
            yield {**row, "ph": "f", "bp": "e", "tid": here[-1], "ts": micros(measured, at_ns)}


TRACK_NAMES = ("steps", "phases", "accesses", "waits", *LANES)
WIDEST = 100  # tracks of one name


def tracks(events: Iterable[Event]) -> dict[str, list[Event]]:
    """Return events with a duration, by the name of their track."""
    named = {"step": "steps", "phase": "phases", "access": "accesses", "wait": "waits"}
    found: dict[str, list[Event]] = {name: [] for name in TRACK_NAMES}
    for event in events:
        name = named.get(event.what, event.lane)
        if event.what in (*named, "move", "update") and name in found:
            found[name].append(event)
    return found


def serial(rows: Sequence[Event]) -> list[list[Event]]:
    """Return events, in order of begin, on as few tracks as keep them apart."""
    found: list[list[Event]] = []
    for event in rows:
        free = (t for t in found if t[-1].t_ns + max(1, t[-1].dur_ns) <= event.t_ns)
        track = next(free, None)
        if track is None:
            track = []
            found.append(track)
        track.append(event)
    return found


def track_id(name: str, number: int) -> int:
    return TRACK_NAMES.index(name) * WIDEST + min(number, WIDEST - 1) + 1


def slice_of(measured: Measured, event: Event, tid: int) -> Row:
    unit = unit_name(measured.meta, event.unit)
    said = {"bytes": event.n_bytes, "bucket": event.bucket, "why": event.why, "step": event.step}
    return {
        "ph": "X",
        "pid": RUN,
        "tid": tid,
        "ts": micros(measured, event.t_ns),
        "dur": event.dur_ns / 1000,
        "name": unit or title(measured, event),
        "cat": event.what,
        "args": {**said, "seq": event.seq, "cause": event.cause},
    }


def title(measured: Measured, event: Event) -> str:
    if event.what == What.STEP.value:
        return f"step {event.step}"
    if event.bucket < 0 or event.bucket >= len(measured.meta.buckets):
        return event.category or event.why or event.what
    unit = unit_name(measured.meta, measured.meta.buckets[event.bucket].unit)
    return f"{event.category or event.what} {unit}"


# -- counters and residency ----------------------------------------------------------------------


def counters(measured: Measured, begin_ns: int, end_ns: int) -> Iterator[Row]:
    """Yield the bytes that each tier held, by category."""
    for tier, line in measured.timelines.items():
        label = tier_label(tier, measured.meta.mode)
        for row, t_ns in enumerate(line.times_ns):
            if begin_ns <= t_ns < end_ns:
                values = line.at_row(row)
                at = {"pid": MEMORY, "tid": 0, "ts": micros(measured, t_ns)}
                yield {"ph": "C", **at, "name": f"{label} bytes", "args": values}


def residency(measured: Measured, begin_ns: int, end_ns: int) -> Iterator[Row]:
    """Yield the stays of buckets that overlap a window, cut to it."""
    stays = [s for s in measured.residency.stays if s.begin_ns < end_ns and s.end_ns > begin_ns]
    known = list(dict.fromkeys(stay.bucket for stay in stays))[:TRACKS]
    for number, stay in enumerate(stays):
        if stay.bucket not in known:
            continue
        unit = unit_name(measured.meta, measured.meta.buckets[stay.bucket].unit)
        row = {"pid": RESIDENCY, "tid": stay.bucket, "cat": "residency", "id": number}
        row["name"] = f"{unit} ({stay.bucket})"
        why = {"in": REASONS.get(stay.why_in, stay.why_in), "bytes": stay.n_bytes}
        out = {"out": REASONS.get(stay.why_out, stay.why_out)}
        came, went = max(stay.begin_ns, begin_ns), min(stay.end_ns, end_ns)
        yield {**row, "ph": "b", "ts": micros(measured, came), "args": why}
        yield {**row, "ph": "e", "ts": micros(measured, went), "args": out}


def names(rows: Iterable[Row]) -> Iterator[Row]:
    for pid, name in ((RUN, "run"), (MEMORY, "memory"), (RESIDENCY, "residency on HBM")):
        yield {
            "ph": "M",
            "pid": pid,
            "tid": 0,
            "ts": 0,
            "name": "process_name",
            "args": {"name": name},
        }
    for tid in sorted({row["tid"] for row in rows if row["pid"] == RUN}):
        place, number = divmod(tid - 1, WIDEST)
        label = LANE_LABELS.get(TRACK_NAMES[place], TRACK_NAMES[place])
        said = {"name": f"{label} {number + 1}" if number else label}
        base = {"ph": "M", "pid": RUN, "tid": tid, "ts": 0}
        yield {**base, "name": "thread_name", "args": said}
        yield {**base, "name": "thread_sort_index", "args": {"sort_index": tid}}

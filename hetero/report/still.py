"""Pictures that stand still: for readers without JavaScript, and for paper (floor 4).

They are SVG in per cent of their width. The script draws the same figures over them, to be zoomed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hetero.report.levels import RESERVED, Timeline
from hetero.report.measure import NS, Measured
from hetero.report.peaks import unit_name
from hetero.report.traffic import BINS, lane_charts
from hetero.report.values import Curve
from hetero.report.words import format_rate, format_seconds
from hetero.types import format_bytes

ACROSS = 160  # columns of a picture
TICKS = 4
ROWS, STAYS = 40, 600  # of the picture of stays


class Area(NamedTuple):
    fill: str
    path: str
    """On a plane `ACROSS` wide and 100 high, 0 at the top."""


class Mark(NamedTuple):
    """A word at a place in per cent."""

    at: float
    text: str


class Still(NamedTuple):
    areas: tuple[Area, ...]
    """Those that others cover come first."""
    top: str
    """What the upper edge stands for."""
    times: tuple[Mark, ...]
    budget: float | None = None
    """Its height in per cent from the top; None: there is none, or it is above the picture."""


class StayBlock(NamedTuple):
    """A bucket's stay, in per cent of the picture's time."""

    row: int
    begin: float
    length: float
    colour: str


class StillStays(NamedTuple):
    names: tuple[str, ...]
    blocks: tuple[StayBlock, ...]
    times: tuple[Mark, ...]


def paint(colour: str, category: str) -> str:
    """Return the fill of a category: what is reserved, and not held, is hatched everywhere."""
    return f"url(#hatch-{colour})" if category.endswith(RESERVED) else f"var(--{colour})"


def still_levels(measured: Measured, line: Timeline, least: int = 0) -> Still:
    """Return a tier's bytes over the run, each column at its highest; the upper edge stands for
    ``least`` or more."""
    rows = sampled(line, measured.begin_ns, measured.end_ns)
    budget = measured.peaks[line.tier].budget_bytes
    top = max(top_of(measured, line), least)
    shown = [i for i, column in enumerate(line.columns) if any(column)]
    heights = [0] * len(rows)
    areas = []
    for place, i in enumerate(shown):
        heights = [h + line.columns[i][row] for h, row in zip(heights, rows, strict=True)]
        fill = paint(f"cat-{line.tier}-{place}", line.categories[i])
        areas.append(Area(fill, outline([h / top for h in heights])))
    height = 100 * (1 - budget / top) if budget and budget <= top else None
    return Still(tuple(reversed(areas)), format_bytes(top), marks(measured), height)


def top_of(measured: Measured, line: Timeline) -> int:
    """Return the bytes at the upper edge of a tier's picture: its budget, if that is near."""
    peak = max(line.totals) or 1
    budget = measured.peaks[line.tier].budget_bytes
    return max(budget, peak) if budget and budget < 4 * peak else peak


def sampled(line: Timeline, begin_ns: int, end_ns: int) -> list[int]:
    """Return the row with the most bytes in each of `ACROSS` columns of time."""
    found, row = [], 0
    for column in range(ACROSS):
        until_ns = begin_ns + (end_ns - begin_ns) * (column + 1) // ACROSS
        best = row
        while row + 1 < len(line.times_ns) and line.times_ns[row + 1] < until_ns:
            row += 1
            best = row if line.totals[row] > line.totals[best] else best
        found.append(best)
    return found


def outline(heights: Sequence[float]) -> str:
    """Return the path of columns; those that are as high as the one before are not repeated."""
    said = ["M0 100"]
    for place, height in enumerate(heights):
        if not place or height != heights[place - 1]:
            said.append(f"H{place}V{100 * (1 - height):.1f}")
    return "".join([*said, f"H{len(heights)}V100Z"])


def marks(measured: Measured, window: tuple[int, int] | None = None) -> tuple[Mark, ...]:
    """Return the times below a picture, since the run's begin."""
    begin, end = window or (measured.begin_ns, measured.end_ns)
    times = [(begin + (end - begin) * i / TICKS - measured.begin_ns) / NS for i in range(TICKS + 1)]
    return tuple(Mark(100 * i / TICKS, format_seconds(t)) for i, t in enumerate(times))


def still_curve(measured: Measured, curve: Curve) -> Still:
    """Return a value over the run, as a line of steps."""
    span = max(1, measured.end_ns - measured.begin_ns)
    low, high = min(0.0, *curve.numbers), max(curve.numbers)
    heights, at = [0.0] * ACROSS, 0
    for column in range(ACROSS):
        until_ns = measured.begin_ns + span * (column + 1) // ACROSS
        while at + 1 < len(curve.times_ns) and curve.times_ns[at + 1] < until_ns:
            at += 1
        if curve.times_ns[at] < until_ns:
            heights[column] = (curve.numbers[at] - low) / ((high - low) or 1.0)
    return Still((Area("var(--soft)", outline(heights)),), f"{high:.4g}", marks(measured))


def still_lanes(measured: Measured) -> dict[str, Still]:
    """Return each lane's rate over the run."""
    each = -(-BINS // ACROSS)
    found = {}
    for chart in lane_charts(measured.run.events, measured.begin_ns, measured.end_ns):
        sums = [sum(chart.n_bytes[i : i + each]) for i in range(0, BINS, each)]
        most = max(sums) or 1
        path = outline([n / most for n in sums])
        rate = format_rate(most * NS / (chart.bin_ns * each))
        found[chart.lane] = Still((Area(f"var(--lane-{chart.lane})", path),), rate, marks(measured))
    return found


def still_stays(measured: Measured) -> StillStays:
    """Return the stays of the typical step, or of the run if it has none."""
    step = measured.steps.typical()
    begin, end = (step.begin_ns, step.end_ns) if step else (measured.begin_ns, measured.end_ns)
    whole = max(1, end - begin)
    here = [s for s in measured.residency.stays if s.begin_ns < end and s.end_ns > begin][:STAYS]
    rows = {bucket: i for i, bucket in enumerate(dict.fromkeys(s.bucket for s in here))}
    blocks = []
    for stay in here:
        low, high = max(begin, stay.begin_ns), min(end, stay.end_ns)
        colour = "miss" if stay.missed else "ahead" if stay.why_in == "plan" else "stay"
        if rows[stay.bucket] < ROWS:
            place = (100 * (low - begin) / whole, 100 * (high - low) / whole)
            blocks.append(StayBlock(rows[stay.bucket], *place, colour))
    names = [unit_name(measured.meta, measured.meta.buckets[b].unit) for b in list(rows)[:ROWS]]
    return StillStays(tuple(names), tuple(blocks), marks(measured, (begin, end)))

"""Rows and pictures of the report's views that are no figures (floor 4).

``templates/`` has their words and their order on the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hetero.events import What
from hetero.report.levels import Timeline
from hetero.report.measure import NS, Measured
from hetero.report.peaks import Peak, Share
from hetero.report.run import Allocation, Allocations
from hetero.report.svg import BarPiece, Leaf
from hetero.report.timing import StepTime
from hetero.report.words import format_seconds, format_share, is_light, part_label, shades
from hetero.types import format_bytes

LEAVES = 60  # rectangles of a treemap
NO_STEPS = "No complete step was recorded."
NO_MODULE = "no module recorded"
NO_LINE = "no line recorded"
NAMED = 2  # modules of a line that are named
WITHOUT = "without hetero"
REHEARSED, ESTIMATED = "rehearsed", "estimated"  # rows of a plan


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A planned setting: a row of ``whatif.json``."""

    label: str
    fits: bool
    peak_bytes: int
    """Of HBM."""
    step_seconds: float
    change: str
    tokens_per_second: float = 0.0
    """0: unknown, as in files of earlier versions."""
    how: str = ESTIMATED
    """Or `REHEARSED`: operation by operation, on the plan's clock."""


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The files next to a run's events."""

    predicted: dict[str, Any] = field(default_factory=dict)
    """The predicted summary."""
    whatif: tuple[WhatIf, ...] = ()
    digest: str = ""
    """SHA-256 of the log's file."""

    @property
    def plain_seconds(self) -> float | None:
        """What a step takes without hetero, by a plan; None: none was made."""
        found = (row.step_seconds for row in self.whatif if row.label == WITHOUT)
        return next(found, None)


# -- verdict and steps ---------------------------------------------------------------------------


def off(expected: float, found: float) -> str:
    """Return the relative error of a prediction."""
    return f"{100 * (expected - found) / found:+.1f} %" if found else "nothing was found"


def filled(peak: Peak) -> BarPiece:
    """Return how full a tier's budget is at its peak."""
    whole = max(peak.budget_bytes or 0, peak.n_bytes) or 1
    return BarPiece(0, peak.n_bytes / whole, peak.tier, f"{peak.n_bytes:,} bytes")


def doubts(measured: Measured) -> Iterator[str]:
    """Yield the reasons why the figures are weaker than they look."""
    if measured.steps.warmup:
        named = ", ".join(map(str, measured.steps.warmup))
        yield f"Steady figures leave out the first steps ({named}): they warm up."
    if measured.run.dropped:
        yield f"{measured.run.dropped:,} events were lost: sums may be too low."
    for line in measured.timelines.values():
        if line.excess_bytes:
            more = format_bytes(line.excess_bytes)
            yield (
                f"{line.tier}: activations took up to {more} more than was set aside for them;"
                " in a first step, which measures them, nothing is."
            )
    for peak in measured.peaks.values():
        over = peak.n_bytes - (peak.budget_bytes or peak.n_bytes)
        if over > 0:
            yield f"{peak.tier}: the peak is {format_bytes(over)} above the budget."


def parts_of(measured: Measured, *, with_times: bool = False) -> list[BarPiece]:
    """Return the parts of a steady step as pieces of a bar, titled by their share or their time."""
    pieces, at = [], 0.0
    for part, ns in measured.parts.items():
        share = ns / measured.steady_ns
        label = part_label(part)
        title = f"{label} {format_share(share)}"
        if with_times:
            title = f"{label}: {format_seconds(measured.per_step(ns) / NS)}"
        pieces.append(BarPiece(at, share, f"part-{part}", title, part))
        at += share
    return pieces


def step_parts(measured: Measured) -> list[str]:
    """Return the parts that occur in any step, in order."""
    return list(dict.fromkeys(part for step in measured.steps.all for part in step.parts))


# -- tiers over time -----------------------------------------------------------------------------


def allocated(measured: Measured) -> dict[str, int]:
    """Return the peaks of the device allocator's counts, if logged (LIVE without a tier)."""
    most: dict[str, int] = {}
    for event in measured.run.events:
        if event.what == What.LIVE.value and not event.tier:
            most[event.category] = max(event.n_bytes, most.get(event.category, 0))
    return most


def charged(line: Timeline) -> list[str]:
    """Return the categories of which a tier ever held bytes."""
    pairs = zip(line.categories, line.columns, strict=True)
    return [name for name, column in pairs if any(column)]


class StepLevel(NamedTuple):
    step: int
    n_bytes: int
    by_category: list[int]


def peak_keys(line: Timeline) -> list[tuple[str, str]]:
    """Return the colours of a tier's categories, the topmost first."""
    return [(f"cat-{line.tier}-{i}", name) for i, name in enumerate(charged(line))][::-1]


def by_step(measured: Measured, line: Timeline) -> list[StepLevel]:
    columns = [column for column in line.columns if any(column)]
    rows, row = [], 0
    for step in measured.steps.all:
        best, row = highest(line, row, step)
        rows.append(StepLevel(step.number, line.totals[best], [c[best] for c in columns]))
    return rows


def highest(line: Timeline, row: int, step: StepTime) -> tuple[int, int]:
    """Return the row of a tier's peak in a step, and the step's last row."""
    best = row
    while row + 1 < len(line.times_ns) and line.times_ns[row + 1] < step.end_ns:
        row += 1
        if line.totals[row] > line.totals[best]:
            best = row
    return best, row


# -- residency and traffic -----------------------------------------------------------------------


class Coming(NamedTuple):
    """How often buckets came or went for a reason, over the whole run."""

    way: str
    why: str
    times: int
    n_bytes: int


def comings(measured: Measured) -> list[Coming]:
    """Return how often buckets came and went for each reason."""
    times, n_bytes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for stay in measured.residency.stays:
        for key in (("came", stay.why_in), ("went", stay.why_out)):
            times[key] += 1
            n_bytes[key] += stay.n_bytes
    return [Coming(*key, times[key], n_bytes[key]) for key in sorted(times)]


def refetches(measured: Measured) -> float:
    """Return the bytes a steady step fetched beyond the first fetch of each bucket."""
    seen: set[tuple[int, int]] = set()
    again = 0
    steady = {step.number for step in measured.steps.steady}
    for stay in measured.residency.stays:
        if stay.step in steady and stay.why_in != "before":
            again += stay.n_bytes if (stay.step, stay.bucket) in seen else 0
            seen.add((stay.step, stay.bucket))
    return measured.per_step(again)


# -- the peak ------------------------------------------------------------------------------------


def peak_colours(measured: Measured, peak: Peak) -> list[tuple[str, str]]:
    names = charged(measured.timelines[peak.tier])
    rows = ((f"cat-{peak.tier}-{i}", name) for i, name in enumerate(names))
    return [(colour, name) for colour, name in rows if name in peak.categories]


def leaves_of(measured: Measured, peak: Peak) -> list[Leaf]:
    """Return the rectangles of a peak; of many, the smallest are merged into one."""
    names = charged(measured.timelines[peak.tier])
    light = [is_light(colour) for colour in shades(peak.tier, len(names))]
    at = {name: i for i, name in enumerate(names)}
    leaves = [
        leaf_of(share, peak, f"cat-{peak.tier}-{at[share.category]}", light[at[share.category]])
        for share in peak.shares[:LEAVES]
    ]
    if rest := peak.shares[LEAVES:]:
        n_bytes = sum(share.n_bytes for share in rest)
        named = f"{len(rest)} smaller ones"
        leaves.append(Leaf(n_bytes, f"cat-{peak.tier}-0", named, format_bytes(n_bytes), False))
    return leaves


def leaf_of(share: Share, peak: Peak, colour: str, light: bool) -> Leaf:
    size = f"{format_bytes(share.n_bytes)} ({format_share(share.n_bytes / peak.n_bytes)})"
    named = share.module or share.where
    detail = f"{share.category}, {size}" if named else f"{size}, {NO_MODULE}"
    label = named or share.category
    return Leaf(share.n_bytes, colour, label, detail, light, share.category)


class LineBytes(NamedTuple):
    """What one place of the program made, in whichever modules."""

    where: str
    n_bytes: int
    modules: str
    """The largest first; empty outside of the model."""


def by_place(found: Allocations) -> list[LineBytes]:
    """Return allocations by their lines alone, the largest first."""
    rows: dict[str, list[Allocation]] = {}
    for row in found.rows:
        rows.setdefault(row.where or NO_LINE, []).append(row)
    places = [
        LineBytes(where, sum(row.n_bytes for row in made), short([r.module for r in made]))
        for where, made in rows.items()
    ]
    return sorted(places, key=lambda place: (-place.n_bytes, place.where))


def short(modules: Sequence[str]) -> str:
    """Return the first names of many."""
    names = list(dict.fromkeys(filter(None, modules)))
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


# -- predicted and measured ----------------------------------------------------------------------


def compared(guesses: Mapping[str, float], found: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield (key, error) of every figure with a unit that both have."""
    for key in found:
        if key in guesses and key.endswith(("_bytes", "_seconds", "_share", "per_second")):
            yield key, off(guesses[key], found[key]) if found[key] else "-"

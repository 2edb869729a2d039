"""The report's views, in the order in which they are read (floor 4).

Each returns a `page.View`, also where a run lacks what it shows: then it says so in one line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from typing import Any

from hetero.events import What
from hetero.report.advice import RATED_TBW, Advice, verdict
from hetero.report.levels import Timeline
from hetero.report.measure import NS, Measured, Summary, figures
from hetero.report.page import (
    Cell,
    View,
    figure,
    keys,
    number,
    numbers,
    paragraph,
    size,
    sized,
    table,
    text,
    timed,
)
from hetero.report.peaks import Peak, Share, unit_name
from hetero.report.svg import Leaf, Piece, bar, treemap
from hetero.report.timing import StepTime
from hetero.report.traffic import BINS
from hetero.report.words import (
    CATEGORY_NOTES,
    LANE_LABELS,
    PART_NOTES,
    REASONS,
    UNATTRIBUTED,
    format_rate,
    format_seconds,
    format_share,
    is_light,
    part_label,
    shades,
    three,
    tier_label,
)
from hetero.types import format_bytes

LEAVES = 60  # rectangles of a treemap
NO_STEPS = "No complete step was recorded."


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A setting that was planned, as a row of ``whatif.json``."""

    label: str
    fits: bool
    peak_bytes: int
    step_seconds: float
    change: str


@dataclass(frozen=True, slots=True)
class Beside:
    """What lies beside a run's events, where somebody planned it."""

    predicted: dict[str, Any] = field(default_factory=dict)
    """A summary that was predicted."""
    whatif: tuple[WhatIf, ...] = ()
    digest: str = ""
    """SHA-256 of the log's file."""


def views(
    measured: Measured, summary: Summary, advice: tuple[Advice, ...], beside: Beside
) -> list[View]:
    """Return all views."""
    return [
        View("verdict", "Verdict", header(measured, summary, advice, beside)),
        View("timelines", "What was where, when", timelines(measured)),
        View("residency", "Who stayed on HBM, and why", residency(measured)),
        View("lanes", "How busy the lanes were", lanes(measured)),
        View("step", "Where a step's time went", waterfall(measured)),
        View("peak", "Whose bytes the peak was", peaks(measured)),
        View("traffic", "What moved, and what had to", traffic(measured)),
        View("whatif", "What would fit", whatif(beside)),
        View("predicted", "Predicted and measured", predicted(summary, beside)),
        View("provenance", "Where these figures come from", provenance(measured, beside)),
    ]


# -- 0 verdict -----------------------------------------------------------------------------------


def header(measured: Measured, summary: Summary, advice: tuple[Advice, ...], beside: Beside) -> str:
    said = f'<p class="lead">{escape(verdict(measured))}</p>'
    cards = "".join(tier_card(measured, peak, beside) for peak in measured.peaks.values())
    cards += step_card(measured, beside) if measured.parts else ""
    return f'{said}<div class="cards">{cards}</div>{tries(advice)}{doubts(measured)}{GLOSSARY}'


WORDS = (
    ("tier", "where bytes lie: HBM (device memory), HOST (page-locked RAM), NVMe (disk)"),
    ("unit", "a module that is fetched as a whole, as a transformer block"),
    ("bucket", "the parameters of one unit that are treated alike (trained, or frozen)"),
    ("access", "a unit computes with its parameters, in forward or in backward"),
    ("miss", "an access needed a bucket that was not on HBM: it was fetched while compute waited"),
    ("prefetch", "the plan fetched a bucket before it was needed"),
    ("lane", "one direction of a link: H2D up to HBM, D2H down, read and write to disk"),
    ("exposed", "time in which training stands still; copies behind compute are hidden"),
    ("steady", "after the warm-up, in which the first steps are traced and nothing is planned yet"),
)
GLOSSARY = numbers(
    "Words used here", table(("word", "meaning"), [[text(w), text(m)] for w, m in WORDS])
)


def tier_card(measured: Measured, peak: Peak, beside: Beside) -> str:
    budget = peak.budget_bytes
    of = f"of {size(budget)} ({format_share(peak.n_bytes / budget)})" if budget else "no limit"
    whole = max(budget or 0, peak.n_bytes) or 1
    filled = Piece(0, peak.n_bytes / whole, peak.tier, f"{peak.n_bytes:,} bytes")
    where = f"step {peak.step}, {peak.phase}" if peak.step >= 0 else peak.phase
    unit = f", in {peak.unit}" if peak.unit else ""
    expected = figures(beside.predicted).get(f"{peak.tier.lower()}.peak_bytes")
    guess = f"<br>predicted {size(expected)}, {off(expected, peak.n_bytes)}" if expected else ""
    return (
        f'<div class="card">{escape(tier_label(peak.tier, measured.meta.mode))} at its peak'
        f'<b class="big">{size(peak.n_bytes)}</b>{bar([filled], 12)}'
        f'<span class="soft">{of}<br>{escape(where + unit)}{guess}</span></div>'
    )


def step_card(measured: Measured, beside: Beside) -> str:
    pieces, at = [], 0.0
    for part, ns in measured.parts.items():
        share = ns / measured.steady_ns
        pieces.append(Piece(at, share, f"part-{part}", f"{part_label(part)} {format_share(share)}"))
        at += share
    expected = figures(beside.predicted).get("step.mean_seconds")
    guess = off(expected, measured.step_seconds) if expected else ""
    said = f"<br>predicted {format_seconds(expected)}, {guess}" if expected else ""
    fewest = min(step.wall_ns for step in measured.steps.steady) / NS
    most = max(step.wall_ns for step in measured.steps.steady) / NS
    return (
        '<div class="card">A steady step (mean)'
        f'<b class="big">{format_seconds(measured.step_seconds)}</b>{bar(pieces, 12)}'
        f'<span class="soft">{format_share(measured.waited_ns / measured.steady_ns)} of it stands'
        f" still; {measured.steady_count} steady steps took {format_seconds(fewest)} to"
        f" {format_seconds(most)}{said}</span></div>"
    )


def off(expected: float, found: float) -> str:
    """Return how far a prediction is from what was found."""
    return f"{100 * (expected - found) / found:+.1f} %" if found else "nothing was found"


def tries(advice: tuple[Advice, ...]) -> str:
    if not advice:
        return paragraph("No change of memory would gain 1 % of a step.")
    rows = "".join(
        f"<li><b>{escape(a.change)}</b>{gain(a)}<br>"
        f'<span class="soft">{escape(a.because)}</span></li>'
        for a in advice
    )
    return (
        f'<h3>Try</h3><ol class="tries">{rows}</ol><p class="soft">Gains are upper bounds, and'
        " do not add up: what one change saves, another cannot save again.</p>"
    )


def gain(advice: Advice) -> str:
    seconds = advice.gain_seconds
    return f": at most -{format_seconds(seconds)} a step" if seconds else ""


def doubts(measured: Measured) -> str:
    """Return what makes the figures weaker than they look."""
    said = []
    if measured.steps.warmup:
        named = ", ".join(map(str, measured.steps.warmup))
        said.append(f"Steady figures leave out the first steps ({named}): they warm up.")
    if measured.run.dropped:
        said.append(f"{measured.run.dropped:,} events were lost: sums may be too low.")
    for line in measured.timelines.values():
        if line.excess_bytes:
            more = format_bytes(line.excess_bytes)
            said.append(f"{line.tier}: graphs held up to {more} that the ledger had not charged.")
    for peak in measured.peaks.values():
        over = peak.n_bytes - (peak.budget_bytes or peak.n_bytes)
        if over > 0:
            said.append(f"{peak.tier}: the peak is {format_bytes(over)} above the budget.")
    return "".join(paragraph(escape(line), "warn") for line in said)


# -- 1 timelines ---------------------------------------------------------------------------------


def timelines(measured: Measured) -> str:
    if not measured.timelines:
        return paragraph("The log has no LEVEL events: nobody said what the tiers held.")
    legend = keys([(f"phase-{name}", name) for name in ("forward", "backward", "step")])
    said = paragraph(
        "Bytes that were charged, or counted, by category; the strip above each chart shows the"
        " phase. Drag to zoom all charts, double-click to see the whole run."
        " With the keyboard: arrows move, + and - zoom, 0 shows all."
    )
    shown = "".join(tier_figure(measured, line) for line in measured.timelines.values())
    return said + allocator(measured) + legend + shown


def allocator(measured: Measured) -> str:
    """Return what the device's allocator counted at most, where a log has it (LIVE of no tier)."""
    most: dict[str, int] = {}
    for event in measured.run.events:
        if event.what == What.LIVE.value and not event.tier:
            most[event.category] = max(event.n_bytes, most.get(event.category, 0))
    if not most:
        return ""
    said = ", ".join(f"{escape(name)} {size(n_bytes)}" for name, n_bytes in most.items())
    return paragraph(f"The device's allocator counted at most: {said}.")


def tier_figure(measured: Measured, line: Timeline) -> str:
    label = tier_label(line.tier, measured.meta.mode)
    rows = [
        [text(name), sized(line.at_row(line.peak_row)[name]), sized(max(column)), note(name)]
        for name, column in zip(line.categories, line.columns, strict=True)
        if any(column)
    ]
    total = [text("all"), sized(max(line.totals)), sized(max(line.totals)), text("")]
    heads = ("category", "at the tier's peak", "its own peak", "what it is")
    behind = numbers(
        f"{label} as tables", table(heads, rows, total=total) + by_step(measured, line)
    )
    chart = (
        f'<div class="chart" data-tier="{escape(line.tier)}" tabindex="0" role="img"'
        f' aria-label="{escape(label)} over time; its numbers are in the tables below"></div>'
    )
    return figure(label, chart, behind)


def note(category: str) -> Cell:
    return text(CATEGORY_NOTES.get(category, ""))


def by_step(measured: Measured, line: Timeline) -> str:
    """Return what a tier held at most in each step."""
    shown = [i for i, column in enumerate(line.columns) if any(column)]
    rows, row = [], 0
    for step in measured.steps.all:
        best, row = highest(line, row, step)
        cells = [sized(line.columns[i][best]) for i in shown]
        rows.append([text(step.number), sized(line.totals[best]), *cells])
    heads = ("step", "most", *(line.categories[i] for i in shown))
    return table(heads, rows, caption="At the most that each step held") if rows else ""


def highest(line: Timeline, row: int, step: StepTime) -> tuple[int, int]:
    """Return the row at which a tier held most in a step, and the row at which it ended."""
    best = row
    while row + 1 < len(line.times_ns) and line.times_ns[row + 1] < step.end_ns:
        row += 1
        if line.totals[row] > line.totals[best]:
            best = row
    return best, row


# -- 2 residency ---------------------------------------------------------------------------------


def residency(measured: Measured) -> str:
    if not measured.residency.stays:
        return paragraph(
            "No bucket came or went: everything that units needed was on HBM all the time, or this"
            " model is not managed. There is nothing to draw."
        )
    said = paragraph(
        "Each row is a bucket, in the order in which they first came up; a block is its stay on"
        " HBM. Click one, or press Enter, for its life story. With the keyboard: up and down change"
        " the row, left and right the stay."
    )
    meanings = (
        ("stay", "on HBM"),
        ("miss", "came as a miss; hatched while its copy was on its way"),
        ("ahead", "prefetched; hatched while its copy was on its way"),
        ("ink", "a unit computes with it"),
    )
    chart = (
        '<div class="gantt" tabindex="0" role="application" aria-describedby="said"'
        ' aria-label="Stays of buckets on HBM; arrow keys select, Enter tells the life story">'
        '<canvas></canvas><div class="pad"></div></div>'
        '<p class="said" id="said" aria-live="polite"></p>' + STORY
    )
    behind = numbers("Residency as tables", bucket_table(measured) + reason_table(measured))
    return said + figure("Stays on HBM", keys(meanings) + chart, behind)


STORY = (
    '<section class="story" id="story" tabindex="-1" hidden><h3></h3>'
    "<button type=button>Close</button><p class=soft></p>"
    '<div class="scroll" tabindex="0"><table><thead><tr><th>stay</th><th>came at</th>'
    "<th>how it came</th><th>how it went</th></tr></thead><tbody></tbody></table></div></section>"
)


def bucket_table(measured: Measured) -> str:
    rows = []
    for bucket in measured.residency.first_uses():
        counts, row = measured.counts[bucket], measured.meta.buckets[bucket]
        whole = (counts.accesses, counts.hits, counts.misses, counts.prefetches, counts.late)
        rows.append(
            [
                text(f"{unit_name(measured.meta, row.unit)} ({bucket})"),
                sized(row.n_bytes),
                *(number(value) for value in (*whole, counts.unused)),
                timed(counts.miss_wait_ns / NS),
                timed(counts.late_wait_ns / NS),
            ]
        )
    heads = ("bucket", "bytes", "accesses", "hits", "misses", "prefetches", "late", "unused")
    return table(
        (*heads, "waited for misses", "waited for prefetches"),
        rows,
        caption="Over all steady steps. Late: something stood still for it. Unused: gone before"
        " its first use.",
    )


def reason_table(measured: Measured) -> str:
    """Return how often buckets came and went for each reason, over the whole run."""
    tally: dict[tuple[str, str], list[int]] = {}
    for stay in measured.residency.stays:
        for way, why in (("came", stay.why_in), ("went", stay.why_out)):
            row = tally.setdefault((way, why), [0, 0])
            row[0] += 1
            row[1] += stay.n_bytes
    rows = [
        [text(way), text(why), text(REASONS.get(why, "")), number(count), sized(n_bytes)]
        for (way, why), (count, n_bytes) in sorted(tally.items(), key=lambda item: item[0])
    ]
    heads = ("", "code", "reason", "times", "bytes")
    return table(heads, rows, caption="Why, over the whole run")


# -- 3 lanes -------------------------------------------------------------------------------------


def lanes(measured: Measured) -> str:
    used = {e.lane for e in measured.run.events if e.what == "move"}
    if not used:
        return paragraph("Nothing moved between tiers in this run.")
    said = paragraph(
        f"Bytes per second, averaged over each {BINS}th of the run (of the typical step, where that"
        " alone is shown); at the dashed line is what a calibration measured of a lane alone, where"
        " there is one. Busy time is the union of a lane's moves."
    )
    charts = "".join(lane_figure(lane) for lane in LANE_LABELS if lane in used and lane != "update")
    return said + charts + numbers("Lanes as a table", lane_table(measured))


def lane_figure(lane: str) -> str:
    label = LANE_LABELS.get(lane, lane)
    return (
        f"<figure><h3>{escape(label)}</h3>"
        f'<div class="chart small" data-lane="{escape(lane)}" tabindex="0" role="img"'
        f' aria-label="{escape(label)}, rate over time; its numbers are in the table below"></div>'
        "</figure>"
    )


def lane_table(measured: Measured) -> str:
    if not measured.lanes or not measured.steady_count:
        return paragraph(NO_STEPS)
    rows = []
    for lane in measured.lanes:
        rate, ceiling = lane.bytes_per_second, lane.ceiling_bytes_per_second
        rows.append(
            [
                text(LANE_LABELS.get(lane.lane, lane.lane)),
                sized(measured.per_step(lane.n_bytes)),
                number(three(measured.per_step(lane.moves))),
                timed(measured.per_step(lane.busy_ns) / NS),
                number(format_share(lane.busy_share)),
                number(format_rate(rate) if rate else "not timed" if lane.n_bytes else "-"),
                number(format_rate(ceiling) if ceiling else "not measured"),
                number(format_share(rate / ceiling) if rate and ceiling else "-"),
            ]
        )
    heads = ("lane", "bytes a step", "moves a step", "busy a step", "busy", "while busy", "ceiling")
    return table((*heads, "of it"), rows, caption="Over steady steps")


# -- 4 where the time went -----------------------------------------------------------------------


def waterfall(measured: Measured) -> str:
    if not measured.parts:
        return paragraph(f"{NO_STEPS} A run that is cut off shows what came before only as bytes.")
    said = paragraph(
        "Every moment of a step belongs to one line, so that they add up to it exactly: standing"
        " still counts first (of waits inside one another the outer one), then units that compute,"
        " then the phase. The mean over steady steps."
    )
    at, rows = 0.0, []
    for part, ns in measured.parts.items():
        share = ns / measured.steady_ns
        seconds = measured.per_step(ns) / NS
        piece = Piece(at, share, f"part-{part}", f"{part_label(part)}: {format_seconds(seconds)}")
        cells = (timed(seconds), number(format_share(share)), Cell(bar([piece], 18)))
        rows.append([text(part_label(part)), *cells, text(PART_NOTES.get(part, ""))])
        at += share
    total = [
        text("a steady step"),
        timed(measured.step_seconds),
        number("100 %"),
        text(""),
        text(""),
    ]
    picture = table(("part", "time", "share", "", "what it is"), rows, total=total, style="water")
    behind = numbers("Each step as a table", step_table(measured))
    return said + f'<div class="wide">{picture}</div>' + behind


def step_table(measured: Measured) -> str:
    names = list(dict.fromkeys(part for step in measured.steps.all for part in step.parts))
    rows = [
        [
            text(f"{step.number}{' (warm-up)' if step.number in measured.steps.warmup else ''}"),
            number(f"{step.wall_ns:,}"),
            *(number(f"{step.parts.get(name, 0):,}") for name in names),
        ]
        for step in measured.steps.all
    ]
    heads = ("step", "wall", *(part_label(name) for name in names))
    return table(heads, rows, caption="Nanoseconds; the parts of a row add up to its wall exactly")


# -- 5 the peak ----------------------------------------------------------------------------------


def peaks(measured: Measured) -> str:
    said = paragraph(
        "What each tier held when it held most, by category and module. A module owns what the log"
        " can prove; bytes that were charged, and of which no module is known, are shown so."
    )
    return said + "".join(peak_figure(measured, peak) for peak in measured.peaks.values())


def peak_figure(measured: Measured, peak: Peak) -> str:
    line = measured.timelines[peak.tier]
    shown = [
        name for name, column in zip(line.categories, line.columns, strict=True) if any(column)
    ]
    colours = {name: f"cat-{peak.tier}-{i}" for i, name in enumerate(shown)}
    light = dict(zip(shown, map(is_light, shades(peak.tier, len(shown))), strict=True))
    leaves = [
        leaf_of(share, peak, colours[share.category], light[share.category])
        for share in peak.shares[:LEAVES]
    ]
    rest = peak.shares[LEAVES:]
    if rest:
        n_bytes = sum(share.n_bytes for share in rest)
        named = f"{len(rest)} smaller ones"
        leaves.append(Leaf(n_bytes, f"cat-{peak.tier}-0", named, format_bytes(n_bytes), False))
    label = tier_label(peak.tier, measured.meta.mode)
    seconds = (peak.t_ns - measured.begin_ns) / NS
    free = peak.free_bytes
    left = "" if free is None else f"; {size(free)} of the budget were free"
    said = f"{size(peak.n_bytes)} at {format_seconds(seconds)}{left}"
    legend = keys([(colours[name], name) for name in shown if name in peak.categories])
    picture = legend + treemap(leaves, f"{label} at its peak; the table below has its numbers")
    behind = numbers(f"{label} at its peak as a table", share_table(peak))
    return figure(f"{label} at its peak", picture, behind, said)


def leaf_of(share: Share, peak: Peak, colour: str, light: bool) -> Leaf:
    part = format_share(share.n_bytes / peak.n_bytes)
    detail = f"{share.category}, {format_bytes(share.n_bytes)} ({part})"
    if not share.module:
        detail = f"{format_bytes(share.n_bytes)} ({part}), {NOBODY}"
    label = share.module or share.category
    return Leaf(share.n_bytes, colour, label, detail, light)


NOBODY = "no module recorded"


def share_table(peak: Peak) -> str:
    rows = [
        [
            text(share.module or f"({NOBODY})"),
            text(share.category),
            sized(share.n_bytes),
            number(format_share(share.n_bytes / peak.n_bytes)),
        ]
        for share in peak.shares
    ]
    total = [text("all"), text(""), sized(peak.n_bytes), number("100 %")]
    unknown = paragraph(f"{size(peak.unattributed_bytes)} of it have no module.", "soft")
    return table(("module", "category", "bytes", "share"), rows, total=total) + unknown


# -- 6 traffic -----------------------------------------------------------------------------------


def traffic(measured: Measured) -> str:
    if not measured.ledger:
        return paragraph("Nothing moved in steady steps.")
    rows = [
        [
            text(LANE_LABELS.get(row.lane, row.lane)),
            text(row.category or UNATTRIBUTED),
            text(row.why),
            text(REASONS.get(row.why, "") if row.why else ""),
            number(three(measured.per_step(row.moves))),
            sized(measured.per_step(row.n_bytes)),
        ]
        for row in measured.ledger
    ]
    total = sum(row.n_bytes for row in measured.ledger)
    moves = three(measured.per_step(sum(row.moves for row in measured.ledger)))
    last = [text("all lanes"), *(text("") for _ in range(3)), number(moves)]
    heads = ("lane", "category", "code", "reason", "moves a step", "bytes a step")
    ledger = table(heads, rows, total=[*last, sized(measured.per_step(total))])
    said = paragraph("What lanes moved in a mean steady step, for whom and why.")
    return said + ledger + bound(measured) + wear(measured)


def bound(measured: Measured) -> str:
    """Return the least that parameters can cost, with its formula."""
    found, came = measured.bound, measured.per_step(measured.h2d_params())
    if not found.n_bytes:
        return ""
    again = refetches(measured)
    rows = [
        [text("came up on H2D"), sized(came), text("parameters, a step")],
        [
            text("the least possible"),
            sized(found.n_bytes),
            text("T + max(0, F - C) + max(0, B - C')"),
        ],
        [text("T"), sized(found.trainable_bytes), text("trainable, made stale by each update")],
        [text("F"), sized(found.frozen_bytes), text("frozen, or updated in place")],
        [text("B"), sized(found.backward_bytes), text("needed again in backward")],
        [text("C"), sized(found.forward_room_bytes), text("room for them when forward begins")],
        [text("C'"), sized(found.backward_room_bytes), text("room for them when backward begins")],
        [text("re-fetched"), sized(again), text("came up again within a step")],
    ]
    said = paragraph(
        f"Parameters came up <b>{came / found.n_bytes:.2f} times</b> the least that any policy "
        "could do with this budget. Room is the budget less what everything else took at that time,"
        " the most over steady steps."
    )
    return f"<h3>Against the least possible</h3>{said}{table(('', 'bytes', 'what it is'), rows)}"


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


def wear(measured: Measured) -> str:
    lane = measured.lane("write")
    if lane is None or not lane.n_bytes:
        return ""
    written = measured.per_step(lane.n_bytes)
    steps = RATED_TBW * 1e12 / written
    return paragraph(
        f"The disk takes {size(written)} of writes a step. A drive rated for {RATED_TBW} TB of"
        f" writes lasts {steps:,.0f} such steps ({RATED_TBW} TB / bytes a step; look up your"
        " drive's own rating)."
    )


# -- 7 and 8 what was planned --------------------------------------------------------------------


def whatif(beside: Beside) -> str:
    if not beside.whatif:
        return paragraph(
            "Not planned for this run: <code>hetero plan</code> writes <code>whatif.json</code>"
            " into a run's directory, and this view shows it."
        )
    rows = [
        [
            text(row.label),
            text("fits" if row.fits else "does not fit"),
            sized(row.peak_bytes),
            timed(row.step_seconds),
            text(row.change),
        ]
        for row in beside.whatif
    ]
    return table(("setting", "", "peak", "a step", "change"), rows)


def predicted(summary: Summary, beside: Beside) -> str:
    if not beside.predicted:
        return paragraph(
            "Not predicted: <code>hetero plan</code> writes <code>predicted.json</code> into a"
            " run's directory, and this view compares it with what was measured."
        )
    guesses, found = figures(beside.predicted), summary.figures()
    rows = [
        [text(key), figure_cell(key, guesses[key]), figure_cell(key, found[key]), number(error)]
        for key, error in compared(guesses, found)
    ]
    return table(("figure", "predicted", "measured", "error"), rows)


def compared(guesses: dict[str, float], found: dict[str, float]) -> Iterator[tuple[str, str]]:
    """Yield (key, error) of every figure that both have and that has a unit."""
    for key in found:
        if key in guesses and key.endswith(("_bytes", "_seconds", "_share", "per_second")):
            yield key, off(guesses[key], found[key]) if found[key] else "-"


def figure_cell(key: str, value: float) -> Cell:
    if key.endswith("_bytes"):
        return sized(value)
    if key.endswith("_seconds"):
        return timed(value)
    return number(format_rate(value) if key.endswith("per_second") else format_share(value))


# -- 9 provenance --------------------------------------------------------------------------------


def provenance(measured: Measured, beside: Beside) -> str:
    meta, run = measured.meta, measured.run
    rows = [
        ("kind", meta.kind),
        ("model", f"{meta.model}, {meta.n_params:,} parameters, {len(meta.units)} units"),
        ("device", meta.device),
        ("mode", f"{meta.mode}, updates {meta.update_place or '-'}"),
        ("precision", meta.precision),
        ("chunks", format_bytes(meta.chunk_bytes) if meta.chunk_bytes else "-"),
        ("hardware profile", f"{meta.profile or 'none'} {meta.profile_sha256[:16]}"),
        ("versions", ", ".join(f"{name} {value}" for name, value in meta.versions.items())),
        ("settings", ", ".join(f"{name}={value}" for name, value in meta.settings.items())),
        ("events", f"{len(run.events):,}, of schema {meta.schema}; {run.dropped:,} were lost"),
        ("log", f"sha256 {beside.digest}" if beside.digest else "not from a file"),
    ]
    said = paragraph(
        "All figures are computed from the log alone. Times are those of the launching thread's"
        " clock: on an asynchronous device a unit's compute is when it was launched, and copies and"
        " waits for them are when the device did them. What recording costs is not in the log."
    )
    return said + table(("", ""), [[text(name), text(value)] for name, value in rows])

"""The report on a console: at most 40 lines, plain ASCII unless a terminal (floor 4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hetero.report.advice import Advice, headline, verdict
from hetero.report.claims import ClaimVerdict
from hetero.report.measure import NS, Measured
from hetero.report.peaks import Peak
from hetero.report.views import by_place
from hetero.report.words import (
    LANE_LABELS,
    TERMINAL,
    format_rate,
    format_seconds,
    format_share,
    part_label,
    three,
    tier_label,
)
from hetero.types import format_bytes

BAR = 24  # characters of the longest bar
PARTS = 10  # rows of the time table
OWNERS = 3
EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True, slots=True)
class Style:
    """How things are drawn on a console."""

    plain: bool
    """Only ASCII."""

    @property
    def box(self) -> box.Box:
        return box.ASCII2 if self.plain else box.ROUNDED

    def bar(self, share: float) -> str:
        """Return a bar, `BAR` characters long for a share of one."""
        length = max(0.0, min(1.0, share)) * BAR
        if self.plain:
            return "#" * round(length)
        whole = int(length)
        return "█" * whole + EIGHTHS[int((length - whole) * 8)].strip()


def show(
    console: Console,
    measured: Measured,
    advice: Iterable[Advice],
    plain_seconds: float | None = None,
) -> None:
    """Print a report; ``plain_seconds`` is a step without hetero, if a plan says it."""
    style = Style(plain=not console.is_terminal)
    sentence = headline(measured, plain_seconds)
    for line in lines(measured, tuple(advice), style, sentence):
        console.print(line, highlight=False, soft_wrap=style.plain and not isinstance(line, Table))


def lines(
    measured: Measured, advice: tuple[Advice, ...], style: Style, sentence: str
) -> Iterator[RenderableType]:
    yield what_it_is(measured)
    yield Text(f"{sentence} {verdict(measured)}")
    yield tiers(measured, style)
    yield from places(measured)
    if measured.steps.steady:
        yield times(measured, style)
        yield from traffic(measured)
    yield from tries(advice)
    yield from doubts(measured)


def what_it_is(measured: Measured) -> Text:
    meta, steps = measured.meta, measured.steps
    of = f"{len(steps.all)} steps, {len(steps.steady)} of them steady"
    words = (meta.model, meta.device, meta.mode, meta.precision, of)
    said = Text("hetero report  ", style="bold")
    said.append("  ".join(word for word in words if word), style="not bold")
    if meta.kind != "measured":
        said.append(f"  [{meta.kind}]")
    return said


def tiers(measured: Measured, style: Style) -> Table:
    """Return the peak of each tier, and its moment."""
    table = Table(box=style.box)
    for name in ("tier", "peak", "budget", "used", "when", "most of it"):
        right = name in ("peak", "budget", "used")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for tier, peak in measured.peaks.items():
        label = Text(tier_label(tier, measured.meta.mode), style=TERMINAL.get(tier, ""))
        table.add_row(label, *tier_cells(peak))
    return table


def tier_cells(peak: Peak) -> tuple[str, ...]:
    budget = peak.budget_bytes
    owned = sorted(peak.categories.items(), key=lambda row: -row[1])[:OWNERS]
    phase = "optimizer" if peak.phase == "step" else peak.phase
    where = f"step {peak.step}, {phase}" if peak.step >= 0 else phase
    return (
        format_bytes(peak.n_bytes),
        "no limit" if budget is None else format_bytes(budget),
        format_share(peak.n_bytes / budget) if budget else "-",
        escape(where + (f", {peak.unit}" if peak.unit else "")),
        escape(", ".join(f"{name} {format_bytes(n)}" for name, n in owned)),
    )


def places(measured: Measured) -> Iterator[Text]:
    """Yield the lines of the program that made most of what lived before a backward."""
    found = measured.meta.allocations
    most = by_place(found)[:OWNERS]
    if most:
        said = ", ".join(f"{place.where} {format_bytes(place.n_bytes)}" for place in most)
        yield Text(f"Before backward, step {found.step} held {format_bytes(found.n_bytes)}: {said}")


def times(measured: Measured, style: Style) -> Table:
    """Return the parts of a mean steady step; their sum is its length."""
    table = Table(box=style.box)
    table.add_column(f"a steady step: {format_seconds(measured.step_seconds)}")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    table.add_column("", width=BAR)
    parts = measured.parts
    shown = sorted(parts, key=parts.__getitem__, reverse=True)[:PARTS]
    for part in (part for part in parts if part in shown):
        share = parts[part] / measured.steady_ns
        table.add_row(part_label(part), *part_cells(measured, parts[part]), style.bar(share))
    rest = sum(ns for part, ns in parts.items() if part not in shown)
    if rest:
        table.add_row("the others", *part_cells(measured, rest), "")
    return table


def part_cells(measured: Measured, ns: int) -> tuple[str, str]:
    return format_seconds(measured.per_step(ns) / NS), format_share(ns / measured.steady_ns)


def traffic(measured: Measured) -> Iterator[Text]:
    """Yield the bytes that a steady step moved, and how accesses found buckets."""
    moved = [lane for lane in measured.lanes if lane.n_bytes]
    said = (
        f"{LANE_LABELS.get(lane.lane, lane.lane)} {format_bytes(measured.per_step(lane.n_bytes))}"
        + (f" at {format_rate(lane.bytes_per_second)}" if lane.bytes_per_second else "")
        + f", busy {format_share(lane.busy_share)}"
        for lane in moved
    )
    if moved:
        yield Text("A step moves: " + "; ".join(said))
    counts = list(measured.counts.values())
    misses = measured.per_step(sum(row.misses for row in counts))
    if measured.residency.stays:
        ahead = measured.per_step(sum(row.prefetches for row in counts))
        least, came = measured.bound.n_bytes, measured.per_step(measured.h2d_params())
        ratio = f"; parameters came up {came / least:.2f} x the least possible" if least else ""
        yield Text(f"Fetches: {three(misses)} misses, {three(ahead)} prefetches a step{ratio}")


def tries(advice: tuple[Advice, ...]) -> Iterator[Text]:
    for number, each in enumerate(advice, 1):
        yield Text(f"Try {number}: {each.text}")
    if not advice:
        yield Text("Try nothing: no change of memory would gain 1 % of a step.")


def doubts(measured: Measured) -> Iterator[Text]:
    """Yield the reasons why the figures are weaker than they look."""
    warmup = ", ".join(map(str, measured.steps.warmup))
    if warmup:
        yield Text(f"Steady figures leave out warm-up steps {warmup}.", style="dim")
    if measured.run.dropped:
        yield Text(f"{measured.run.dropped} events were lost: figures may be low.", style="yellow")


def show_verdicts(console: Console, verdicts: Iterable[ClaimVerdict]) -> None:
    for verdict_ in verdicts:
        colour = "green" if verdict_.holds else "red"
        console.print(Text(str(verdict_), style=colour), soft_wrap=True)


def show_written(console: Console, paths: Iterable[str]) -> None:
    """Print the names of the files written, or how to get the page."""
    said = ", ".join(paths)
    hint = "The whole report: hetero report RUN -o report.html"
    console.print(Text(f"Wrote {said}" if said else hint, style="dim"), soft_wrap=True)

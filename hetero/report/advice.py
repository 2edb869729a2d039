"""Advice: changes to a run, with their gain in bytes or seconds of that run (floor 4).

The gain is at most the time that something waited for the cause that the change removes. Advice
that gains less than `WORTH` of a step is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hetero.events import Event, What
from hetero.report.measure import NS, Measured
from hetero.report.residency import Counts
from hetero.report.spans import flatten
from hetero.report.timing import span_of
from hetero.report.words import (
    WAITED_FOR,
    format_rate,
    format_seconds,
    format_share,
    part_label,
)
from hetero.types import format_bytes

WORTH = 0.01  # of a step
STATES = ("param", "grad", "master", "state")
ROOMY = 0.1  # of a budget
MOST = 3
SHORT_LIFE = 100_000  # steps


@dataclass(frozen=True, slots=True)
class Advice:
    """One change, the most it can gain, and its reason."""

    change: str
    """What to do, with its bytes."""
    gain_seconds: float
    """The most a steady step can gain; 0 if the gain is in bytes."""
    because: str
    """The figures of the run that support it."""

    @property
    def text(self) -> str:
        gain = (
            f": saves at most {format_seconds(self.gain_seconds)} a step"
            if self.gain_seconds
            else ""
        )
        return f"{self.change}{gain} ({self.because})"


Rule = Callable[[Measured], Iterator[Advice]]


def advise(measured: Measured) -> tuple[Advice, ...]:
    """Return at most three changes, the best first."""
    if not measured.steady_ns:
        return ()
    found = [advice for rule in RULES for advice in rule(measured)]
    least = WORTH * measured.step_seconds
    worth = [a for a in found if a.gain_seconds >= least or not a.gain_seconds]
    return tuple(sorted(worth, key=lambda a: -a.gain_seconds)[:MOST])


def headline(measured: Measured, plain_seconds: float | None = None) -> str:
    """Return the sentence to send: what trained in how much memory, and how fast.

    ``plain_seconds`` is what the step takes without hetero, if a plan says it.
    """
    hbm, meta = measured.peaks.get("HBM"), measured.meta
    if hbm is None:
        return f"{meta.model or 'A model'}: the log does not say what was on the device."
    held, states = format_bytes(hbm.n_bytes), meta.state_bytes
    if not states:  # a model that is not managed, or a recording of an earlier version
        below = [peak for tier, peak in measured.peaks.items() if tier != "HBM"] or [hbm]
        states = sum(peak.categories.get(kind, 0) for peak in below for kind in STATES)
    does = "train" if meta.kind == "predicted" else "trained"
    said = f"{format_bytes(states)} of states {does} in {held} of HBM"
    if meta.mode == "plain":
        said = f"{held} of HBM held {format_bytes(states)} of states and all else"
    speed, seconds = measured.tokens_per_second, measured.step_seconds
    if speed is not None:
        said += f", {speed:,.0f} tokens/s"
    if plain_seconds and seconds:
        more = 100 * (seconds / plain_seconds - 1)
        said += f", {abs(more):.0f} % {'slower' if more >= 0 else 'faster'} than without hetero"
    return f"{said}."


def verdict(measured: Measured) -> str:
    """Return how a steady step spends its time, in one sentence."""
    parts = measured.parts
    if not parts:
        return "No complete step was recorded: only bytes can be shown, no times of steps."
    step_ns = measured.steady_ns
    waits = {part: ns for part, ns in parts.items() if part.startswith("wait_")}
    compute = sum(ns for part, ns in parts.items() if part.startswith("compute_")) / step_ns
    waited = sum(waits.values()) / step_ns
    rest = f"{format_share(1 - compute - waited)} lies outside units."
    said = f"A steady step takes {format_seconds(measured.step_seconds)}:"
    said += f" units compute for {format_share(compute)} of it,"
    if waited < WORTH:
        return f"{said} less than 1 % is spent waiting (nothing to gain there), and {rest}"
    worst = max(waits, key=waits.__getitem__)
    most = f"{WAITED_FOR.get(worst, part_label(worst))} ({format_share(waits[worst] / step_ns)})"
    return f"{said} {format_share(waited)} is spent waiting, mostly for {most}, and {rest}"


def mean_seconds(measured: Measured, ns: float) -> float:
    return measured.per_step(ns) / NS


# -- rules ---------------------------------------------------------------------------------------


def keep_more(measured: Measured) -> Iterator[Advice]:
    """More HBM keeps the units whose fetches make compute wait longest, and saves these fetches.

    A trainable bucket is fetched once a step in any case (its update made it stale): only further
    fetches can be saved, with their share of its waits.
    """
    waiting = sorted(savings(measured), key=lambda row: -row[1])
    total_ns = sum(ns for _, ns in waiting)
    chosen: list[int] = []
    gain_ns = 0.0
    for bucket, ns in waiting:
        if gain_ns >= 0.8 * total_ns:
            break
        chosen.append(bucket)
        gain_ns += ns
    if chosen:
        n_bytes = sum(measured.meta.buckets[bucket].n_bytes for bucket in chosen)
        many = f"{len(chosen)} more unit{'s' * (len(chosen) > 1)}"
        yield Advice(
            f"hbm= +{format_bytes(n_bytes)} keeps {many} between forward and backward",
            mean_seconds(measured, gain_ns),
            f"their re-fetches are exposed {format_seconds(mean_seconds(measured, gain_ns))}",
        )


def savings(measured: Measured) -> Iterator[tuple[int, float]]:
    """Yield (bucket, exposed nanoseconds of the fetches that residence would save)."""
    for bucket, counts in measured.counts.items():
        row = measured.meta.buckets[bucket]
        stale = row.trainable and measured.meta.update_place.startswith("home")
        fetches, needed = counts.misses + counts.prefetches, measured.steady_count * stale
        if fetches > needed and waited(counts):
            yield bucket, waited(counts) * (fetches - needed) / fetches


def waited(counts: Counts) -> int:
    return counts.miss_wait_ns + counts.late_wait_ns


def states_in_ram(measured: Measured) -> Iterator[Advice]:
    """Optimizer states on disk make updates wait for reads and writes."""
    nvme = measured.timelines.get("NVME")
    peak_bytes = max(nvme.column("state"), default=0) if nvme is not None else 0
    lanes = [lane for name in ("read", "write") if (lane := measured.lane(name))]
    moved = sum(row.n_bytes for row in measured.ledger if row.lane in ("read", "write"))
    if not (peak_bytes and moved):
        return
    parts = measured.parts
    gain_ns = sum(parts.get(f"wait_{why}", 0) for why in ("update", "read", "write"))
    busy = ", ".join(f"{lane.lane} busy {format_share(lane.busy_share)}" for lane in lanes)
    yield Advice(
        f"host= +{format_bytes(peak_bytes)} keeps the optimizer's states off the disk",
        mean_seconds(measured, gain_ns),
        f"{format_bytes(measured.per_step(moved))} of disk traffic a step; {busy}",
    )


def fewer_updates(measured: Measured) -> Iterator[Advice]:
    """Exposed updates cost less per sample if a step accumulates several batches."""
    wait_ns = measured.parts.get("wait_update", 0)
    if wait_ns:
        half = mean_seconds(measured, wait_ns) / 2
        yield Advice(
            "sum two batches before each optimizer.step(): half the updates per sample",
            half,
            f"updates are exposed {format_seconds(2 * half)} a step",
        )


def keep_activations(measured: Measured) -> Iterator[Advice]:
    """Offloaded activations can stay on HBM if it grows by their bytes in the tiers below."""
    rows = [row for row in measured.ledger if row.category == "activation"]
    moved = sum(row.n_bytes for row in rows if row.lane in ("h2d", "d2h"))
    lines = [line for tier, line in measured.timelines.items() if tier != "HBM"]
    below = sum(max(line.column("activation"), default=0) for line in lines)
    wait_ns = activation_waits(measured)
    if moved and below and wait_ns:
        yield Advice(
            f"hbm= +{format_bytes(below)} with activations='keep' keeps them on HBM",
            mean_seconds(measured, wait_ns),
            f"{format_bytes(measured.per_step(moved))} of activations cross the link a step",
        )


def activation_waits(measured: Measured) -> int:
    """Return how long steady steps waited for activations; outermost waits only."""
    waits = [e for e in measured.run.events if e.what == What.WAIT.value]
    spans = flatten(span_of(e, e.category) for e in waits if steady(measured, e))
    return sum(span.dur_ns for span in spans if span.label == "activation")


def steady(measured: Measured, event: Event) -> bool:
    return measured.steps.begin_ns <= event.t_ns < measured.steps.end_ns


def slow_link(measured: Measured) -> Iterator[Advice]:
    """A lane is far below its ceiling while something waits for it."""
    for lane in measured.lanes:
        rate, ceiling = lane.bytes_per_second, lane.ceiling_bytes_per_second
        wait_ns = measured.parts.get(f"wait_{lane.lane}", 0)
        if rate and ceiling and wait_ns and rate < 0.7 * ceiling:
            yield Advice(
                f"larger chunk_bytes= may bring {lane.lane} to its measured {format_rate(ceiling)}",
                mean_seconds(measured, wait_ns) * (1 - rate / ceiling),
                f"it reaches {format_rate(rate)} in moves of"
                f" {format_bytes(lane.n_bytes / lane.moves)}",
            )


def outside(measured: Measured) -> Iterator[Advice]:
    """Time outside forward, backward and step; a plan loads no data."""
    idle_ns = measured.parts.get("between", 0)
    if measured.meta.kind != "predicted" and idle_ns > 0.05 * measured.steady_ns:
        yield Advice(
            "prepare the next batch while a step runs (data loading, logging)",
            mean_seconds(measured, idle_ns),
            "spent between forward, backward and step",
        )


def spare_budget(measured: Measured) -> Iterator[Advice]:
    """A budget that is never used up can be lowered, or filled by a larger batch."""
    peak = measured.peaks.get("HBM")
    free = peak.free_bytes if peak is not None else None
    if peak is None or free is None or free < ROOMY * (peak.budget_bytes or 0):
        return
    held = sum(n for name, n in peak.categories.items() if name.startswith("activation"))
    more = f", or a batch up to {1 + free / held:.2f} x as large" if held else ""
    yield Advice(
        f"hbm= can be {format_bytes(free)} lower{more}",
        0.0,
        f"the peak leaves {format_share(free / (peak.budget_bytes or 1))} of the budget unused",
    )


def wear(measured: Measured) -> Iterator[Advice]:
    """Writes wear out a drive."""
    life, lane = measured.drive_life, measured.lane("write")
    if life is not None and lane is not None and life.steps < SHORT_LIFE:
        yield Advice(
            f"mind the drive: {life.rated} last {life.steps:,.0f} steps",
            0.0,
            f"{format_bytes(measured.per_step(lane.n_bytes))} are written a step",
        )


RULES: tuple[Rule, ...] = (
    keep_more,
    states_in_ram,
    fewer_updates,
    keep_activations,
    slow_link,
    outside,
    spare_budget,
    wear,
)

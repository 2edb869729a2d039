"""Timelines of the tiers: step functions of LEVEL and LIVE events, and their peaks.

A tier holds the sum of its categories' levels, which is the ledger's own number. If the bytes that
graphs hold (LIVE) are fewer than those reserved for them (LEVEL), the category is shown as two,
held and reserved, whose sum is its level.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetero.events import Event, What
from hetero.report.words import CATEGORIES, UNATTRIBUTED

RESERVED = " reserved"
COLUMNS = 1000  # of a reduced timeline; each keeps its first, lowest, highest and last point
EXACT = 2000  # points that are kept around the peak


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bytes of a tier by category, from each of ``times_ns`` until the next one."""

    tier: str
    categories: tuple[str, ...]
    times_ns: tuple[int, ...]
    columns: tuple[tuple[int, ...], ...]
    """By category: bytes from each time on."""
    totals: tuple[int, ...]
    seqs: tuple[int, ...]
    """By row: the event that made it."""
    excess_bytes: int = 0
    """The most by which LIVE ever exceeded the level of its category."""

    def at_row(self, row: int) -> dict[str, int]:
        """Return bytes by category from a row's time on."""
        return {
            name: column[row] for name, column in zip(self.categories, self.columns, strict=True)
        }

    def column(self, category: str) -> tuple[int, ...]:
        """Return a category's bytes at each time; zeros where the tier has none."""
        if category not in self.categories:
            return (0,) * len(self.times_ns)
        return self.columns[self.categories.index(category)]

    @property
    def peak_row(self) -> int:
        """The first row at which the tier held most."""
        return self.totals.index(max(self.totals))

    def keep(self, rows: Iterable[int]) -> Timeline:
        chosen = sorted(set(rows))
        return Timeline(
            self.tier,
            self.categories,
            tuple(self.times_ns[i] for i in chosen),
            tuple(tuple(column[i] for i in chosen) for column in self.columns),
            tuple(self.totals[i] for i in chosen),
            tuple(self.seqs[i] for i in chosen),
            self.excess_bytes,
        )


def timelines(events: Sequence[Event]) -> dict[str, Timeline]:
    """Return the timeline of each tier that was ever charged, by tier."""
    rows = [e for e in events if e.what in (What.LEVEL.value, What.LIVE.value)]
    tiers = sorted({e.tier for e in rows if e.what == What.LEVEL.value and e.n_bytes})
    return {tier: timeline(tier, [e for e in rows if e.tier == tier]) for tier in tiers}


def timeline(tier: str, rows: Sequence[Event]) -> Timeline:
    """Return a tier's timeline from its LEVEL and LIVE events, which are in order."""
    live = {e.category for e in rows if e.what == What.LIVE.value}
    names = order({e.category for e in rows} | {name + RESERVED for name in live})
    levels, held = dict.fromkeys(names, 0), dict.fromkeys(live, 0)
    times: list[int] = []
    table: list[list[int]] = []
    excess_bytes = 0
    for event in rows:
        if event.what == What.LIVE.value:
            held[event.category] = event.n_bytes
            excess_bytes = max(excess_bytes, event.n_bytes - levels[event.category])
        else:
            levels[event.category] = event.n_bytes
        times.append(event.t_ns)
        table.append(bands(levels, held, names))
    columns = tuple(tuple(column) for column in zip(*table, strict=True))
    shown = tuple(name or UNATTRIBUTED for name in names)
    totals = tuple(sum(row) for row in table)
    seqs = tuple(event.seq for event in rows)
    return Timeline(tier, shown, tuple(times), columns, totals, seqs, excess_bytes)


def bands(levels: dict[str, int], held: dict[str, int], names: Sequence[str]) -> list[int]:
    """Return the bytes shown under each name: a category with LIVE is split in two."""
    shown = dict(levels)
    for name, n_bytes in held.items():
        shown[name] = min(n_bytes, levels[name])
        shown[name + RESERVED] = levels[name] - shown[name]
    return [shown[name] for name in names]


def order(names: Iterable[str]) -> list[str]:
    """Return categories in stacking order: known ones first, the one without a name last."""
    known = {name: i for i, name in enumerate(CATEGORIES)}
    last = {"": 2, UNATTRIBUTED: 1}
    return sorted(names, key=lambda name: (last.get(name, 0), known.get(name, 99), name))


def reduced(line: Timeline, exact: Sequence[tuple[int, int]] = ()) -> Timeline:
    """Return a timeline that looks the same at `COLUMNS` pixels, and is exact around its peak.

    M4: each column of equal time keeps its first, lowest, highest and last point. ``exact`` are
    further windows (begin, end), of which at most `EXACT` points each stay unchanged.
    """
    if len(line.times_ns) <= 4 * COLUMNS:
        return line
    peak = line.peak_row
    rows = set(range(max(0, peak - EXACT // 2), min(len(line.times_ns), peak + EXACT // 2)))
    for begin_ns, end_ns in exact:
        first, last = (bisect_right(line.times_ns, t_ns) for t_ns in (begin_ns, end_ns))
        rows.update(range(first, min(last, first + EXACT)))
    return line.keep(rows | m4(line.times_ns, line.totals))


def m4(times_ns: Sequence[int], values: Sequence[int]) -> set[int]:
    """Return the rows that draw the same line at `COLUMNS` pixels."""
    begin_ns, span_ns = times_ns[0], max(1, times_ns[-1] - times_ns[0] + 1)
    pixels: dict[int, list[int]] = {}
    for row, t_ns in enumerate(times_ns):
        pixels.setdefault((t_ns - begin_ns) * COLUMNS // span_ns, []).append(row)
    kept: set[int] = set()
    for rows in pixels.values():
        kept |= {rows[0], rows[-1], min(rows, key=values.__getitem__)}
        kept.add(max(rows, key=values.__getitem__))
    return kept

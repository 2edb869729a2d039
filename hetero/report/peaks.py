"""The peak of each tier: its moment, and its bytes by category and by module.

The log proves four owners: the module of a bucket's replica (ALLOC, FREE), the module of a
parameter, or of a gradient, master or state, if all of its kind lie in the tier, and the module
during whose access LIVE grew. The rest of a category is shown without a module.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero.events import Event, What
from hetero.report.levels import RESERVED, Timeline
from hetero.report.residency import Residency
from hetero.report.run import Allocations, Meta
from hetero.report.timing import Steps

HOMES = ("grad", "master", "state")
ACTIVATION = "activation"


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes of a peak, by category and, if known, by module."""

    category: str
    module: str
    """Empty: the log does not say."""
    n_bytes: int
    where: str = ""
    """Lines of the program that made them, where no module did."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment at which a tier held the most."""

    tier: str
    n_bytes: int
    t_ns: int
    step: int
    phase: str
    unit: str
    """The unit being computed; empty if there was none."""
    categories: dict[str, int]
    """Their sum is ``n_bytes``."""
    shares: tuple[Share, ...]
    """Their sum is ``n_bytes``; the largest first."""
    budget_bytes: int | None

    @property
    def unattributed_bytes(self) -> int:
        """Bytes without a known module."""
        return sum(share.n_bytes for share in self.shares if not share.module)

    @property
    def free_bytes(self) -> int | None:
        return None if self.budget_bytes is None else self.budget_bytes - self.n_bytes


def peak_of(
    line: Timeline, events: Sequence[Event], meta: Meta, residency: Residency, steps: Steps
) -> Peak:
    """Return a tier's first moment of most bytes, with its owners."""
    row = line.peak_row
    t_ns = line.times_ns[row]
    found = steps.at(t_ns)
    categories = {name: n for name, n in line.at_row(row).items() if n}
    owned = owners(line.tier, events, meta, line.seqs[row])
    return Peak(
        line.tier,
        line.totals[row],
        t_ns,
        step=found.number if found else -1,
        phase=phase_at(events, t_ns),
        unit=unit_at(residency, meta, t_ns),
        categories=categories,
        shares=tuple(by_lines(shares_of(categories, owned), meta, line.tier)),
        budget_bytes=meta.budgets.get(line.tier),
    )


def phase_at(events: Sequence[Event], t_ns: int) -> str:
    """Return the phase at a time; ``between`` outside all phases."""
    spans = (e for e in events if e.what == What.PHASE.value)
    inside = [e.why for e in spans if e.t_ns <= t_ns < e.t_ns + e.dur_ns]
    return inside[0] if inside else "between"


def unit_at(residency: Residency, meta: Meta, t_ns: int) -> str:
    """Return the innermost unit being computed at a time."""
    here = [a for a in residency.accesses if a.begin_ns <= t_ns < a.end_ns]
    return unit_name(meta, max(here, key=lambda a: a.begin_ns).unit) if here else ""


def unit_name(meta: Meta, unit: int) -> str:
    """Return a unit's name; the unit without one is the model itself."""
    return (meta.units[unit] or meta.model) if 0 <= unit < len(meta.units) else ""


def owners(tier: str, events: Sequence[Event], meta: Meta, seq: int) -> dict[tuple[str, str], int]:
    """Return bytes by (category, module) after an event, as far as the log knows the module."""
    owned: dict[tuple[str, str], int] = {}
    for module, n_bytes in parameters(tier, events, meta, seq):
        owned["param", module] = owned.get(("param", module), 0) + n_bytes
    for bucket in meta.buckets:
        for kind, n_bytes in bucket.kinds.items():
            home = kind, unit_name(meta, bucket.unit)
            owned[home] = owned.get(home, 0) + n_bytes
    live = [e for e in events if e.what == What.LIVE.value and e.tier == tier and e.seq <= seq]
    for unit, n_bytes in held_by(live).items():
        owned["activation", unit_name(meta, unit)] = n_bytes
    return owned


def parameters(tier: str, events: Sequence[Event], meta: Meta, seq: int) -> list[tuple[str, int]]:
    """Return (module, bytes): replicas on HBM; else all parameters, if the tier may hold them."""
    if tier == "HBM" and any(e.what == What.ALLOC.value for e in events):
        held = replicas_of(events, seq)
        rows = [(meta.buckets[b].unit, n) for b, n in held.items() if 0 <= b < len(meta.buckets)]
    else:
        rows = [(bucket.unit, bucket.moved_bytes) for bucket in meta.buckets]
    return [(unit_name(meta, unit), n_bytes) for unit, n_bytes in rows]


def replicas_of(events: Sequence[Event], seq: int) -> dict[int, int]:
    """Return the bytes of each replica, by bucket, that HBM is charged for after an event.

    A replica is logged after its charge and before its credit, by the thread that does all three,
    while others log what they do. So what comes between two charges of replicas belongs to the
    first if it is an ALLOC, and to the second if it is a FREE.
    """
    levels = [
        e.seq for e in events
        if (e.what, e.tier, e.category) == (What.LEVEL.value, "HBM", "param")
    ]  # fmt: skip
    since = max((level for level in levels if level <= seq), default=-1)
    until = min((level for level in levels if level > seq), default=math.inf)
    held: dict[int, int] = {}
    for event in sorted(events, key=lambda e: e.seq):
        if event.what == What.ALLOC.value and event.seq < until:
            held[event.bucket] = event.n_bytes
        elif event.what == What.FREE.value and event.seq < since:
            held.pop(event.bucket, None)
    return held


def held_by(live: Sequence[Event]) -> dict[int, int]:
    """Return the activation bytes that each unit still holds, from LIVE after each access.

    Growth belongs to the unit itself. Shrinkage is taken from the unit itself first (its backward
    is done), then from the latest units.
    """
    held: dict[int, int] = {}
    before = 0
    for event in live:
        grown, before = event.n_bytes - before, event.n_bytes
        if grown >= 0:
            held[event.unit] = held.pop(event.unit, 0) + grown
        else:
            release(held, event.unit, -grown)
    return held


def release(held: dict[int, int], unit: int, n_bytes: int) -> None:
    for owner in (unit, *reversed([key for key in held if key != unit])):
        gone = min(n_bytes, held.get(owner, 0))
        n_bytes -= gone
        if gone:
            held[owner] -= gone
        if not n_bytes:
            return


def by_lines(shares: Sequence[Share], meta: Meta, tier: str) -> list[Share]:
    """Return the shares, with those of no module by the lines that made them, as far as known.

    The room that is reserved for activations on HBM is divided as the recorded step filled it, if
    all of that fits.
    """
    found = []
    held = {share.module: share.n_bytes for share in shares if share.category == ACTIVATION}
    for share in shares:
        made = meta.made_at_peak.get(share.category, {}) if not share.module else {}
        here = tier in meta.budgets and sum(made.values()) <= share.n_bytes
        known = made if here else {}
        parts = [Share(share.category, "", n, where) for where, n in known.items()]
        if share.category == ACTIVATION + RESERVED and tier == "HBM":
            parts = room_of(share, meta.allocations, held)
        found += parts
        left = share.n_bytes - sum(part.n_bytes for part in parts)
        found += [Share(share.category, share.module, left)] if left else []
    return sorted(found, key=lambda s: (-s.n_bytes, s.category, s.module, s.where))


def room_of(share: Share, made: Allocations, held: Mapping[str, int]) -> list[Share]:
    """Return a room by the modules, and the lines outside of them, that fill it in a step; empty if
    it is smaller than they are: on a CPU it is the model's alone.

    Bytes that modules hold at the peak, which are no part of the room, are taken from theirs.
    """
    rows = Counter[tuple[str, str]]()
    for row in made.rows:
        rows[row.module, "" if row.module else row.where] += row.n_bytes
    for unit, n_bytes in held.items():
        for owner in rows:
            if owner[0] == unit or owner[0].startswith(f"{unit}."):
                gone = min(n_bytes, rows[owner])
                n_bytes -= gone
                rows[owner] -= gone
    if rows.total() > share.n_bytes:
        return []
    return [Share(share.category, module, n, where) for (module, where), n in rows.items() if n]


def shares_of(categories: dict[str, int], owned: dict[tuple[str, str], int]) -> tuple[Share, ...]:
    """Return a peak's categories by module; the rest of each has no module.

    If owners claim more than a category has (a tier with only some parameters), none is named.
    """
    shares = []
    for category, n_bytes in categories.items():
        claims = {m: n for (c, m), n in owned.items() if c == category and m and n}
        if sum(claims.values()) > n_bytes:
            claims = {}
        elif category in HOMES and sum(claims.values()) < n_bytes:
            claims = {}  # other homes are there, too: which ones, the log does not say
        shares += [Share(category, module, n) for module, n in claims.items()]
        shares.append(Share(category, "", n_bytes - sum(claims.values())))
    found = [share for share in shares if share.n_bytes]
    return tuple(sorted(found, key=lambda s: (-s.n_bytes, s.category, s.module)))

"""When each tier held most, and what that was: by category and by module.

A module owns what the log can prove: its buckets' replicas (ALLOC, FREE), its parameters where all
of them lie in that tier, and the activations by which LIVE grew when it was done. What remains of a
category has no module and is shown as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.events import Event, What
from hetero.report.levels import Timeline
from hetero.report.residency import Residency
from hetero.report.run import Meta
from hetero.report.timing import Steps


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes of a peak: of a category, and of a module where it is known."""

    category: str
    module: str
    """Empty: nobody recorded whose they are."""
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment at which a tier held most."""

    tier: str
    n_bytes: int
    t_ns: int
    step: int
    phase: str
    unit: str
    """Computing at that time; empty where none did."""
    categories: dict[str, int]
    """They add up to ``n_bytes``."""
    shares: tuple[Share, ...]
    """They add up to ``n_bytes``, the largest first."""
    budget_bytes: int | None

    @property
    def unattributed_bytes(self) -> int:
        """Bytes of which no module is known."""
        return sum(share.n_bytes for share in self.shares if not share.module)

    @property
    def free_bytes(self) -> int | None:
        """What the budget had left."""
        return None if self.budget_bytes is None else self.budget_bytes - self.n_bytes


def peak_of(
    line: Timeline, events: Sequence[Event], meta: Meta, residency: Residency, steps: Steps
) -> Peak:
    """Return a tier's first moment of most bytes, and whose they were."""
    row = line.peak_row
    t_ns = line.times_ns[row]
    found = steps.at(t_ns)
    categories = {name: n for name, n in line.at_row(row).items() if n}
    # replicas are noted just after they are charged: ask in the middle of the plateau
    until_ns = line.times_ns[row + 1] if row + 1 < len(line.times_ns) else t_ns
    owned = owners(line.tier, events, meta, residency, (t_ns + until_ns) // 2)
    return Peak(
        line.tier,
        line.totals[row],
        t_ns,
        step=found.number if found else -1,
        phase=phase_at(events, t_ns),
        unit=unit_at(residency, meta, t_ns),
        categories=categories,
        shares=shares_of(categories, owned),
        budget_bytes=meta.budgets.get(line.tier),
    )


def phase_at(events: Sequence[Event], t_ns: int) -> str:
    """Return the phase in which a time lies; between where it lies in none."""
    spans = (e for e in events if e.what == What.PHASE.value)
    inside = [e.why for e in spans if e.t_ns <= t_ns < e.t_ns + e.dur_ns]
    return inside[0] if inside else "between"


def unit_at(residency: Residency, meta: Meta, t_ns: int) -> str:
    """Return the innermost unit that computes at a time."""
    here = [a for a in residency.accesses if a.begin_ns <= t_ns < a.end_ns]
    return unit_name(meta, max(here, key=lambda a: a.begin_ns).unit) if here else ""


def unit_name(meta: Meta, unit: int) -> str:
    """Return a unit's name; the model itself is the unit without one."""
    return (meta.units[unit] or meta.model) if 0 <= unit < len(meta.units) else ""


def owners(
    tier: str, events: Sequence[Event], meta: Meta, residency: Residency, t_ns: int
) -> dict[tuple[str, str], int]:
    """Return bytes by (category, module), as far as the log says whose they are."""
    owned: dict[tuple[str, str], int] = {}
    for module, n_bytes in parameters(tier, meta, residency, t_ns):
        owned["param", module] = owned.get(("param", module), 0) + n_bytes
    live = [e for e in events if e.what == What.LIVE.value and e.tier == tier and e.t_ns <= t_ns]
    for unit, n_bytes in held_by(live).items():
        owned["activation", unit_name(meta, unit)] = n_bytes
    return owned


def parameters(tier: str, meta: Meta, residency: Residency, t_ns: int) -> list[tuple[str, int]]:
    """Return (module, bytes): replicas on HBM; else all parameters, if the tier may hold them."""
    if tier == "HBM" and residency.stays:
        stays = residency.at(t_ns)
        rows = [(meta.buckets[s.bucket].unit, s.n_bytes) for s in stays if s.bucket >= 0]
    else:
        rows = [(bucket.unit, bucket.moved_bytes) for bucket in meta.buckets]
    return [(unit_name(meta, unit), n_bytes) for unit, n_bytes in rows]


def held_by(live: Sequence[Event]) -> dict[int, int]:
    """Return the activations that units left, as LIVE counted them after each.

    What a unit's forward adds is its own. What goes is the unit's own first (its backward is
    done), and then that of the units that came last.
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


def shares_of(categories: dict[str, int], owned: dict[tuple[str, str], int]) -> tuple[Share, ...]:
    """Return a peak's categories by module; what is left of one has no module.

    Where owners claim more than a category has (a tier that holds only some parameters), the log
    does not say whose it is, and nobody is named.
    """
    shares = []
    for category, n_bytes in categories.items():
        claims = {m: n for (c, m), n in owned.items() if c == category and m and n}
        if sum(claims.values()) > n_bytes:
            claims = {}
        shares += [Share(category, module, n) for module, n in claims.items()]
        shares.append(Share(category, "", n_bytes - sum(claims.values())))
    found = [share for share in shares if share.n_bytes]
    return tuple(sorted(found, key=lambda s: (-s.n_bytes, s.category, s.module)))

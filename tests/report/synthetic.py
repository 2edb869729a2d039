"""Logs that look like a paged run's, of any length, without a run."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from hetero.events import Event
from hetero.report.run import BucketMeta, Meta, Run

KIB = 1024


@dataclass
class Writer:
    """Writes events one after the other on a clock of its own."""

    t_ns: int = 1_000_000
    step: int = 0
    phase: str = "init"
    access: int = -1
    events: list[Event] = field(default_factory=list)
    levels: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(
        self,
        what: str,
        *,
        t_ns: int | None = None,
        dur_ns: int = 0,
        lane: str = "",
        tier: str = "",
        unit: int = -1,
        bucket: int = -1,
        n_bytes: int = 0,
        category: str = "",
        why: str = "",
        seq: int | None = None,
    ) -> int:
        """Append an event at the clock's time, or at another; returns its seq."""
        seq = len(self.events) if seq is None else seq
        at = (seq, self.t_ns if t_ns is None else t_ns, dur_ns, what, self.step, self.phase)
        row = (lane, tier, unit, bucket, n_bytes, category, why, self.access)
        self.events.append(Event(*at, *row))
        return seq

    def charge(self, tier: str, category: str, n_bytes: int) -> None:
        self.levels[tier, category] += n_bytes
        total = self.levels[tier, category]
        self.add("level", tier=tier, category=category, n_bytes=total)


def meta_of(units: int, n_bytes: int = 64 * KIB) -> Meta:
    return Meta(
        model="Synthetic",
        n_params=units * n_bytes // 4,
        device="cpu:sim",
        mode="paged",
        update_place="home",
        precision="fp32",
        budgets={"HBM": 4 * n_bytes + 300 * KIB, "HOST": None},
        units=[f"blocks.{i}" for i in range(units)],
        buckets=[BucketMeta(i, n_bytes, n_bytes // 4, True) for i in range(units)],
        ceilings={"h2d": 1e9},
    )


def paged(steps: int, units: int = 8, seed: int = 0) -> Run:
    """Return a run in which each unit is fetched, used and evicted, forward and backward."""
    rng, meta = random.Random(seed), meta_of(units)
    log = Writer()
    log.charge("HOST", "param", sum(bucket.n_bytes for bucket in meta.buckets))
    log.charge("HOST", "state", 2 * log.levels["HOST", "param"])
    log.charge("HBM", "activation", 200 * KIB)
    for step in range(steps):
        log.step = step
        one_step(log, rng, meta, units)
    return Run.of(meta, log.events)


def one_step(log: Writer, rng: random.Random, meta: Meta, units: int) -> None:
    began_ns = log.t_ns
    for phase, order in (("forward", range(units)), ("backward", range(units - 1, -1, -1))):
        log.phase, phase_ns = phase, log.t_ns
        for unit in order:
            one_access(log, rng, meta, unit)
        log.add("phase", t_ns=phase_ns, dur_ns=log.t_ns - phase_ns, why=phase)
    log.phase, phase_ns = "step", log.t_ns
    for unit in range(units):
        length = rng.randrange(1, 90_000)
        log.add("update", dur_ns=length, lane="update", bucket=unit, why="step")
        log.t_ns += length // 4
    log.add("wait", dur_ns=20_000, why="update")
    log.t_ns += 30_000
    log.add("phase", t_ns=phase_ns, dur_ns=log.t_ns - phase_ns, why="step")
    log.add("step", t_ns=began_ns, dur_ns=log.t_ns - began_ns)
    log.phase = "between"


def one_access(log: Writer, rng: random.Random, meta: Meta, unit: int) -> None:
    """A unit is fetched, by the plan or on demand, computes, and goes."""
    n_bytes, began_ns = meta.buckets[unit].n_bytes, log.t_ns
    planned = log.step > 1 and rng.random() < 0.5
    why = "plan" if planned else {"forward": "F", "backward": "B"}[log.phase]
    fetch = {"lane": "h2d", "bucket": unit, "n_bytes": n_bytes, "category": "param", "why": why}
    replica = {"tier": "HBM", "bucket": unit, "n_bytes": n_bytes, "category": "param"}
    seq = log.access = log.add("decision", why="begin")  # its place is taken by the access
    log.charge("HBM", "param", n_bytes)
    log.add("alloc", **replica, why=why)
    length = rng.randrange(1_000, 60_000)
    log.add("move", dur_ns=length, **fetch)
    if planned:
        log.t_ns += length // 2
        began_ns = log.t_ns
    log.add("wait", dur_ns=length // 2, bucket=unit, category="param", why="h2d")
    log.add("wait", t_ns=log.t_ns + 1, dur_ns=length // 4, bucket=unit, why="h2d")  # nested
    log.t_ns += length // 2 + rng.randrange(1, 100_000)
    row = (seq, began_ns, log.t_ns - began_ns, "access", log.step, log.phase, "compute", "", unit)
    log.events[seq] = Event(*row, -1, n_bytes, "", "", -1)
    held = 10 * KIB * (unit + 1)
    log.add("live", tier="HBM", unit=unit, n_bytes=held, category="activation")
    log.add("free", **replica, why="evict")
    log.charge("HBM", "param", -n_bytes)
    log.t_ns += 500


def plain(steps: int = 3) -> Run:
    """Return a run of a model that nobody manages: levels, accesses, phases, no moves."""
    log, meta = Writer(), meta_of(3)
    meta = Meta(
        mode="plain",
        model="Plain",
        device="cuda",
        units=meta.units,
        buckets=meta.buckets,
        budgets={"HBM": None},
    )
    log.charge("HBM", "param", sum(bucket.n_bytes for bucket in meta.buckets))
    for step in range(steps):
        log.step, log.phase, began_ns = step, "forward", log.t_ns
        for unit in range(3):
            log.add("access", dur_ns=1000, lane="compute", unit=unit)
            log.charge("HBM", "activation", 5 * KIB)
            log.t_ns += 1000
        log.charge("HBM", "activation", -15 * KIB)
        log.charge("HBM", "", 7 if step == 0 else 0)
        log.add("phase", t_ns=began_ns, dur_ns=log.t_ns - began_ns, why="forward")
        log.t_ns += 10
        log.add("step", t_ns=began_ns, dur_ns=log.t_ns - began_ns)
    return Run.of(meta, log.events)

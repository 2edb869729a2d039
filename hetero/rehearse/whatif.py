"""Estimates around a rehearsal: which other settings would fit, and how fast (floor 4).

Activations and compute grow with the tokens of a step; parameters and states do not. The runtime's
own choice of policies decides the fit, and its own weighing of homes on HBM the time
(`hetero/plan/weighing.py`), times what the rehearsed step took beyond that estimate of itself: so
the rows are on the plan's clock, and lanes are taken to overlap as well as they did there.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

from hetero.plan.activations import (
    OFFLOAD,
    RECOMPUTE,
    Policy,
    Use,
    choose,
    excess_bytes,
    peak_bytes,
)
from hetero.plan.division import Hbm
from hetero.plan.machine import MachineProfile
from hetero.plan.placement import BucketHomes
from hetero.plan.weighing import NO_DRIVE, Copies, Drive, Traffic, UnitStep, step_seconds
from hetero.rehearse.rehearsal import PlainStep
from hetero.report.views import REHEARSED, WITHOUT, WhatIf
from hetero.report.words import format_count
from hetero.train.engine.hbm_homes import first_homes, total_bytes
from hetero.train.engine.tradeoff import some
from hetero.types import format_bytes

ENDLESS = 2**62  # bytes of a disk without a budget
LARGEST = 4096  # times the rehearsed size: no search goes further
DEEPEST = 16  # times as deep, likewise: a choice takes the square of the number of units
EIGHT_BIT_STATE_BYTES = 2.0  # of two moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The figures of a rehearsal that estimates need, in bytes and seconds."""

    units: tuple[UnitStep, ...]
    """In the order of forward, as rehearsed."""
    traffic: Mapping[int, Traffic]
    """What each bucket costs where its homes are not on HBM."""
    homes: tuple[BucketHomes, ...]
    """That may be on HBM, the most useful first."""
    early: bool
    """Whether updates begin in backward."""
    is_auto: bool
    """Whether the runtime chooses policies; else units keep theirs."""
    working_bytes: int
    end_bytes: int
    """After the last unit's forward, apart from bytes that units leave."""
    hbm: Hbm
    home_bytes: int
    """Parameters, gradients, masters and states."""
    state_bytes: int
    """Of these, states."""
    numel: int
    host_bytes: int
    disk_bytes: int
    """Budgets of the tiers; no disk is 0."""
    tokens: float
    """Of a step; samples if there are no tokens."""
    late: float = 1.0
    """How many times its estimate the rehearsed step took."""
    profile: MachineProfile
    copies: Copies
    needed: dict[str, int]
    """Bytes of the tiers that are too small, with which the plan is one that fits."""

    @property
    def enough(self) -> Baseline:
        """The baseline of a machine that has enough of each tier."""
        return replace(
            self,
            hbm=replace(self.hbm, total_bytes=self.needed.get("HBM", self.hbm.total_bytes)),
            host_bytes=self.needed.get("HOST", self.host_bytes),
            disk_bytes=self.needed.get("NVME", self.disk_bytes),
        )

    @property
    def uses(self) -> list[Use]:
        return [unit.use for unit in self.units]

    @property
    def short_bytes(self) -> int:
        """Of homes, for which RAM and disk have no room."""
        return max(0, self.home_bytes - self.host_bytes - self.disk_bytes)

    @property
    def fixed(self) -> tuple[BucketHomes, ...]:
        """Homes that are on HBM for good, since RAM and disk are too small."""
        return first_homes(self.homes, self.hbm, self.short_bytes)

    @property
    def frozen(self) -> list[BucketHomes]:
        """Weights that frames hold from step to step, where there is room."""
        return [
            BucketHomes(bucket, each.weight_bytes)
            for bucket, each in self.traffic.items()
            if not each.gradient_bytes
        ]

    @property
    def below_bytes(self) -> float:
        """Of RAM, for activations; a disk makes room for them."""
        if self.disk_bytes:
            return math.inf
        return max(0, self.host_bytes + total_bytes(self.fixed) - self.home_bytes)

    def live_bytes(self, policies: Sequence[Policy]) -> int:
        """Return the most bytes of activations at once."""
        return peak_bytes(self.uses, policies, self.working_bytes, end_bytes=self.end_bytes)


class Option(NamedTuple):
    """A way to take a step."""

    seconds: float
    policies: Sequence[Policy]
    hbm_bytes: int
    """With the fewest frames."""


def what_if(baseline: Baseline, micro_batch: int, sequence: int) -> Iterator[WhatIf]:
    """Yield the settings that people ask about."""
    lacks = " with what is missing" if baseline.needed else ""
    n_units = len(baseline.units)
    yield largest("micro-batch", baseline.enough, micro_batch, lacks)
    yield largest("sequence", baseline.enough, sequence, lacks)
    yield deepest(baseline)
    yield estimate("recompute every unit", baseline, [RECOMPUTE] * n_units)
    yield estimate("offload every unit", baseline, [OFFLOAD] * n_units)
    if micro_batch > 1:
        yield estimate("micro_batch=1", sliced(baseline, micro_batch), [RECOMPUTE] * n_units)
    yield estimate("8-bit states", eight_bit(baseline))
    if baseline.disk_bytes:
        yield estimate("without a disk", replace(baseline, disk_bytes=0))
    elif baseline.profile.nvme is not None:
        yield estimate("with the drive, as nvme=", replace(baseline, disk_bytes=ENDLESS))


def without_hetero(hbm_bytes: int, plain: PlainStep, tokens: float) -> WhatIf:
    """Return the row of the same step with everything on the device, operation by operation."""
    short = plain.peak_bytes - hbm_bytes
    said = f"HBM is {format_bytes(short)} short; " if short > 0 else ""
    said += f"peak in {plain.phase}"
    speed = tokens / plain.seconds if plain.seconds else 0.0
    return WhatIf(WITHOUT, short <= 0, plain.peak_bytes, plain.seconds, said, speed, REHEARSED)


def estimate(label: str, baseline: Baseline, policies: Sequence[Policy] | None = None) -> WhatIf:
    """Return the estimate of a setting, with the cheapest policies that fit if none are given."""
    best = min(options(baseline, policies), key=attrgetter("seconds"))
    homes = baseline.short_bytes - total_bytes(baseline.fixed)
    sent = excess_bytes(baseline.uses, best.policies, baseline.below_bytes)
    problems = []
    if best.hbm_bytes > baseline.hbm.total_bytes:
        missing = best.hbm_bytes - baseline.hbm.total_bytes
        problems.append(f"HBM is {format_bytes(missing)} short")
    if homes > 0:
        problems.append(f"RAM and disk are {format_bytes(homes)} short")
    elif sent > 0:
        problems.append(f"RAM is {format_bytes(sent)} short")
    spilled = max(0, baseline.home_bytes - baseline.host_bytes - total_bytes(baseline.fixed))
    said = "; ".join(problems) or (f"{format_bytes(spilled)} on disk" if spilled else "")
    seconds = baseline.late * best.seconds
    speed = baseline.tokens / seconds if seconds else 0.0
    return WhatIf(label, not problems, best.hbm_bytes, seconds, said, speed)


def fits(baseline: Baseline) -> bool:
    """Whether a step fits, with the policies that take least and the fewest homes on HBM."""
    fixed = baseline.fixed
    room = baseline.hbm.room_bytes - total_bytes(fixed)
    there = baseline.live_bytes(choice(baseline, room)) <= room
    return there and total_bytes(fixed) >= baseline.short_bytes


def options(baseline: Baseline, policies: Sequence[Policy] | None) -> list[Option]:
    """Return ways to take a step, with more and more homes on HBM, as the runtime weighs them; the
    one that takes least HBM where none fits."""
    hbm, fixed = baseline.hbm, baseline.fixed
    there = {homes.bucket for homes in fixed}
    free = [homes for homes in (*baseline.homes, *baseline.frozen) if homes.bucket not in there]
    found = []
    for more in some(free, hbm.room_bytes - total_bytes(fixed)):
        held = more | there
        n_bytes = total_bytes(fixed) + total_bytes([h for h in free if h.bucket in more])
        room = hbm.most_bytes - hbm.streaming_bytes(held) - n_bytes
        chosen = policies or cheapest(baseline, room)
        if chosen and baseline.live_bytes(chosen) <= room:
            found.append(option(baseline, chosen, held, n_bytes))
    if found:
        return found
    n_bytes = total_bytes(fixed)
    chosen = policies or choice(baseline, hbm.room_bytes - n_bytes)
    return [option(baseline, chosen, frozenset(there), n_bytes)]


def option(
    baseline: Baseline, policies: Sequence[Policy], held: frozenset[int], held_bytes: int
) -> Option:
    """Return a step with such policies, and ``held`` buckets on HBM."""
    hbm = baseline.hbm
    taken = hbm.buffer_bytes + hbm.least_bytes + held_bytes + baseline.live_bytes(policies)
    return Option(seconds_of(baseline, policies, held), policies, taken)


def seconds_of(baseline: Baseline, policies: Sequence[Policy], held: frozenset[int]) -> float:
    """Return the time of a step by the runtime's own weighing."""
    pairs = zip(baseline.units, policies, strict=True)
    stages = [unit._replace(policy=policy) for unit, policy in pairs]
    return step_seconds(
        *(stages, baseline.traffic, held, baseline.copies),
        early=baseline.early,
        drive=drive_of(baseline),
    )


def drive_of(baseline: Baseline) -> Drive:
    """Return what homes that RAM does not hold cost, on a drive whose cache is full."""
    spilled, profile = baseline.home_bytes - baseline.host_bytes, baseline.profile
    if spilled <= 0 or not baseline.disk_bytes or profile.nvme is None:
        return NO_DRIVE
    cache = profile.nvme.slc_bytes
    before = 0.0 if cache is None else cache.value
    reads = profile.read_seconds(spilled, both_ways=True)
    return Drive(
        spilled, max(reads, profile.write_seconds(spilled, before, both_ways=True)) / spilled
    )


def on_its_clock(baseline: Baseline, step_seconds: float, hbm_bytes: int) -> Baseline:
    """Return the baseline whose estimate of the step that was rehearsed, in ``hbm_bytes``, is what
    that step took."""
    there = replace(baseline.enough, hbm=replace(baseline.hbm, total_bytes=hbm_bytes))
    said = min(each.seconds for each in options(there, None))
    return replace(baseline, late=step_seconds / said) if said else baseline


def cheapest(baseline: Baseline, room_bytes: int) -> list[Policy] | None:
    """Return the policies that the runtime would choose; None if none fit."""
    if not baseline.is_auto:
        given = [unit.policy for unit in baseline.units]
        return given if baseline.live_bytes(given) <= room_bytes else None
    return choose(
        baseline.uses,
        max(0, room_bytes),
        down=baseline.copies.down,
        up=baseline.copies.up,
        working_bytes=baseline.working_bytes,
        end_bytes=baseline.end_bytes,
        below_bytes=baseline.below_bytes,
    )


def choice(baseline: Baseline, room_bytes: int) -> list[Policy]:
    """Return the policies that the runtime would choose; the smallest where none fit."""
    if baseline.is_auto:
        smallest = [use.may(RECOMPUTE) for use in baseline.uses]
        return cheapest(baseline, room_bytes) or smallest
    return [unit.policy for unit in baseline.units]


def scaled(baseline: Baseline, times: float) -> Baseline:
    """Return the baseline of a step with so many times the tokens."""
    uses = [
        replace(
            use,
            saved_bytes=int(use.saved_bytes * times),
            input_bytes=int(use.input_bytes * times),
            forward_seconds=use.forward_seconds * times,
        )
        for use in baseline.uses
    ]
    return replace(
        baseline,
        units=with_uses(baseline, uses),
        tokens=baseline.tokens * times,
        working_bytes=int(baseline.working_bytes * times),
        end_bytes=int(baseline.end_bytes * times),
    )


def sliced(baseline: Baseline, n: int) -> Baseline:
    """Return the baseline of a batch in ``n`` slices, of which only inputs are there whole."""
    uses = [
        replace(use, saved_bytes=use.input_bytes + max(0, use.saved_bytes - use.input_bytes) // n)
        for use in baseline.uses
    ]
    units = with_uses(baseline, uses)
    return replace(baseline, units=units, working_bytes=baseline.working_bytes // n)


def with_uses(baseline: Baseline, uses: Sequence[Use]) -> tuple[UnitStep, ...]:
    """Return the units of a step, with what they leave and how long they take."""
    pairs = zip(baseline.units, uses, strict=True)
    return tuple(unit._replace(use=use) for unit, use in pairs)


def largest(what: str, baseline: Baseline, now: int, lacks: str) -> WhatIf:
    """Return the most samples, or positions, that fit."""
    low, high = 0, now
    while high <= LARGEST * now and fits(scaled(baseline, high / now)):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(scaled(baseline, middle / now)) else (low, middle)
    found = estimate(f"largest {what}{lacks}: {low}", scaled(baseline, max(low, 1) / now))
    return replace(found, fits=low > 0, change=f"{low / now:.3g} times as planned")


def deepest(baseline: Baseline) -> WhatIf:
    """Return the deepest model of the same units that fits."""
    now = len(baseline.units)
    low, high = 0, DEEPEST * now
    if fits(deeper(baseline, high)):
        low = high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(deeper(baseline, middle)) else (low, middle)
    found = deeper(baseline, max(low, 1))
    least = "at least " if low == DEEPEST * now else ""
    label = f"largest model: {least}{format_count(found.numel)} parameters"
    return replace(estimate(label, found), fits=low > 0, change=f"{low / now:.3g} times as deep")


def deeper(baseline: Baseline, n_units: int) -> Baseline:
    """Return the baseline of a model of so many units: each is repeated, or left out, evenly."""
    now, apart = len(baseline.units), max(baseline.traffic, default=0) + 1
    seen: Counter[int] = Counter()
    units = []
    for at in range(n_units):
        source = at * now // n_units
        unit = baseline.units[source]
        units.append(unit._replace(buckets=[b + apart * seen[source] for b in unit.buckets]))
        seen[source] += 1
    copies: dict[int, list[int]] = defaultdict(list)
    for bucket in dict.fromkeys(bucket for unit in units for bucket in unit.buckets):
        copies[bucket % apart].append(bucket)
    sizes = {bucket: n for unit in baseline.hbm.units for bucket, n in unit.items()}
    frames = tuple({b: sizes[b % apart] for b in unit.buckets} for unit in units if sizes)
    times = n_units / now
    return replace(
        baseline,
        units=tuple(units),
        traffic={b: baseline.traffic[source] for source in copies for b in copies[source]},
        homes=tuple(
            each._replace(bucket=bucket)
            for each in baseline.homes
            for bucket in copies[each.bucket]
        ),
        hbm=replace(baseline.hbm, units=frames),
        home_bytes=int(baseline.home_bytes * times),
        state_bytes=int(baseline.state_bytes * times),
        numel=int(baseline.numel * times),
    )


def eight_bit(baseline: Baseline) -> Baseline:
    """Return the baseline with moments of one byte each."""
    states = min(baseline.state_bytes, int(EIGHT_BIT_STATE_BYTES * baseline.numel))
    saved = baseline.state_bytes - states
    trained = baseline.home_bytes - total_bytes(baseline.frozen)
    part = 1 - saved / max(trained, 1)  # of the homes of a bucket that is trained
    return replace(
        baseline,
        home_bytes=baseline.home_bytes - saved,
        state_bytes=states,
        homes=tuple(each._replace(n_bytes=int(part * each.n_bytes)) for each in baseline.homes),
        traffic={
            bucket: each._replace(home_bytes=int(part * each.home_bytes))
            for bucket, each in baseline.traffic.items()
        },
    )

"""Estimates around a rehearsal: which other settings would fit, and how fast (floor 4).

Activations and compute grow with the tokens of a step; parameters and states do not. The runtime's
own choice of policies decides the fit. A step takes as long as its busiest lane (T10 of the
planner's equations), times what the rehearsed step took beyond its own estimate: so the rows are on
the plan's clock, and lanes are taken to overlap as well as they did there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hetero.plan.activations import RECOMPUTE, Policy, Use, choose, cost_seconds, peak_bytes
from hetero.plan.machine import MachineProfile
from hetero.rehearse.rehearsal import PlainStep
from hetero.report.views import REHEARSED, WITHOUT, WhatIf
from hetero.report.words import format_count
from hetero.types import Lane, format_bytes

ENDLESS = 2**62  # bytes of a disk without a budget
LARGEST = 4096  # times the rehearsed size: no search goes further
DEEPEST = 16.0  # times as deep, likewise: a choice takes the square of the number of units
DEPTH_APART = 0.02  # how exactly the depth is found
RANKS = (2, 8)
EIGHT_BIT_STATE_BYTES = 2.0  # of two moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The figures of a rehearsal that estimates need, in bytes and seconds."""

    uses: tuple[Use, ...]
    working_bytes: int
    end_bytes: int
    """After the last unit's forward, apart from bytes that units leave."""
    fixed_hbm_bytes: int
    """Buffers and the fewest frames."""
    home_bytes: int
    """Parameters, gradients, masters and states."""
    state_bytes: int
    """Of these, states."""
    param_bytes: int
    numel: int
    hbm_bytes: int
    host_bytes: int
    disk_bytes: int
    """Budgets of the tiers; no disk is 0."""
    compute_seconds: float
    """Of a step in which nothing is computed again."""
    update_seconds: float
    tokens: float
    """Of a step; samples if there are no tokens."""
    late: float = 1.0
    """How many times its estimate the rehearsed step took."""
    profile: MachineProfile
    needed: dict[str, int]
    """Bytes of the tiers that are too small, with which the plan is one that fits."""

    @property
    def enough(self) -> Baseline:
        """The baseline of a machine that has enough of each tier."""
        return replace(
            self,
            hbm_bytes=self.needed.get("HBM", self.hbm_bytes),
            host_bytes=self.needed.get("HOST", self.host_bytes),
            disk_bytes=self.needed.get("NVME", self.disk_bytes),
        )

    @property
    def down(self) -> Callable[[int], float]:
        return partial(self.profile.copy_seconds, Lane.D2H)

    @property
    def up(self) -> Callable[[int], float]:
        return partial(self.profile.copy_seconds, Lane.H2D)


def what_if(baseline: Baseline, micro_batch: int, sequence: int) -> Iterator[WhatIf]:
    """Yield the settings that people ask about."""
    lacks = " with what is missing" if baseline.needed else ""
    yield largest("micro-batch", baseline.enough, micro_batch, lacks)
    yield largest("sequence", baseline.enough, sequence, lacks)
    yield deepest(baseline)
    yield estimate("recompute every unit", baseline, [RECOMPUTE] * len(baseline.uses))
    yield estimate("offload every unit", baseline, [Policy(False, True)] * len(baseline.uses))
    if micro_batch > 1:
        yield estimate(
            "micro_batch=1", sliced(baseline, micro_batch), [RECOMPUTE] * len(baseline.uses)
        )
    yield estimate("8-bit states", eight_bit(baseline))
    if baseline.disk_bytes:
        yield estimate("without a disk", replace(baseline, disk_bytes=0))
    elif baseline.profile.nvme is not None:
        yield estimate("with the drive, as nvme=", replace(baseline, disk_bytes=ENDLESS))
    for ranks in RANKS if baseline.profile.gpu is not None else ():
        # the homes are shared, and each GPU has a link and a batch of its own
        one = estimate(f"{ranks} GPUs in this machine", baseline)
        said = f"{ranks} times the tokens a step, by a plan with --ranks {ranks}"
        change, speed = said if one.fits else one.change, ranks * one.tokens_per_second
        yield replace(one, change=change, tokens_per_second=speed)


def without_hetero(hbm_bytes: int, plain: PlainStep, tokens: float) -> WhatIf:
    """Return the row of the same step with everything on the device, operation by operation."""
    short = plain.peak_bytes - hbm_bytes
    said = f"HBM is {format_bytes(short)} short; " if short > 0 else ""
    said += f"peak in {plain.phase}"
    speed = tokens / plain.seconds if plain.seconds else 0.0
    return WhatIf(WITHOUT, short <= 0, plain.peak_bytes, plain.seconds, said, speed, REHEARSED)


def estimate(label: str, baseline: Baseline, policies: Sequence[Policy] | None = None) -> WhatIf:
    """Return the estimate of a setting, with the cheapest policies that fit if none are given."""
    room = baseline.hbm_bytes - baseline.fixed_hbm_bytes
    chosen = policies or choice(baseline, room)
    live = peak_bytes(baseline.uses, chosen, baseline.working_bytes, end_bytes=baseline.end_bytes)
    peak = live + baseline.fixed_hbm_bytes
    short = baseline.home_bytes - baseline.host_bytes - baseline.disk_bytes
    problems = []
    if peak > baseline.hbm_bytes:
        problems.append(f"HBM is {format_bytes(peak - baseline.hbm_bytes)} short")
    if short > 0:
        problems.append(f"RAM and disk are {format_bytes(short)} short")
    spilled = max(0, baseline.home_bytes - baseline.host_bytes)
    said = "; ".join(problems) or (f"{format_bytes(spilled)} on disk" if spilled else "")
    seconds = baseline.late * step_seconds(baseline, chosen)
    speed = baseline.tokens / seconds if seconds else 0.0
    return WhatIf(label, not problems, peak, seconds, said, speed)


def on_its_clock(baseline: Baseline, step_seconds: float) -> Baseline:
    """Return the baseline whose estimate of the rehearsed step is what that step took."""
    said = estimate("", replace(baseline.enough, late=1.0)).step_seconds
    return replace(baseline, late=step_seconds / said) if said else baseline


def choice(baseline: Baseline, room_bytes: int) -> list[Policy]:
    """Return the policies that the runtime would choose; the smallest where none fit."""
    found = choose(
        baseline.uses,
        max(0, room_bytes),
        down=baseline.down,
        up=baseline.up,
        working_bytes=baseline.working_bytes,
        end_bytes=baseline.end_bytes,
    )
    return found or [use.may(RECOMPUTE) for use in baseline.uses]


def step_seconds(baseline: Baseline, policies: Sequence[Policy]) -> float:
    """Return the time of a step: its busiest lane, where compute includes the cost of policies."""
    beside = sum(
        cost_seconds(use, policy, baseline.down, baseline.up)
        for use, policy in zip(baseline.uses, policies, strict=True)
    )
    spilled = max(0, baseline.home_bytes - baseline.host_bytes)
    up = baseline.up(2 * baseline.param_bytes)  # in forward and in backward
    lanes = [baseline.compute_seconds + beside, up, baseline.down(baseline.param_bytes)]
    lanes.append(baseline.update_seconds)
    if spilled and baseline.disk_bytes and baseline.profile.nvme is not None:
        lanes.append(baseline.profile.read_seconds(spilled, both_ways=True))
        cache = baseline.profile.nvme.slc_bytes
        before = 0.0 if cache is None else cache.value
        lanes.append(baseline.profile.write_seconds(spilled, before, both_ways=True))
    return max(lanes)


def scaled(baseline: Baseline, times: float) -> Baseline:
    """Return the baseline of a step with so many times the tokens."""
    uses = tuple(
        replace(
            use,
            saved_bytes=int(use.saved_bytes * times),
            input_bytes=int(use.input_bytes * times),
            forward_seconds=use.forward_seconds * times,
        )
        for use in baseline.uses
    )
    return replace(
        baseline,
        uses=uses,
        tokens=baseline.tokens * times,
        working_bytes=int(baseline.working_bytes * times),
        end_bytes=int(baseline.end_bytes * times),
        compute_seconds=baseline.compute_seconds * times,
    )


def sliced(baseline: Baseline, n: int) -> Baseline:
    """Return the baseline of a batch in ``n`` slices, of which only inputs are there whole."""
    uses = tuple(
        replace(use, saved_bytes=use.input_bytes + max(0, use.saved_bytes - use.input_bytes) // n)
        for use in baseline.uses
    )
    return replace(baseline, uses=uses, working_bytes=baseline.working_bytes // n)


def largest(what: str, baseline: Baseline, now: int, lacks: str) -> WhatIf:
    """Return the most samples, or positions, that fit."""

    def fits(number: int) -> bool:
        return estimate("", scaled(baseline, number / now)).fits

    low, high = 0, now
    while high <= LARGEST * now and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    found = estimate(f"largest {what}{lacks}: {low}", scaled(baseline, max(low, 1) / now))
    return replace(found, fits=low > 0, change=f"{low / now:.3g} times as planned")


def deepest(baseline: Baseline) -> WhatIf:
    """Return the deepest model of the same layers that fits: as many as homes have room for."""

    def fits(times: float) -> bool:
        return estimate("", deeper(baseline, times)).fits

    room = baseline.host_bytes + baseline.disk_bytes
    low, high = 0.0, min(DEEPEST, room / baseline.home_bytes)
    if fits(high):
        low = high
    while high > DEPTH_APART and high - low > DEPTH_APART * high:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    found = deeper(baseline, max(low, DEPTH_APART))
    least = "at least " if low == DEEPEST else ""
    label = f"largest model: {least}{format_count(found.numel)} parameters"
    return replace(estimate(label, found), fits=low > 0, change=f"{low:.3g} times as deep")


def deeper(baseline: Baseline, times: float) -> Baseline:
    """Return the baseline of a model with so many times the layers."""
    n = max(1, round(len(baseline.uses) * times))
    uses = (
        tuple(baseline.uses[i * len(baseline.uses) // n] for i in range(n)) if baseline.uses else ()
    )
    return replace(
        baseline,
        uses=uses,
        home_bytes=int(baseline.home_bytes * times),
        state_bytes=int(baseline.state_bytes * times),
        param_bytes=int(baseline.param_bytes * times),
        numel=int(baseline.numel * times),
        compute_seconds=baseline.compute_seconds * times,
        update_seconds=baseline.update_seconds * times,
    )


def eight_bit(baseline: Baseline) -> Baseline:
    """Return the baseline with moments of one byte each."""
    states = min(baseline.state_bytes, int(EIGHT_BIT_STATE_BYTES * baseline.numel))
    return replace(
        baseline, home_bytes=baseline.home_bytes - baseline.state_bytes + states, state_bytes=states
    )

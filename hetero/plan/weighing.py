"""The time of a step by where homes are and what becomes of activations (floor 1; no torch).

Units compute in order. Meanwhile HOST updates its homes in the order in which forward needs them,
weights go up after their update, and gradients go down after their backward. This model ranks
choices of policies and homes together, it does not predict a step: frames are taken to be enough
for copies to run ahead, and the ring of gradients to be long enough.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hetero.plan.activations import BACKWARD, Policy, Seconds, Use

LAST = 2  # units whose weights are on the device still when backward begins


class Traffic(NamedTuple):
    """What a bucket costs in each step in which its homes are not on HBM."""

    weight_bytes: int
    """Up before forward, and before backward."""
    gradient_bytes: int = 0
    """Down after backward; 0 if it is frozen."""
    update_seconds: float = 0.0
    """On HOST."""
    home_bytes: int = 0
    """Of all its homes, which an update on the device reads and writes."""


class Copies(NamedTuple):
    """How long copies take: bytes -> seconds."""

    up: Seconds
    down: Seconds
    within: Seconds
    """Within HBM."""


class UnitStep(NamedTuple):
    """A unit in a step."""

    use: Use
    policy: Policy
    buckets: Sequence[int]
    """The weights that it needs."""

    @property
    def forward_seconds(self) -> float:
        return self.use.forward_seconds

    @property
    def backward_seconds(self) -> float:
        return self.use.forward_seconds * (BACKWARD + self.policy.recompute)

    @property
    def offloaded_bytes(self) -> int:
        return self.use.left_bytes(self.policy) if self.policy.offload else 0


@dataclass
class _Lanes:
    """When each lane is free."""

    compute: float = 0.0
    up: float = 0.0
    down: float = 0.0
    update: float = 0.0


def step_seconds(
    stages: Sequence[UnitStep],
    traffic: Mapping[int, Traffic],
    held: Collection[int],
    copies: Copies,
    *,
    early: bool = False,
) -> float:
    """Return the time from one border to the next, with ``held`` buckets' homes on HBM.

    ``early``: HOST updates a home as soon as its gradients are there, and not after the border.
    """
    lanes = _Lanes(compute=copies.within(sum(traffic[bucket].home_bytes for bucket in held)))
    apart = {bucket: each for bucket, each in traffic.items() if bucket not in held}
    _forward(stages, apart, lanes, copies, updates=not early)
    _backward(stages, apart, lanes, copies, updates=early)
    return max(lanes.compute, lanes.up, lanes.down, lanes.update)


def _forward(
    stages: Sequence[UnitStep],
    apart: Mapping[int, Traffic],
    lanes: _Lanes,
    copies: Copies,
    *,
    updates: bool,
) -> None:
    seen: set[int] = set()
    before = 0.0  # when the activations of the unit before the last are down
    for stage in stages:
        for bucket in stage.buckets:
            if bucket in apart and bucket not in seen:
                seen.add(bucket)
                lanes.update += apart[bucket].update_seconds * updates
                lanes.up = max(lanes.up, lanes.update) + copies.up(apart[bucket].weight_bytes)
        lanes.compute = max(lanes.compute, lanes.up, before) + stage.forward_seconds
        before = lanes.down
        if stage.offloaded_bytes:
            lanes.down = max(lanes.down, lanes.compute) + copies.down(stage.offloaded_bytes)


def _backward(
    stages: Sequence[UnitStep],
    apart: Mapping[int, Traffic],
    lanes: _Lanes,
    copies: Copies,
    *,
    updates: bool,
) -> None:
    lanes.up = max(lanes.up, lanes.compute)
    there = {bucket for stage in stages[-LAST:] for bucket in stage.buckets}
    left = {bucket: at for at, stage in reversed([*enumerate(stages)]) for bucket in stage.buckets}
    for at, stage in reversed([*enumerate(stages)]):
        for bucket in stage.buckets:
            if bucket in apart and bucket not in there:
                there.add(bucket)
                lanes.up += copies.up(apart[bucket].weight_bytes)
        if stage.offloaded_bytes:
            lanes.up += copies.up(stage.offloaded_bytes)
        lanes.compute = max(lanes.compute, lanes.up) + stage.backward_seconds
        for bucket in stage.buckets:
            if bucket in apart and left[bucket] == at and apart[bucket].gradient_bytes:
                ready = max(lanes.down, lanes.compute)
                lanes.down = ready + copies.down(apart[bucket].gradient_bytes)
                if updates:
                    lanes.update = max(lanes.update, lanes.down) + apart[bucket].update_seconds

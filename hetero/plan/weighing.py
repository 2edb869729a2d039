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

SPARE = 1.25  # times the share of updates that is expected to pass through HBM: who is free decides
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


class Drive(NamedTuple):
    """Homes on disk while none are on HBM."""

    n_bytes: int = 0
    seconds_per_byte: float = 0.0
    """In which it is read and written in a step."""


NO_DRIVE = Drive()


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
    """A step under way: when each lane is free."""

    apart: Mapping[int, Traffic]
    """The buckets whose homes are not on HBM."""
    copies: Copies
    early: bool
    passing: float
    """The share of updates that passes through HBM."""
    compute: float
    up: float = 0.0
    down: float = 0.0
    update: float = 0.0

    def forward(self, stages: Sequence[UnitStep]) -> None:
        seen: set[int] = set()
        before = 0.0  # when the activations of the unit before the last are down
        for stage in stages:
            for bucket in stage.buckets:
                if bucket in self.apart and bucket not in seen:
                    seen.add(bucket)
                    traffic = self.apart[bucket]
                    n_bytes = traffic.weight_bytes
                    if not self.early:
                        self.update += traffic.update_seconds * (1 - self.passing)
                        n_bytes += round(self.passing * traffic.home_bytes)
                    self.up = max(self.up, self.update) + self.copies.up(n_bytes)
            self.compute = max(self.compute, self.up, before) + stage.forward_seconds
            before = self.down
            if stage.offloaded_bytes:
                self._send(stage.offloaded_bytes)

    def backward(self, stages: Sequence[UnitStep]) -> None:
        self.up = max(self.up, self.compute)
        places = [*enumerate(stages)][::-1]
        there = {bucket for stage in stages[-LAST:] for bucket in stage.buckets}
        first = {bucket: at for at, stage in places for bucket in stage.buckets}
        for at, stage in places:
            for bucket in stage.buckets:
                if bucket in self.apart and bucket not in there:
                    there.add(bucket)
                    self.up += self.copies.up(self.apart[bucket].weight_bytes)
            if stage.offloaded_bytes:
                self.up += self.copies.up(stage.offloaded_bytes)
            self.compute = max(self.compute, self.up) + stage.backward_seconds
            for bucket in stage.buckets:
                if bucket in self.apart and first[bucket] == at:
                    self._take_gradients(self.apart[bucket])

    def _take_gradients(self, traffic: Traffic) -> None:
        if traffic.gradient_bytes:
            self._send(traffic.gradient_bytes)
            if self.early:
                self.update = max(self.update, self.down) + traffic.update_seconds

    def _send(self, n_bytes: int) -> None:
        """Send what compute has made down."""
        self.down = max(self.down, self.compute) + self.copies.down(n_bytes)


def step_seconds(
    stages: Sequence[UnitStep],
    traffic: Mapping[int, Traffic],
    held: Collection[int],
    copies: Copies,
    *,
    early: bool = False,
    passing: float = 0.0,
    drive: Drive = NO_DRIVE,
) -> float:
    """Return the time from one border to the next, with ``held`` buckets' homes on HBM.

    ``early``: HOST updates a home as soon as its gradients are there, and not after the border.
    ``passing``: the share of the other updates that passes through HBM. ``drive``: for homes that
    RAM does not hold; those of ``held`` buckets leave room there, too.
    """
    apart = {bucket: each for bucket, each in traffic.items() if bucket not in held}
    updates = copies.within(sum(traffic[bucket].home_bytes for bucket in held))
    lanes = _Lanes(apart, copies, early, passing, compute=updates)
    lanes.forward(stages)
    lanes.backward(stages)
    on_disk = max(0, drive.n_bytes - sum(traffic[bucket].home_bytes for bucket in held))
    return max(lanes.compute, lanes.up, lanes.down, lanes.update, drive.seconds_per_byte * on_disk)


def passing_share(traffic: Mapping[int, Traffic], held: Collection[int], copies: Copies) -> float:
    """Return the share of updates of homes on HOST that passes through HBM, if HOST and link are to
    be done at one time. The link brings weights up, too; 0 if it takes as long for these alone."""
    apart = [each for bucket, each in traffic.items() if bucket not in held and each.home_bytes]
    weights = copies.up(sum(each.weight_bytes for each in apart))
    whole = sum(each.home_bytes for each in apart)
    down = whole - sum(each.gradient_bytes for each in apart)
    through = max(copies.up(whole), copies.down(down))
    updates = sum(each.update_seconds for each in apart)
    if updates <= weights:
        return 0.0
    return min(1.0, (updates - weights) / (updates + through))

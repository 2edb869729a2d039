"""Chooses each unit's activation policy: the cheapest that fits (floor 1, policy).

A unit that keeps its activations costs only room. One that recomputes costs a second forward, and
leaves its inputs. One that offloads costs the time by which its transfers outlast the computation
that hides them. This model of time ranks choices, it does not predict a step.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

BACKWARD = 2.0  # time of a backward, in forwards


class Policy(NamedTuple):
    """How a unit's activations reach its backward."""

    recompute: bool
    """Only its inputs are left; the rest is recomputed."""
    offload: bool
    """The rest goes down after the forward, and comes up before backward needs it."""

    def __str__(self) -> str:
        names = [
            name for name, on in (("recompute", self.recompute), ("offload", self.offload)) if on
        ]
        return "+".join(names) or "keep"


KEEP, RECOMPUTE, OFFLOAD = Policy(False, False), Policy(True, False), Policy(False, True)
LEAST = Policy(True, True)


@dataclass(frozen=True, slots=True)
class Use:
    """The bytes that a unit's forward leaves, and its time."""

    saved_bytes: int
    """All that autograd saves."""
    input_bytes: int
    """Bytes of these that stay if the unit recomputes."""
    forward_seconds: float = 0.0
    weight_bytes: int = 0
    """Bytes of weights that the link also carries for it, in forward and in backward."""
    again: bool = True
    """Whether it may recompute."""

    def may(self, policy: Policy) -> Policy:
        """Return the nearest policy that is allowed."""
        return policy if self.again else Policy(False, policy.offload)

    def left_bytes(self, policy: Policy) -> int:
        """Return the bytes kept for backward, on any tier."""
        return self.input_bytes if policy.recompute else self.saved_bytes


Seconds = Callable[[int], float]


def peak_bytes(
    uses: Sequence[Use],
    policies: Sequence[Policy],
    working_bytes: int = 0,
    *,
    end_bytes: int = 0,
    overlaps: bool = True,
) -> int:
    """Return the most bytes on the device at once in forward and backward.

    ``working_bytes`` are needed on top while a unit computes, ``end_bytes`` after the last forward,
    before anything is given back: for a loss. Of offloaded units, two are on the device at once: in
    forward one in flight and one being computed, in backward one in use and the next, unless
    nothing ``overlaps``. So a unit's backward has at least as much room as its forward.
    """
    return peaks(uses, policies, working_bytes, end_bytes=end_bytes, overlaps=overlaps)[0]


def peaks(
    uses: Sequence[Use],
    policies: Sequence[Policy],
    working_bytes: int = 0,
    *,
    end_bytes: int = 0,
    overlaps: bool = True,
) -> list[int]:
    """Return `peak_bytes` of the units from each one to the last, and of none."""
    near, far = end_bytes, 0  # peaks up to the next unit that offloads, and after it
    found = [max(working_bytes, near)]
    for use, policy in zip(reversed(uses), reversed(policies), strict=True):
        left = use.left_bytes(policy)
        here = left + working_bytes
        if policy.recompute:  # saved_bytes include its inputs
            here += max(0, use.saved_bytes - use.input_bytes)
        if not policy.offload:
            near, far = max(here, left + near), left + far
        else:  # it is fetched while the units up to the next that offloads compute
            near, far = here, max(near + left * overlaps, far)
        found.append(max(near, far))
    return found[::-1]


def choose(
    uses: Sequence[Use],
    room_bytes: int,
    *,
    down: Seconds,
    up: Seconds,
    working_bytes: int = 0,
    end_bytes: int = 0,
    below_bytes: float = math.inf,
    earlier: int = 0,
) -> list[Policy] | None:
    """Return a policy for each unit, in the order of forward; None if nothing fits.

    Units give way in the order of cost per byte freed, earlier ones first: backward needs late
    units first. The last one keeps, since it is needed at once, unless forwards wait: so many
    ``earlier`` ones of a step do when the last one begins. ``down`` and ``up`` return the seconds
    in which the link moves bytes; no more than ``below_bytes`` go down.
    """
    below_bytes /= earlier + 1
    n_before = len(uses) if earlier else max(0, len(uses) - 1)

    def fits(policies: list[Policy]) -> bool:
        peak = peak_bytes(uses, policies, working_bytes, end_bytes=end_bytes)
        return peak + earlier * staying_bytes(uses, policies) <= room_bytes

    def fits_below(policies: list[Policy]) -> bool:
        return excess_bytes(uses, policies, below_bytes) == 0 and fits(policies)

    def total_seconds(policies: list[Policy]) -> float:
        pairs = zip(uses, policies, strict=True)
        return sum(cost_seconds(use, policy, down, up) for use, policy in pairs)

    # 1. units give way one by one, each in its cheapest way; no step raises the peak
    ways = _ways(uses[:n_before], down, up, below_bytes)

    def given(n: int) -> list[Policy]:
        chosen = dict(ways[:n])
        return [chosen.get(at, KEEP) for at in range(len(uses))]

    found = _first(len(ways), lambda n: fits(given(n)))
    if found is not None:
        return given(found)
    # 2. else: all recompute, all offload (two are on the device at once), or inputs go down too

    def smallest(n: int) -> list[Policy]:
        return _with(uses, [LEAST] * n + [RECOMPUTE] * (n_before - n))

    n = _first(n_before, lambda n: fits(smallest(n)))
    others = [smallest(0), _with(uses, [OFFLOAD] * n_before), smallest(n or 0)]
    return min(filter(fits_below, others), key=total_seconds, default=None)


def staying_bytes(uses: Sequence[Use], policies: Sequence[Policy]) -> int:
    """Return the bytes that stay on the device from forward to backward."""
    pairs = zip(uses, policies, strict=True)
    return sum(use.left_bytes(policy) for use, policy in pairs if not policy.offload)


def taken_bytes(
    uses: Sequence[Use], policies: Sequence[Policy], below_bytes: float, earlier: int
) -> int:
    """Return the peak of a forward after ``earlier`` ones that wait for their backwards, if no more
    than ``below_bytes`` of all of them go down."""
    excess = excess_bytes(uses, policies, below_bytes / (earlier + 1))
    stays = earlier * staying_bytes(uses, policies)
    return peak_bytes(uses, policies) + stays + (earlier + 1) * excess


def excess_bytes(uses: Sequence[Use], policies: Sequence[Policy], below_bytes: float) -> int:
    """Return the bytes that units send down beyond those for which there is room."""
    pairs = zip(uses, policies, strict=True)
    down = sum(use.left_bytes(policy) for use, policy in pairs if policy.offload)
    return int(max(0, down - below_bytes))


def _first(most: int, fits: Callable[[int], bool]) -> int | None:
    """Return the smallest of 0 to ``most`` that fits, if all larger ones do too."""
    found = bisect_left(range(most + 1), True, key=fits)
    return found if found <= most else None


def _with(uses: Sequence[Use], policies: Sequence[Policy]) -> list[Policy]:
    """Return the nearest allowed policies; units for which there is none keep."""
    may = [use.may(policy) for use, policy in zip(uses, policies, strict=False)]
    return may + [KEEP] * (len(uses) - len(may))


def _ways(
    uses: Sequence[Use], down: Seconds, up: Seconds, below_bytes: float
) -> list[tuple[int, Policy]]:
    """Return (unit, policy) in the order in which units give way; together they send no more than
    ``below_bytes`` down."""
    options = []
    for at, use in enumerate(uses):
        for policy in (RECOMPUTE, OFFLOAD):
            freed = use.saved_bytes - (use.input_bytes if policy.recompute else 0)
            if freed > 0 and use.may(policy) == policy:
                options.append((cost_seconds(use, policy, down, up) / freed, at, policy))
    ways: dict[int, Policy] = {}
    for _, at, policy in sorted(options, key=lambda option: option[:2]):
        n_bytes = uses[at].left_bytes(policy) if policy.offload else 0
        if at not in ways and n_bytes <= below_bytes:
            ways[at] = policy
            below_bytes -= n_bytes
    return list(ways.items())


def cost_seconds(use: Use, policy: Policy, down: Seconds, up: Seconds) -> float:
    """Return the time a policy adds to a step."""
    forward, backward = use.forward_seconds, BACKWARD * use.forward_seconds
    cost = 0.0
    if policy.recompute:
        cost, backward = forward, backward + forward
    if policy.offload:
        left, weights = use.left_bytes(policy), use.weight_bytes
        cost += max(0.0, down(left) - forward)
        late = max(0.0, up(weights) - backward)  # the delay without offload
        cost += max(0.0, up(weights + left) - backward) - late
    return cost

"""What each unit leaves for its backward: the cheapest choice that fits (floor 1, policy).

A unit that keeps costs nothing but room. One that is computed again costs its forward once more and
leaves its inputs. One whose activations go down costs the time by which their transfers outlast the
computation they hide behind, and leaves nothing. The model of time is this small on purpose: it
ranks choices, it does not predict a step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

BACKWARD = 2.0  # forwards that a backward takes


class Policy(NamedTuple):
    """What becomes of what a unit's forward leaves for its backward."""

    recompute: bool
    """Only its inputs are left; the rest is computed again."""
    offload: bool
    """What is left goes down after the forward, and comes up before backward needs it."""

    def __str__(self) -> str:
        names = [
            name for name, on in (("recompute", self.recompute), ("offload", self.offload)) if on
        ]
        return "+".join(names) or "keep"


KEEP, RECOMPUTE, OFFLOAD = Policy(False, False), Policy(True, False), Policy(False, True)
LEAST = Policy(True, True)


@dataclass(frozen=True, slots=True)
class Use:
    """What a unit's forward leaves and takes."""

    saved_bytes: int
    """All that autograd saves."""
    input_bytes: int
    """What is left of it when it is computed again."""
    forward_seconds: float = 0.0
    weight_bytes: int = 0
    """What the link carries for it besides, in forward and in backward."""
    again: bool = True
    """Whether it may be computed again."""

    def may(self, policy: Policy) -> Policy:
        """Return the nearest policy that it may have."""
        return policy if self.again else Policy(False, policy.offload)

    def left_bytes(self, policy: Policy) -> int:
        """Return what stays for backward somewhere."""
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

    ``working_bytes`` come on top of what is held while a unit computes, ``end_bytes`` after the
    forward of the last one, where nothing has been given back yet: for a loss. Of what goes down,
    two units' are on the device at once: in forward one on its way and one that is being made, in
    backward one in use and the next, unless nothing ``overlaps``. So a unit's backward has at least
    what its forward had.
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
    """Return `peak_bytes` of the units from each one on, and of none."""
    near, far = end_bytes, 0  # at the peak: up to the next unit that goes down, and after it
    found = [max(working_bytes, near)]
    for use, policy in zip(reversed(uses), reversed(policies), strict=True):
        left = use.left_bytes(policy)
        here = left + working_bytes
        if policy.recompute:  # its inputs are among what it saves
            here += max(0, use.saved_bytes - use.input_bytes)
        if not policy.offload:
            near, far = max(here, left + near), left + far
        else:  # it comes up while those before the next that goes down compute
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
) -> list[Policy] | None:
    """Return a policy for each unit, in the order of forward; None where nothing fits.

    Units give way in the order of what that costs for each byte it frees, earlier ones first: what
    comes late in forward is needed first in backward. The last one keeps: it is needed at once.
    ``down`` and ``up`` return the seconds in which the link moves bytes.
    """

    def fits(policies: list[Policy]) -> bool:
        return peak_bytes(uses, policies, working_bytes, end_bytes=end_bytes) <= room_bytes

    def total_seconds(policies: list[Policy]) -> float:
        pairs = zip(uses, policies, strict=True)
        return sum(cost_seconds(use, policy, down, up) for use, policy in pairs)

    # 1. units give way one by one, each to what is cheapest for it; with none does the peak rise
    ways = _ways(uses, down, up)

    def given(n: int) -> list[Policy]:
        chosen = dict(ways[:n])
        return [chosen.get(at, KEEP) for at in range(len(uses))]

    found = _first(len(ways), lambda n: fits(given(n)))
    if found is not None:
        return given(found)
    # 2. two units of what goes down are on the device, maybe more than inputs; or inputs go too
    n_before = max(0, len(uses) - 1)

    def smallest(n: int) -> list[Policy]:
        return _with(uses, [LEAST] * n + [RECOMPUTE] * (n_before - n))

    n = _first(n_before, lambda n: fits(smallest(n)))
    others = [smallest(0), _with(uses, [OFFLOAD] * n_before), smallest(n or 0)]
    return min(filter(fits, others), key=total_seconds, default=None)


def _first(most: int, fits: Callable[[int], bool]) -> int | None:
    """Return the smallest of 0 to ``most`` that fits, where all larger ones do."""
    found = bisect_left(range(most + 1), True, key=fits)
    return found if found <= most else None


def _with(uses: Sequence[Use], policies: Sequence[Policy]) -> list[Policy]:
    """Return policies as units may have them; the last one keeps."""
    may = [use.may(policy) for use, policy in zip(uses[:-1], policies, strict=True)]
    return may + [KEEP] * bool(uses)


def _ways(uses: Sequence[Use], down: Seconds, up: Seconds) -> list[tuple[int, Policy]]:
    """Return (unit, policy) in the order in which units give way."""
    options = []
    for at, use in enumerate(uses[:-1]):
        for policy in (RECOMPUTE, OFFLOAD):
            freed = use.saved_bytes - (use.input_bytes if policy.recompute else 0)
            if freed > 0 and use.may(policy) == policy:
                options.append((cost_seconds(use, policy, down, up) / freed, at, policy))
    ways: dict[int, Policy] = {}
    for _, at, policy in sorted(options, key=lambda option: option[:2]):
        ways.setdefault(at, policy)
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
        late = max(0.0, up(weights) - backward)  # as it is without
        cost += max(0.0, up(weights + left) - backward) - late
    return cost

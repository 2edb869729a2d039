"""The policies of units, for what chooses them by room (floor 2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, MutableMapping
from typing import Protocol

from hetero.plan.activations import Policy
from hetero.train.activations.proof import Proofs


class Choice(Protocol):
    """The policies of units."""

    @property
    def policies(self) -> MutableMapping[int, Policy]:
        """By unit."""

    overlaps: bool
    """Whether transfers for one unit run while the next one computes."""

    @property
    def may_change(self) -> bool:
        """Whether policies are free to change."""

    tries: bool
    """Whether to compute units again for a proof even if their policies do not."""

    @property
    def proofs(self) -> Proofs:
        """Whether units can be computed again."""

    @property
    def is_trying(self) -> bool:
        """Whether a unit is being computed again for a proof."""

    def used(self, unit: int) -> Policy:
        """Return the policy of a unit's last forward."""

    def room_below(self) -> int:
        """Return the bytes that may still go down."""

    def recompute_unproven(self, unit: int) -> None:
        """Recompute a unit of which it is not known whether that gives the same bits, unless it is
        known that it cannot be: backward looks, before a gradient is used, and raises StateError if
        it does not."""


def shown(policies: Mapping[int, Policy]) -> str:
    """Return how many units have which policy: ``"3 keep, 2 recompute"``."""
    counts = Counter(str(policy) for policy in policies.values())
    return ", ".join(f"{n} {policy}" for policy, n in sorted(counts.items()))

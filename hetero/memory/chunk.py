"""The state machine of chunk copies (floor 1, mechanism).

State belongs to a copy: (chunk, tier). One table lists the legal transitions, one method consults
it; any other transition raises with the last moves.
"""

from __future__ import annotations

from collections import deque

from hetero.errors import StateError
from hetero.types import CopyState, Tier

A, F, C, D, L = CopyState
LEGAL: frozenset[tuple[CopyState, CopyState, str]] = frozenset(
    {
        (A, F, "fetch"),  # the copy is queued
        (F, C, "ready"),  # its ticket was waited for
        (C, D, "write"),  # a user wrote here
        (D, D, "write"),
        (D, L, "flush"),  # the copy down is queued
        (L, C, "ready"),
        (D, C, "recode"),  # the home has its codes, and it is fetched from there
        (D, F, "undo"),  # a discarded write that a lease shows: the home is fetched over it
        (C, F, "update"),  # the optimizer's update rewrites a home
        (C, F, "fetch"),  # overwritten by a newer copy (a flush into a home, a refresh)
        (C, A, "evict"),  # clean: moves no bytes
        (C, A, "discard"),  # dead: another copy is newer
        (D, A, "discard"),  # a write discarded on purpose
        (F, C, "fail"),  # a home whose flush failed keeps its old bytes
        (F, A, "fail"),  # a failed read leaves nothing
        (L, D, "fail"),  # a failed write leaves the only good copy in place
    }
)


class CopyTable:
    """States of all copies on two tiers, and the ring of the last moves. ``home`` is the lower
    tier, whose copies are never ABSENT; ``what`` names a copy in messages."""

    __slots__ = ("_home", "_moves", "_states", "_what")

    def __init__(self, n_copies: int, *, home: Tier = Tier.HOST, what: str = "chunk") -> None:
        self._home = home
        self._what = what
        self._states: dict[Tier, list[CopyState]] = {Tier(home - 1): [], home: []}
        self._moves: deque[tuple[int, Tier, CopyState, CopyState, str]] = deque(maxlen=1000)
        self.extend(n_copies)

    def extend(self, n_copies: int) -> int:
        """Add copies, at home, and return the number of the first."""
        first_new = len(self._states[self._home])
        for tier, states in self._states.items():
            first = CopyState.CLEAN if tier is self._home else CopyState.ABSENT
            states.extend([first] * n_copies)
        return first_new

    def state(self, chunk: int, tier: Tier) -> CopyState:
        """Return the state of one copy."""
        return self._states[tier][chunk]

    def transition(self, chunk: int, tier: Tier, new: CopyState, why: str) -> None:
        """Move one copy to ``new`` because of ``why``, or raise StateError."""
        old = self._states[tier][chunk]
        self._moves.append((chunk, tier, old, new, why))
        if (old, new, why) not in LEGAL or (tier is self._home and new is A):
            raise StateError(
                f"{self._what} {chunk} on {tier.name}: {old.name} -> {new.name} by {why} is not"
                " legal",
                moves=self.moves(),
            )
        self._states[tier][chunk] = new

    def moves(self) -> list[str]:
        """Return the last moves, oldest first, for an error message."""
        return [
            f"{self._what} {chunk} {tier.name}: {old.name} -> {new.name} ({why})"
            for chunk, tier, old, new, why in self._moves
        ]

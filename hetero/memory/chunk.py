"""The state machine of chunk copies (floor 1, mechanism).

State belongs to a copy: (chunk, tier). One table says which transitions are legal, one method
consults it, and what breaks it raises with the last moves.
"""

from __future__ import annotations

from collections import deque

from hetero.errors import StateError
from hetero.types import CopyState, Tier

A, F, C, D, L = CopyState
LEGAL: frozenset[tuple[CopyState, CopyState, str]] = frozenset(
    {
        (A, F, "fetch"),  # room is made, the copy is queued
        (F, C, "ready"),  # its ticket was waited for
        (C, D, "write"),  # a user wrote here
        (D, D, "write"),
        (D, L, "flush"),  # the way down is queued
        (L, C, "ready"),
        (C, F, "update"),  # a home is left to the optimizer's update
        (C, F, "fetch"),  # overwritten by a newer copy (a flush into a home, a refresh)
        (C, A, "evict"),  # clean: moves no bytes
        (C, A, "discard"),  # dead: another copy is newer
        (D, A, "discard"),  # a write that is given up on purpose
        (F, C, "fail"),  # a home whose flush failed keeps its old bytes
    }
)
_HOME = frozenset({"evict", "discard"})


class CopyTable:
    """State of every chunk's copy on HBM and HOST, and the ring of the last moves."""

    __slots__ = ("_moves", "_states")

    def __init__(self, n_chunks: int) -> None:
        self._states = {
            Tier.HBM: [CopyState.ABSENT] * n_chunks,
            Tier.HOST: [CopyState.CLEAN] * n_chunks,  # the home copy is never ABSENT
        }
        self._moves: deque[tuple[int, Tier, CopyState, CopyState, str]] = deque(maxlen=1000)

    def state(self, chunk: int, tier: Tier) -> CopyState:
        """Return the state of one copy."""
        return self._states[tier][chunk]

    def transition(self, chunk: int, tier: Tier, new: CopyState, why: str) -> None:
        """Move one copy to ``new`` because of ``why``, or raise StateError."""
        old = self._states[tier][chunk]
        self._moves.append((chunk, tier, old, new, why))
        if (old, new, why) not in LEGAL or (tier is Tier.HOST and why in _HOME):
            raise StateError(
                f"chunk {chunk} on {tier.name}: {old.name} -> {new.name} by {why} is not legal",
                moves=self.moves(),
            )
        self._states[tier][chunk] = new

    def moves(self) -> list[str]:
        """Return the last moves, oldest first, for an error message."""
        return [
            f"chunk {chunk} {tier.name}: {old.name} -> {new.name} ({why})"
            for chunk, tier, old, new, why in self._moves
        ]

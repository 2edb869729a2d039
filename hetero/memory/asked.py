"""How many frames ranks that gather have, as they tell each other (floor 1)."""

from __future__ import annotations

from collections.abc import Iterable

MANY = 2**62  # frames: as many as there are
N_BYTES = 8  # of a number that is told


def told(number: int) -> bytes:
    """Return the row that tells a number."""
    return number.to_bytes(N_BYTES, "little", signed=True)


def fewest(rows: Iterable[bytes]) -> int:
    """Return the least of the numbers that rows begin with."""
    return min(int.from_bytes(row[:N_BYTES], "little", signed=True) for row in rows)


class AskedFrames:
    """How many frames ranks that gather go on with: the fewest that any of them asks for.

    They give up frames at the same place of their way through the model, the one access after all
    have heard of it, or they would fetch other buckets from there on.
    """

    def __init__(self) -> None:
        self.due = MANY
        """What all have heard of, and not done yet."""
        self._mine = MANY

    @property
    def limit(self) -> int:
        """What is due, or asked for by this rank."""
        return min(self._mine, self.due)

    def ask(self, limit: int) -> None:
        """Let all ranks give up the frames from ``limit`` on."""
        self._mine = min(self._mine, limit)

    def row(self) -> bytes:
        """Return what this rank tells the others."""
        return told(self._mine)

    def hear(self, rows: Iterable[bytes]) -> None:
        """Note what all ranks have told."""
        self._mine = MANY
        self.due = min(self.due, fewest(rows))

    def forget(self) -> None:
        """All ranks have settled on a number of frames."""
        self.due = self._mine = MANY

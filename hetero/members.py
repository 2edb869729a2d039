"""Names of ranks in what a user reads (floor 0, no torch).

[Note: names of ranks]  Ranks that make calls together are numbered from 0 among themselves: rows,
shares and boards are indexed so. A mesh has many such groups, and each has a number 1. A user knows
the world's numbers alone, those of ``torch.distributed.get_rank()`` and of the launcher's logs.
Therefore what joins ranks has `Members`, which turn numbers into names, and no other module writes
"rank" in front of a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Members:
    """Ranks that make calls together; see [Note: names of ranks]."""

    ranks: Sequence[int]
    """Of the world, by their numbers among these."""
    n_world: int
    """Ranks of the world."""

    def name(self, number: int) -> str:
        """Return "rank 3"."""
        return named(self.ranks[number])

    def name_in_world(self, number: int) -> str:
        """Return "rank 3 of 4"."""
        return f"{self.name(number)} of {self.n_world}"

    def names(self, numbers: Iterable[int]) -> str:
        """Return "ranks 1, 3"."""
        return f"ranks {', '.join(str(self.ranks[number]) for number in numbers)}"

    def listed(self, said: Iterable[object], first: int = 0) -> str:
        """Return "rank 1: this; rank 3: that", of members in a row from the ``first`` on."""
        return "; ".join(f"{self.name(first + at)}: {each}" for at, each in enumerate(said))


def named(rank: int) -> str:
    """Return the name of a rank of the world."""
    return f"rank {rank}"


def all_of(n_world: int) -> Members:
    """Return the ranks of the world, whose numbers are their own."""
    return Members(range(n_world), n_world)


ONE_MEMBER = all_of(1)

"""Which extents may leave memory, least recently used first (floor 1, mechanism)."""

from __future__ import annotations

from collections.abc import Callable, Container
from heapq import heapify, heappop, heappush

from hetero.memory.extent import Extent

SPARE = 64  # entries of no more use that are not worth a walk through all


class Leaving:
    """Extents of one state that may leave memory, by the turn of their last use.

    An entry holds as long as its extent has that turn and ``may_leave``; one that does not is
    dropped when it comes up, so an extent is added again as soon as it may leave again. No search
    walks through the extents that are held, which are most of a full pool.
    """

    __slots__ = ("_entries", "_may_leave", "_turns")

    def __init__(self, may_leave: Callable[[Extent], bool]) -> None:
        self._may_leave = may_leave
        self._entries: list[tuple[int, Extent]] = []  # a heap
        self._turns: dict[Extent, int] = {}  # of the last entry of each

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, extent: Extent) -> None:
        """Add an extent under its turn; once, however often it is added."""
        if self._turns.get(extent) == extent.turn:
            return
        self._turns[extent] = extent.turn
        heappush(self._entries, (extent.turn, extent))
        if len(self._entries) > 2 * len(self._turns) + SPARE:
            self._entries = [(turn, each) for each, turn in self._turns.items()]
            heapify(self._entries)

    def first(self, n_bytes: int, keep: Container[Extent]) -> list[Extent]:
        """Return the first extents that are not in ``keep``, of ``n_bytes`` in total, or all."""
        found, standing = [], []
        while self._entries and n_bytes > 0:
            turn, extent = heappop(self._entries)
            if turn != extent.turn or not self._may_leave(extent):
                if self._turns[extent] == turn:
                    del self._turns[extent]
                continue
            standing.append((turn, extent))
            if extent not in keep:
                found.append(extent)
                n_bytes -= extent.n_bytes
        for entry in standing:
            heappush(self._entries, entry)
        return found

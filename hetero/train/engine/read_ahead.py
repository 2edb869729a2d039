"""Reads from disk before updates need it (floor 2)."""

from __future__ import annotations

from collections.abc import Sequence

from hetero.memory.extent import Request
from hetero.memory.nopool import NoPool
from hetero.memory.pool import Pool
from hetero.train.engine.budget import Budget
from hetero.train.update.arithmetic import Update
from hetero.types import Kind

PASSING = (Kind.PARAM, Kind.GRAD)  # on disk, they go through the pool's memory in backward


class ReadAhead:
    """Announces updates' requests to the pool: this step's at once, the next one's in backward."""

    def __init__(self, pool: Pool | NoPool, budget: Budget) -> None:
        self._pool = pool
        spill = budget.spill
        # whether backward leaves the drive idle
        self._rests = spill is not None and not any(kind in PASSING for kind, _ in spill.on_disk)
        self._again: list[Request] = []  # requests of the next step's updates

    def announce(self, begun: Sequence[Update], updates: Sequence[Update]) -> None:
        """Updates are handed over, in this order; those ``begun`` were announced before."""
        early = [request for update in begun for request in update.requests]
        requests = [request for update in updates for request in update.requests]
        self._pool.ahead(requests)
        self._again = [request.again() for request in (*early, *requests)]

    def backward_begins(self) -> None:
        """Have states read for the next step's first updates, if backward leaves the drive idle."""
        again, self._again = self._again, []
        if again and self._rests:
            self._pool.later(again)

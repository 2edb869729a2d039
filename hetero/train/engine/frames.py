"""The number of frames, while the program runs (floor 2)."""

from __future__ import annotations

from hetero.memory.manager import ChunkManager
from hetero.train.access.fetches import Fetches
from hetero.train.activations.meter import Meter


class ArenaFrames:
    """The frames of one arena; a change of their number replans the fetches.

    Args:
        meter: counts the rest of HBM.
        gives_back: whether memory has to be given back when there are fewer, as on CUDA.
    """

    def __init__(
        self, manager: ChunkManager, fetches: Fetches, meter: Meter, *, gives_back: bool
    ) -> None:
        self._manager = manager
        self._meter = meter
        self._fetches = fetches
        self._gives_back = gives_back

    @property
    def limit(self) -> int:
        """Their number."""
        return self._manager.arena.limit

    def shed(self) -> None:
        """Give back the frames apart from the others, unless held."""
        self._manager.evict_all(lambda replica: replica.is_apart)

    def resize(self, limit: int) -> bool:
        """Have so many frames; False while one is held."""
        if limit == self._manager.arena.limit:
            return True
        with self._meter.changing():
            if not self._manager.resize(limit):
                return False
        self._fetches.replan()
        return True

    def fix(self) -> None:
        """Let their number grow on request only."""
        self._manager.arena.ceiling = self._manager.arena.frames.limit

    def vacate(self) -> int:
        """Give up all frames not held now; returns the bytes of the others."""
        return self._manager.evict_all()

    def lower(self, limit: int) -> bool:
        """Give up frames; False while one of them is held."""
        if self._gives_back:
            return self.resize(limit)
        if not self._manager.shrink(limit):
            return False
        self._fetches.replan()
        schedule = self._fetches.active.schedule
        if schedule is not None:  # evict replicas that lie elsewhere than planned
            places = {op.bucket: op.start for op in schedule.at(-1)}
            self._manager.evict_all(lambda r: places.get(r.bucket.id, r.start) != r.start)
        return True

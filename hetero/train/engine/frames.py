"""The number of frames, while the program runs (floor 2)."""

from __future__ import annotations

from typing import Any

from hetero.device.comm import Comm
from hetero.memory.asked import MANY, N_BYTES, fewest, told
from hetero.memory.manager import ChunkManager
from hetero.train.access.fetches import Fetches
from hetero.train.activations.meter import Meter
from hetero.train.model.host_work import host_work


class ArenaFrames:
    """The frames of one arena; a change of their number replans the fetches.

    Args:
        meter: counts the rest of HBM.
        gives_back: whether memory has to be given back when there are fewer, as on CUDA.
    """

    def __init__(
        self, manager: ChunkManager, fetches: Fetches, meter: Meter, gives_back: bool
    ) -> None:
        self._manager = manager
        self._meter = meter
        self._fetches = fetches
        self._gives_back = gives_back

    @property
    def limit(self) -> int:
        """Their number."""
        return self._manager.arena.limit

    @property
    def coming(self) -> int:
        """Their number once all that was asked for is given up."""
        return self.limit

    def meet(self, row: bytes) -> list[bytes]:
        """A forward begins; returns the rows of all ranks that gather."""
        return []

    def fewest(self, number: int) -> int:
        """Return the fewest of the numbers of all ranks."""
        return number

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
        return self.give_up(limit)

    def give_up(self, limit: int) -> bool:
        """As `lower`, where all ranks do so."""
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


class AgreedFrames(ArenaFrames):
    """Those of ranks that gather, which have as many at any time, and the same buckets in them.

    One that needs room asks the others (see `AskedFrames`). Until they have heard, its activations
    may take more than its part of HBM, by frames that nothing uses.
    """

    def __init__(self, comm: Comm, manager: ChunkManager, fetches: Fetches, *given: Any) -> None:
        super().__init__(manager, fetches, *given)
        self._comm = comm
        self._asked = manager.asked
        fetches.before_pin = self._give_up_due

    @property
    def coming(self) -> int:
        return min(self.limit, self._asked.limit)

    def meet(self, row: bytes) -> list[bytes]:
        rows = self._comm.agree(self._asked.row() + row, "frames of a forward")
        self._asked.hear(rows)
        self._give_up_due()
        return [each[N_BYTES:] for each in rows]

    def fewest(self, number: int) -> int:
        return fewest(self._comm.agree(told(number), "a number of frames"))

    def resize(self, limit: int) -> bool:
        self._asked.forget()
        return super().resize(limit)

    def vacate(self) -> int:
        """Return the bytes of frames that are held: the others are given up once all have heard."""
        replicas = self._manager.replicas.values()
        return sum(replica.n_bytes for replica in replicas if not replica.may_leave)

    def lower(self, limit: int) -> bool:
        if limit < self.limit:
            self._asked.ask(limit)
        return limit >= self.limit

    def _give_up_due(self) -> None:
        """Give up what all have heard of; if some of it is held, at the next access."""
        if self._asked.due < self.limit:
            with host_work():  # an evicted replica may be coded, on HOST
                if not self.give_up(self._asked.due):
                    return
        self._asked.due = MANY

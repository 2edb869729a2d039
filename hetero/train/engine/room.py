"""The room that activations have on HBM, and frames that give way to it (floor 2).

One place changes the number of frames and charges activations: `apply` between steps, `fits` and
`lower` before a peak, `spare` and `resume` while nothing computes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, Protocol

from hetero.errors import OutOfMemory
from hetero.memory.ledger import Ledger
from hetero.plan.division import Division, Hbm
from hetero.plan.placement import BucketHomes
from hetero.train.engine.budget import Budget
from hetero.train.model.host_work import host_work
from hetero.types import Kind, Tier, format_bytes


class Frames(Protocol):
    """The frames that parameters lie in."""

    @property
    def limit(self) -> int:
        """Their number, those apart from the others included."""

    @property
    def coming(self) -> int:
        """Their number once all that was asked for is given up."""

    def meet(self, row: bytes) -> list[bytes]:
        """A forward begins on all ranks: those that gather hear how many frames they go on with.
        Returns their rows."""

    def fewest(self, number: int) -> int:
        """Return the fewest of the numbers of all ranks that gather; else this one's."""

    def resize(self, limit: int) -> bool:
        """Have so many; False, and nothing changed, while a replica is held."""

    def lower(self, limit: int) -> bool:
        """Give up those from ``limit`` on; False if one of them is held, or if ranks that gather
        have yet to hear of it."""

    def give_up(self, limit: int) -> bool:
        """As `lower`, where all ranks do so."""

    def vacate(self) -> int:
        """Give up all not held now; returns the bytes of the others."""

    def shed(self) -> None:
        """Give up those apart from the others, unless held."""

    def fix(self) -> None:
        """Let their number grow on request only."""


class HbmHomes(Protocol):
    """Homes on HBM, which may move to HOST."""

    @property
    def homes(self) -> list[BucketHomes]:
        """Those that may be there, the most useful first."""

    @property
    def n_bytes(self) -> int:
        """HBM that is set aside for them."""

    @property
    def grown_bytes(self) -> int:
        """HBM that those which cannot move take beyond what was set aside for them at first."""

    @property
    def passage_bytes(self) -> int:
        """HBM through which updates of homes on HOST should pass."""

    @property
    def on_hbm(self) -> frozenset[int]:
        """The buckets whose homes are there."""

    def sized(self, buckets: Collection[int]) -> list[BucketHomes]:
        """Return the homes of some buckets."""

    def stuck(self, buckets: Collection[int]) -> frozenset[int]:
        """Return those of the buckets whose homes cannot leave HBM now."""

    def give_way(self, n_bytes: int) -> None:
        """Move some down, to free so many bytes."""


class GradientRing(Protocol):
    """Gradients on their way down, which the device holds until they have landed."""

    limit_bytes: int
    """The most that it may hold."""

    @property
    def useful_bytes(self) -> int:
        """The limit that lets copies overlap with compute."""

    @property
    def held_bytes(self) -> int:
        """Of those held now."""

    def poll(self) -> None:
        """Wait until it holds no more than the limit."""


class LiveMeter(Protocol):
    """Measures activations; while room is lent, it does not."""

    def live_bytes(self) -> int:
        """Return the bytes that are alive."""

    def computes(self) -> None:
        """What is taken from now on is this model's."""

    def rests(self) -> None:
        """Nothing computes: what was taken is counted."""

    def lend(self) -> None:
        """Nothing computes: measure nothing until `resume`."""

    def resume(self) -> None:
        """Measure again."""


class Excess(NamedTuple):
    """A step that passed the budget of a simulated HBM, and goes on to be measured."""

    where: str = ""
    held_bytes: int = 0
    """Of frames, when it did."""
    most_bytes: int = 0
    """The most that RAM holds meanwhile."""


class Seen(NamedTuple):
    """Measurements of a step, or of a forward that is one."""

    input_bytes: int = 0
    peak_bytes: int = 0


class Room:
    """The room for activations and the ring on HBM; frames give way to their live bytes.

    Args:
        ram: returns the bytes of RAM that may still be taken.
        meter: measures activations.
    """

    def __init__(
        self,
        budget: Budget,
        ledger: Ledger,
        *,
        frames: Frames,
        homes: HbmHomes,
        ring: GradientRing,
        ram: Callable[[], int],
        meter: LiveMeter,
    ) -> None:
        self.budget = budget
        self.frames = frames
        self.homes = homes
        self.ring = ring
        self.excess: Excess | None = None
        self._ledger = ledger
        self._ram = ram
        self._meter = meter
        self._due: int | None = None  # the number of frames to have once none above it is held
        self._lent: int | None = None  # the number of frames when activations' room was lent

    @property
    def hbm(self) -> Hbm:
        """The sizes by which HBM is divided, without what homes that cannot move have grown by."""
        hbm, grown = self.budget.divisible, self.homes.grown_bytes
        return replace(hbm, total_bytes=hbm.total_bytes - grown) if grown else hbm

    @property
    def n_bytes(self) -> int:
        """The bytes that frames and homes leave."""
        return self.hbm.left_bytes(self.frames.limit) - self.homes.n_bytes

    @property
    def coming_bytes(self) -> int:
        """Those once frames that were asked for are given up."""
        return self.hbm.left_bytes(self.frames.coming) - self.homes.n_bytes

    # -- between two steps -----------------------------------------------------------------------

    def apply(self, division: Division) -> bool:
        """Have a division's frames and charge the rest; False, and nothing done, if one is held."""
        if not self.frames.resize(division.frames):
            return False
        self.charge(division)
        return True

    def charge(self, division: Division) -> None:
        """Charge activations and the ring anew; from now on frames grow by `spare` alone."""
        if self._lent is None:
            self._ledger.credit(Tier.HBM, Kind.ACTIVATION, self.budget.activation_bytes)
        self._lent = None
        self.budget.division = None
        self._ledger.charge(Tier.HBM, Kind.ACTIVATION, division.moving_bytes, "activations")
        self.budget.division = division
        self.ring.limit_bytes = division.ring_bytes
        self.frames.fix()

    def frames_beside(self, n_bytes: int) -> int:
        """Return how many frames fit with ``n_bytes`` of activations and ring, and the homes."""
        return max(self.hbm.fewest_frames, self.hbm.frames(n_bytes + self.homes.n_bytes))

    # -- before a peak ---------------------------------------------------------------------------

    def fits(self, n_bytes: int) -> bool:
        """Whether there may be ``n_bytes``; frames are given up for them."""
        if self.excess is not None:
            return n_bytes <= self.excess.most_bytes
        if n_bytes <= self.n_bytes:
            return True
        limit = self.frames_beside(n_bytes)
        with host_work():  # an evicted replica may be coded, on HOST
            if self.lower(limit) and n_bytes <= self.n_bytes:
                return True
            # the computing unit lies above: it keeps its frames until it is done
            held = self._held_bytes()
            self.homes.give_way(n_bytes + held + self.homes.n_bytes - self.hbm.most_bytes)
            if n_bytes > self.hbm.most_bytes - held - self.homes.n_bytes:
                return False
        self._due = limit
        return True

    def go_on(self, n_bytes: int, where: str = "") -> bool:
        """Let a step that does not fit go on to its end, to know its need; False if RAM is full."""
        if self.excess is not None:
            return False
        with host_work():
            self.excess = Excess(where, self._held_bytes(), n_bytes + self._ram() // 2)
        return True

    def forget(self) -> None:
        """Forget the excess and the frames due: HBM is divided anew."""
        self.excess = self._due = None

    def settle(self) -> None:
        """A unit begins: give up frames that are due and were in use before."""
        if self._due is not None and self.lower(self._due):
            self._due = None

    def lower(self, limit: int) -> bool:
        """Have no more than ``limit`` frames; False if one above is held."""
        return limit >= self.frames.limit or self.frames.lower(limit)

    def _give_up(self, limit: int) -> bool:
        """As `lower`, where all ranks that gather are at the same place of their way."""
        return limit >= self.frames.limit or self.frames.give_up(limit)

    def _held_bytes(self) -> int:
        """Give up frames not held; returns the bytes of the others, at least the fewest."""
        return max(self.frames.vacate(), self.hbm.least_bytes)

    def make_room(self, n_bytes: int) -> None:
        """Let frames, then homes, give way to a home on HBM that grows by ``n_bytes``."""
        taken = n_bytes + self.budget.activation_bytes
        limit = self.frames_beside(taken)
        with host_work():
            if self._give_up(limit):
                self.homes.give_way(taken - self.n_bytes)
                return
            # the computing unit lies above: it keeps its frames until it is done
            held = self._held_bytes()
            self.homes.give_way(taken + held + self.homes.n_bytes - self.hbm.most_bytes)
        self._due = limit

    @contextmanager
    def lifted(self, n_bytes: int) -> Iterator[None]:
        """Let a copy of a gradient at home be on HBM inside, while nothing computes.

        Frames give way to it where activations leave too little. Raises OutOfMemory if all of them
        are too few.
        """
        self._meter.rests()  # from here on, apart from what backward had
        taken = self._meter.live_bytes() + n_bytes
        limit = self.frames.fewest(self.frames_beside(taken))  # ranks that gather all do this
        with host_work():
            self._give_up(limit)
        if not self.fits(taken):
            raise self.budget.refusal(taken, where=" with a gradient whose norm is taken")
        more = max(0, taken - self.budget.activation_bytes)
        self._ledger.charge(Tier.HBM, Kind.GRAD, more, "a gradient whose norm is taken")
        self._meter.computes()  # it counts: from the next border on it has room
        try:
            yield
        finally:
            self._meter.rests()
            self._ledger.credit(Tier.HBM, Kind.GRAD, more)

    def from_homes(self) -> int:
        """Return how many frames there may be apart from the others, in the place of homes."""
        wanted = self.hbm.least_bytes + self.budget.activation_bytes
        if self.n_bytes < wanted:
            self.homes.give_way(wanted - self.n_bytes)
        more = (self.n_bytes - self.budget.activation_bytes) // self.hbm.granule_bytes
        return self.frames.fewest(max(0, more))

    # -- while nothing computes ------------------------------------------------------------------

    def spare(self) -> int:
        """Return how many more frames there may be while nothing computes.

        If any, activations' room is lent, and not charged until `resume`.
        """
        self._meter.lend()
        taken = self._meter.live_bytes() + self.ring.held_bytes
        wanted = taken + self.hbm.least_bytes
        if self.n_bytes < wanted:
            self.homes.give_way(wanted - self.n_bytes)
        free = self.hbm.frames(taken + self.homes.n_bytes) - self.frames.limit
        spare = self.frames.fewest(free)
        if spare > 0 and self._lent is None:
            self._lent = self.frames.limit
            self._ledger.credit(Tier.HBM, Kind.ACTIVATION, self.budget.activation_bytes)
        return max(0, spare)

    def resume(self) -> None:
        """Have no more frames than before `spare`, or more in the place of homes while views hold
        them; OutOfMemory if views hold too many."""
        if self._lent is None:
            self._meter.resume()
            return
        with host_work():  # an evicted replica may be coded, on HOST
            self.frames.shed()
            self._meter.resume()
            if not self._give_up(self._lent):
                self._keep_held(self._lent)
        self._lent = None
        self._ledger.charge(Tier.HBM, Kind.ACTIVATION, self.budget.activation_bytes, "activations")

    def _keep_held(self, limit: int) -> None:
        """Let homes give way to frames above ``limit`` that views hold, until they are free."""
        hbm, taken = self.hbm, self.budget.activation_bytes
        held = self.frames.vacate() + hbm.least_bytes
        needed = taken + max(held, self.frames.limit * hbm.granule_bytes)
        self.homes.give_way(needed + self.homes.n_bytes - hbm.most_bytes)
        if needed + self.homes.n_bytes > hbm.most_bytes:
            raise self._held_back(limit)
        self._due = limit

    def _held_back(self, limit: int) -> OutOfMemory:
        """Return the error for views that hold memory which activations need."""
        hbm = self.hbm
        held, there = self.frames.vacate(), limit * hbm.granule_bytes
        total = hbm.total_bytes + held + hbm.least_bytes - there
        return OutOfMemory(
            f"views of parameters that are still alive hold {format_bytes(held)} of"
            f" hbm={format_bytes(hbm.total_bytes)} as leases; beside activations there are"
            f" {format_bytes(there)} of frames",
            advice=f"drop the views before the model computes, or raise hbm= to {total} bytes",
            tier="HBM",
            needed_bytes=total,
        )

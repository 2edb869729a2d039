"""HBM is divided between frames and what a model holds that is not trained (floor 2).

Without an optimizer there are no steps: every forward of the whole model is one. What it holds
beside frames are its inputs, what it computes, and a cache that grows from token to token. As that
grows, frames are given up, a good many tokens' worth at a time; as it goes, they come back.

[Note: larger inputs]  A forward with larger inputs than the last ones had begins with the fewest
frames there can be, as the very first does: nobody knows yet what it takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from hetero.errors import OutOfMemory
from hetero.events import EventLog, What
from hetero.train.budget import Budget
from hetero.train.forecast import tensors_of
from hetero.train.meter import Meter, unmeasured
from hetero.types import Kind, Tier, format_bytes

WINDOW = 16  # forwards whose largest peak is what the next one is expected to need
AHEAD = 64  # forwards whose growth is made room for at once
WORTH = 8  # no more than this part of HBM at once, nor less given back to frames


class Frames(Protocol):
    """The frames that parameters lie in."""

    @property
    def limit(self) -> int:
        """How many there are."""

    def resize(self, limit: int) -> bool:
        """Have so many; False, and nothing changed, while a replica is held."""

    def lower(self, limit: int) -> bool:
        """Give up those from ``limit`` on; False where something that is held lies there."""

    def vacate(self) -> int:
        """Give up all that nobody holds, for now; returns the bytes of the others."""


class Seen(NamedTuple):
    """A forward."""

    input_bytes: int
    peak_bytes: int


class Evaluation:
    """Follows forwards, and makes room before the budget is passed.

    Args:
        charge: charges so many bytes of activations, in place of what was charged before.
    """

    def __init__(
        self,
        budget: Budget,
        *,
        meter: Meter,
        frames: Frames,
        charge: Callable[[int], None],
        log: EventLog,
    ) -> None:
        self.budget = budget
        self.meter = meter
        self._frames = frames
        self._charge = charge
        self._log = log
        self._due: int | None = None  # frames there are to be, as soon as nothing above is held
        self._inputs = 0  # of the forward that runs, in bytes
        self._seen: deque[Seen] = deque(maxlen=WINDOW)

    def begin(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """A forward of the whole model begins: see [Note: larger inputs]."""
        self._inputs = sum(tensor.nbytes for tensor in tensors_of((args, kwargs)))
        if self._seen and self._inputs > max(seen.input_bytes for seen in self._seen):
            self._lower(self._fewest)

    def end(self) -> None:
        """It ended: note what it took, and divide anew where that is due."""
        self.settle()
        last = self._seen[-1] if self._seen else None
        now = Seen(self._inputs, self.meter.peak_bytes())
        self._seen.append(now)
        self.meter.restart()
        alike = last is not None and last.input_bytes == now.input_bytes
        growth = max(0, now.peak_bytes - last.peak_bytes) if alike and last is not None else 0
        need = max(seen.peak_bytes for seen in self._seen)
        # what fitted is no error, though a margin is counted with what was measured
        room = self.budget.most_bytes - self.budget.plan.least_bytes
        wanted = min(need + min(AHEAD * growth, self.budget.most_bytes // WORTH), room)
        if need + growth > self._beside or not self.budget.measured or self._is_worth(wanted):
            self._divide(wanted)

    def check(self, live_bytes: int) -> None:
        """Make room for what is alive beside frames; OutOfMemory where there is none."""
        if live_bytes <= self._beside:
            return
        granule = self.budget.plan.granule_bytes
        limit = max(self._fewest, (self.budget.most_bytes - live_bytes) // granule)
        with unmeasured():
            if self._lower(limit) and live_bytes <= self._beside:
                return
            # the unit that computes stands above: it keeps its frames until it is done
            held = max(self._frames.vacate(), self.budget.plan.least_bytes)
        if live_bytes > self.budget.most_bytes - held:
            raise self._refusal(live_bytes)
        self._due = limit

    def settle(self) -> None:
        """A unit begins: give up the frames that were in use when they should have been."""
        if self._due is not None and self._lower(self._due):
            self._due = None

    @property
    def _beside(self) -> int:
        """HBM beside buffers and the frames that there are now."""
        return self.budget.most_bytes - self._frames.limit * self.budget.plan.granule_bytes

    @property
    def _fewest(self) -> int:
        return self.budget.plan.least_bytes // self.budget.plan.granule_bytes

    def _is_worth(self, wanted: int) -> bool:
        """Whether frames can have a good deal more than they have."""
        spare = self._beside - wanted
        return spare > max(self.budget.most_bytes // WORTH, self.budget.plan.least_bytes)

    def _divide(self, wanted: int) -> None:
        """Leave so much to activations, and the rest to frames."""
        limit = self.budget.frames_beside(wanted, "")
        before = self._frames.limit
        if limit < before:
            done = self._lower(limit)  # a view may still be held: the next forward tries again
            if done:
                self._charge(wanted)
        else:
            self._charge(wanted)
            done = self._frames.resize(limit)
        if done and limit != before:
            why = f"{limit} frames, not {before}: forwards hold {wanted} bytes"
            self._log.now(What.DECISION, tier=Tier.HBM, category=Kind.ACTIVATION, why=why)

    def _lower(self, limit: int) -> bool:
        return limit >= self._frames.limit or self._frames.lower(limit)

    def _refusal(self, live_bytes: int) -> OutOfMemory:
        budget = self.budget
        needed = live_bytes + budget.buffer_bytes + budget.plan.least_bytes
        room = max(0, budget.most_bytes - budget.plan.least_bytes)
        return OutOfMemory(
            f"a forward holds {live_bytes} bytes of inputs, cache and results;"
            f" hbm={format_bytes(budget.hbm or 0)} has {room} for them beside buffers and frames"
            f" of unit {budget.plan.widest_name!r}",
            advice=f"raise hbm= to {needed} bytes or more, lower the batch or the length, or use"
            " micro_batch=",
            tier="HBM",
            needed_bytes=needed,
        )

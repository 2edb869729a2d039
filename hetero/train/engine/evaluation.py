"""Divides HBM between frames and the tensors of a model that is not trained (floor 2).

Without an optimizer every forward of the whole model is a step. Its tensors are inputs, results,
and a cache that grows from token to token. As the cache grows, frames are given up for many tokens
at a time; when it is dropped, they come back.

[Note: larger inputs]  A forward with larger inputs than the last ones begins with the fewest
frames, as the very first does: its peak is not known yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hetero.errors import OutOfMemory
from hetero.events import EventLog, What
from hetero.plan.division import WORTH, Division, divide
from hetero.train.activations.forecast import tensors_of
from hetero.train.activations.meter import Meter
from hetero.train.engine.room import Excess, Room, Seen
from hetero.types import Kind, Tier, format_bytes

WINDOW = 16  # the next forward is expected to need the largest peak of so many
AHEAD = 64  # make room for the growth of so many forwards at once, up to a part of HBM


class Evaluation:
    """Follows forwards, and makes room before the budget is passed."""

    def __init__(
        self,
        room: Room,
        *,
        meter: Meter,
        log: EventLog,
    ) -> None:
        self.room = room
        self.meter = meter
        self._log = log
        self._inputs = 0  # of the forward that runs, in bytes
        self._seen: deque[Seen] = deque(maxlen=WINDOW)

    def begin(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """A forward of the whole model begins: see [Note: larger inputs]."""
        self._inputs = sum(tensor.nbytes for tensor in tensors_of((args, kwargs)))
        if self._seen and self._inputs > max(seen.input_bytes for seen in self._seen):
            self.room.lower(self.room.hbm.fewest_frames)
        self.room.frames.meet(b"")

    def end(self) -> None:
        """The forward ended: note its peak, and divide anew if that is due."""
        self.settle()
        last = self._seen[-1] if self._seen else None
        now = Seen(self._inputs, self.meter.peak_bytes())
        self._seen.append(now)
        self.meter.restart()
        alike = last is not None and last.input_bytes == now.input_bytes
        growth = max(0, now.peak_bytes - last.peak_bytes) if alike and last is not None else 0
        need = max(seen.peak_bytes for seen in self._seen)
        # a forward that fitted is no error, though the measured peak includes a margin
        room = self.room.hbm.room_bytes
        wanted = min(need + min(AHEAD * growth, self.room.hbm.most_bytes // WORTH), room)
        frames, hbm = self.room.frames.limit, self.room.hbm
        is_measured = self.room.budget.division is not None
        is_due = need + growth > self.room.n_bytes or not is_measured
        found = divide(hbm, wanted)
        new = found.frames if is_due or hbm.is_worth(wanted, frames) else frames
        agreed = self.room.frames.fewest(new)
        if agreed != frames or is_due:
            self._apply(replace(found, frames=min(found.frames, agreed)))

    def fits(self, live_bytes: int) -> bool:
        """Make room for live bytes outside frames; returns whether there is."""
        return self.room.fits(live_bytes)

    def passed(self, live_bytes: int) -> None:
        """Measure a forward without room to its end, and refuse it there, or now if RAM is full."""
        if not self.room.go_on(live_bytes):
            raise self._refusal(live_bytes)

    def forward_done(self) -> None:
        """Raise OutOfMemory if the forward that ends passed the budget."""
        if self.room.excess is not None:
            raise self._refusal(self.meter.seen_bytes())

    def settle(self) -> None:
        """A unit begins."""
        self.room.settle()

    def _apply(self, division: Division) -> None:
        """Apply a division; frames that stay keep their place."""
        room, before = self.room, self.room.frames.limit
        if division.frames < before:
            done = room.frames.give_up(division.frames)  # a view may be held: the next one tries
            if done:
                room.charge(division)
        else:
            room.charge(division)
            done = room.frames.resize(division.frames)
        if done and division.frames != before:
            held = division.activation_bytes
            why = f"{division.frames} frames, not {before}: forwards hold {held} bytes"
            self._log.now(What.DECISION, tier=Tier.HBM, category=Kind.ACTIVATION, why=why)

    def _refusal(self, live_bytes: int) -> OutOfMemory:
        budget, excess = self.room.budget, self.room.excess or Excess()
        needed = live_bytes + budget.buffer_bytes + excess.held_bytes
        self.room.excess = None
        room = max(0, self.room.hbm.room_bytes)
        return OutOfMemory(
            f"a forward holds {live_bytes} bytes of inputs, cache and results;"
            f" hbm={format_bytes(budget.hbm or 0)} has {room} for them beside buffers and frames"
            f" of unit {budget.plan.widest_name!r}",
            advice=f"raise hbm= to {needed} bytes or more, lower the batch or the length, or use"
            " micro_batch=",
            tier="HBM",
            needed_bytes=needed,
        )

"""Divides HBM between frames and activations, before a peak and at every step (floor 2).

[Note: before the peak]  The first units of a forward show whether it leaves more than the last one
(a longer sequence, a larger batch, the first of all); the rest is expected to leave more in
proportion. If that passes the budget, units still to come give way if the choice is free, and
frames are given up: they are clean, and come back when needed. If that is not enough, it is a
BudgetError that names the unit that leaves most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from hetero.errors import OutOfMemory
from hetero.events import EventLog, What
from hetero.plan.activations import (
    KEEP,
    LEAST,
    OFFLOAD,
    RECOMPUTE,
    Policy,
    Use,
    choose,
    excess_bytes,
    taken_bytes,
)
from hetero.plan.division import Division, divide
from hetero.plan.weighing import Copies
from hetero.train.activations.forecast import Forecast, tensors_of
from hetero.train.activations.held import GraphFootprint
from hetero.train.activations.meter import Meter
from hetero.train.engine.choice import Choice, shown
from hetero.train.engine.room import Excess, Room, Seen
from hetero.train.engine.tradeoff import Tradeoff
from hetero.train.model.host_work import host_work
from hetero.types import Kind, Tier

WINDOW = 16  # the next step is expected to need the largest peak of so many
MARGIN = 1 / 16  # head room for a choice of policies that has not been measured yet
PATIENCE = 4  # most steps in a row that compute units again for proofs, in vain
REST = 16  # steps after that until the next such attempt; twice as many each time
SHRUNK = 0.75  # choose again once inputs shrink below this share of those chosen for


class Tight(NamedTuple):
    """Policies with which a step ran, but without the margins that there should be."""

    policies: dict[int, Policy]
    peak_bytes: int


class Fitting:
    """Decides what fits, and which units and frames give way.

    Args:
        forecast: of the bytes that units leave.
        tradeoff: how much activations leave to homes.
        may_stay: whether a model that fits the device stays there.
        copies: how long copies take.
    """

    def __init__(
        self,
        room: Room,
        *,
        meter: Meter,
        forecast: Forecast,
        footprint: GraphFootprint,
        choice: Choice,
        tradeoff: Tradeoff,
        may_stay: bool,
        copies: Copies,
        log: EventLog,
    ) -> None:
        self.room = room
        self._copies = copies
        self._log = log
        self.meter = meter
        self.forecast = forecast
        self._footprint = footprint
        self._choice = choice
        self._tradeoff = tradeoff
        self._may_stay = may_stay
        self._spoiled = False  # an error ended a forward or a backward
        self._chosen_for = 0  # bytes of inputs that policies were chosen for
        self._inputs: deque[int] = deque(maxlen=WINDOW)
        self._peaks: deque[int] = deque(maxlen=WINDOW)
        self._largest = Seen()  # by inputs, of the steps with these policies
        self._tight: list[Tight] = []  # choices that were measured not to fit with the margins
        self._is_guess = False  # whether the last peak is expected, and not measured
        self._was_guess = False  # whether it was, until this border
        self._in_vain = 0  # steps that tried for proofs since one was decided
        self._rest, self._resting = REST, 0  # steps of the next rest; steps left of this one
        self._tried = False  # whether this step computes units again for proofs
        self._has_room = False  # whether policies were found that fit
        self._begins = False  # whether no unit of the forward has begun

    # -- a forward -------------------------------------------------------------------------------

    def begin(self) -> None:
        """A forward of the whole model begins, or a step."""
        if self._spoiled:  # a failed attempt's peak is not a step's
            self._forget()
        self.forecast.begin(anew=self._spoiled)
        self._tried = self._choice.tries  # which takes memory that later steps do not need
        has_room = self._has_room and not self._tried
        self._choice.overlaps = has_room or not self._choice.may_change
        self._spoiled = False
        self._begins = True
        if self._choice.may_change:
            self._look_below()

    def _look_below(self) -> None:
        """Choose anew if RAM has too little room for what units would send there: sums take more of
        it than gradients of one pass, and an earlier forward may have what it left there."""
        choice, forecast, room_bytes = self._choice, self.forecast, self.room.hbm.room_bytes
        units = forecast.units()
        before = [choice.policies[unit] for unit in units]  # a unit used twice is there twice
        if not any(policy.offload for policy in before):
            return
        uses, below = [forecast.use(unit) for unit in units], choice.room_below()
        if not excess_bytes(uses, before, below / (forecast.earlier + 1)):
            return
        if self._choose(units, room_bytes - forecast.outside, earlier=forecast.earlier):
            return
        choice.policies.update(zip(units, before, strict=True))
        choice.overlaps = False
        for unit in units[:-1]:  # what may be repeated is, and the rest stays where it has no room
            if choice.proofs.holds(unit):
                choice.policies[unit] = RECOMPUTE
            else:
                choice.recompute_unproven(unit)
        forecast.chosen()

    @contextmanager
    def around(self, unit: int, args: Any, kwargs: Any) -> Iterator[None]:
        """Look ahead before a unit's forward, make room, and note the bytes it left.

        Policies may change before the block begins.
        """
        if self.forecast.open is not None:  # inside another one
            yield
            return
        self.room.settle()
        inputs = tensors_of((args, kwargs))
        if unit not in self.forecast.rows:
            self._first_sight(unit)
        elif self.forecast.grows(unit, sum(tensor.nbytes for tensor in inputs)):
            self._make_room(unit)
        if self._begins:
            self._begins = False
            self.room.frames.meet(b"")
        self.forecast.enter(unit, inputs)
        try:
            yield
            self.forecast.note(self._choice.used(unit))
            self.meter.unit_done()
        except BaseException:
            self._spoiled = True
            raise
        finally:
            self.forecast.open = None

    def entered(self, unit: int) -> None:
        """A unit's weights are there, and it computes."""
        self.forecast.entered(unit)

    def _first_sight(self, unit: int) -> None:
        """Offload all of a unit that was never seen, which shows what it saves.

        Transfers overlap with compute only once a fitting choice is known: it takes more memory. If
        neither tier will have room for what units save, they are recomputed from here on.
        """
        if not self._choice.may_change:
            return
        self._choice.policies[unit] = OFFLOAD
        held, stayed = self._footprint.live_bytes, self._footprint.stayed_bytes
        # the last unit, a head, is often the widest, and its gradient comes when most is held
        expected = self.forecast.unseen_bytes(held) + self.forecast.gradient_bytes
        fits = expected <= (1 - MARGIN) * self.room.hbm.room_bytes
        is_short = bool(stayed) and not fits and self.forecast.knows_kind(unit)
        rows = self.room.frames.meet(b"short" if is_short else b"")  # it may use no weights
        if is_short or any(rows):
            self._choice.recompute_unproven(unit)

    # -- room ------------------------------------------------------------------------------------

    def _make_room(self, unit: int) -> None:
        """Let other units and frames give way to a unit that leaves more than before."""
        room, held, ring = self.room, self._footprint.live_bytes, self.room.ring
        need = self._need(unit)
        if need + ring.limit_bytes <= room.n_bytes:
            return
        if need > room.hbm.room_bytes and self._choice.may_change:
            ahead, to_come = self.forecast.ahead(unit), self.forecast.to_come
            fits = self._choose(ahead, room.hbm.room_bytes - held, earlier=to_come)
            self._choice.overlaps = self._choice.overlaps and fits
            need = self._need(unit)
        before = room.frames.limit
        room.lower(room.frames_beside(need + ring.limit_bytes))
        room.homes.give_way(need - room.coming_bytes)
        if room.frames.coming != before:
            self._note(f"{room.frames.coming} frames, not {before}: units leave {need} bytes")
        ring.limit_bytes = max(0, min(ring.limit_bytes, room.coming_bytes - need))

    def _need(self, unit: int) -> int:
        """Return this forward's expected peak, in proportion to the last one, or to the largest.

        The smaller counts: a short forward's fixed bytes would be scaled up, too.
        """
        forecast, largest, held = self.forecast, self._largest, self._footprint.live_bytes
        need, scale = held + forecast.peak_ahead(unit, self._choice.policies), forecast.scale
        expected = round(max(1.0, scale) * forecast.rows[unit].held_bytes)
        if not (largest.input_bytes and self._inputs) or held > expected:
            return need  # it does not grow as its inputs do
        inputs = max(largest.input_bytes, round(scale * self._inputs[-1]))
        return min(need, largest.peak_bytes * inputs // largest.input_bytes)

    def _choose(self, units: Sequence[int], room_bytes: int, *, earlier: int = 0) -> bool:
        """Choose policies that fit; if none do, those that take least, and return False.

        ``earlier``: forwards that will wait for their backwards too, under these policies.
        """
        uses = [self.forecast.use(unit) for unit in units]
        found = self._cheapest(uses, room_bytes, earlier)
        for option in [found] if found is not None else self._smallest(uses, earlier):
            policies = {**self._choice.policies, **dict(zip(units, option, strict=True))}
            if not any(policies == tight.policies for tight in self._tight):
                break
        else:
            if found is not None:
                return False
            policies = dict(self._choice.policies)
        if found is None:
            policies = self._least(units, policies)
        if policies != self._choice.policies:
            self._note(f"{shown(policies)} for {room_bytes} bytes")
            self._largest = Seen()
        self._choice.policies.update(policies)
        self.forecast.chosen()
        return found is not None

    def _least(self, units: Sequence[int], policies: dict[int, Policy]) -> dict[int, Policy]:
        """Return ``policies``, or those of a step that ran and took no more than they would."""
        now = self._choice.policies
        ran = min(self._tight, key=lambda t: (t.peak_bytes, t.policies != now), default=None)
        if ran is None or self._step_bytes(units, policies) < ran.peak_bytes:
            return policies
        return ran.policies

    def _step_bytes(self, units: Sequence[int], policies: Mapping[int, Policy]) -> int:
        """Return the peak expected of a step, with the forwards that wait for their backwards."""
        standing = self.forecast.standing_bytes(units, policies)
        return standing + self.forecast.peak_bytes(units, policies)

    def _cheapest(self, uses: Sequence[Use], room_bytes: int, earlier: int) -> list[Policy] | None:
        """Return the policies that cost least time of those that fit; None if none do."""
        found = self._found(uses, room_bytes, earlier, goes_down=False)
        if found is None or any(policy.offload for policy in found):
            # something is offloaded in any case, hence also tensors saved between units
            less = self._found(uses, room_bytes, earlier, goes_down=True)
            found = less if less and any(policy.offload for policy in less) else found
        return found

    def _found(
        self, uses: Sequence[Use], room_bytes: int, earlier: int, *, goes_down: bool
    ) -> list[Policy] | None:
        return choose(
            uses,
            int((1 - MARGIN) * room_bytes),
            down=self._copies.down,
            up=self._copies.up,
            working_bytes=self.forecast.working_bytes(goes_down=goes_down),
            end_bytes=self.forecast.behind_bytes(goes_down=goes_down),
            below_bytes=self._choice.room_below(),
            earlier=earlier,
        )

    def _note(self, why: str) -> None:
        self._log.now(What.DECISION, tier=Tier.HBM, category=Kind.ACTIVATION, why=why)

    def _smallest(self, uses: Sequence[Use], earlier: int) -> list[list[Policy]]:
        """Return each policy applied to all units, the one that should take least first."""
        options = [
            [use.may(policy) for use in uses[:-1]] + [KEEP] * bool(uses)
            for policy in (LEAST, RECOMPUTE, OFFLOAD, KEEP)
        ]
        below = self._choice.room_below()
        return sorted(options, key=lambda each: taken_bytes(uses, each, below, earlier))

    # -- a step ----------------------------------------------------------------------------------

    def divide(self) -> Division:
        """Return the division of HBM until the next step, by measurements since the last one.

        Raises OutOfMemory, before any update, if HBM does not hold it and no choice is left.
        """
        needed = self.needed_bytes()
        is_known = not (self._is_guess or self._tried)
        passed = self.room.excess is not None and is_known
        if passed or needed > self.room.hbm.room_bytes:
            self._inputs.pop()
            self._peaks.pop()
            raise self._refusal(self.meter.seen_bytes(), is_whole=True)
        self.room.forget()
        division = self._divided(needed, frozenset())
        there = self.room.homes.on_hbm
        stuck = self.room.homes.stuck(there) if there - division.on_hbm else frozenset()
        if stuck <= division.on_hbm:
            return division
        try:
            return self._divided(needed, stuck)
        except ValueError:
            held = sum(homes.n_bytes for homes in self.room.homes.sized(stuck))
            raise self._refusal(needed, is_whole=True, home_bytes=held) from None

    def _divided(self, needed: int, stuck: frozenset[int]) -> Division:
        room = self.room
        return divide(
            room.hbm,
            needed,
            ring_bytes=room.ring.useful_bytes,
            frames=room.frames.limit,
            keeps=room.budget.division is not None and not self._was_guess,
            policies=self._choice.policies,
            homes=room.homes.homes,
            on_hbm=room.homes.on_hbm,
            stuck=stuck,
            passage_bytes=room.homes.passage_bytes,
        )

    def needed_bytes(self) -> int:
        """Return the bytes that activations are expected to take; choose policies anew if due."""
        # 1. the step's peak, and how much of it the bytes that units left do not explain
        forecast, peak = self.forecast, self.meter.peak_bytes()
        self._was_guess = False
        if self._tried and self._peaks:  # the memory of proofs is not a step's
            units = forecast.units()
        else:
            units = forecast.close(
                *(peak, self.meter.end_bytes(), self._choice.policies),
                overlaps=self._choice.overlaps,
            )
            if self._is_guess:  # now it is known
                self._peaks.clear()
                self._is_guess, self._was_guess = False, True
            self._peaks.append(peak)
        # 2. choose for the largest inputs of the last steps
        inputs = sum(forecast.rows[unit].input_bytes for unit in units)
        self._inputs.append(inputs)
        if not self._tried and inputs >= self._largest.input_bytes:
            self._largest = Seen(inputs, peak)
        if self._choice.proofs.learned:
            self._in_vain, self._rest = 0, REST
        if self._choice.may_change and inputs and self._is_due():
            self._chosen_for = max(self._inputs)
            forecast.scale = self._chosen_for / inputs
            self._choose_all(units)
            forecast.scale = 1.0
            self._choice.proofs.learned = False
        self._try(units)
        # 3. a step that fitted is no error, though the measured peak includes a margin
        seen = 0 if self._tried else self.meter.seen_bytes()
        return min(max(self._peaks), max(self.room.hbm.room_bytes, seen))

    def _try(self, units: Sequence[int]) -> None:
        """Have the next step make missing proofs: a later one may need them."""
        self._in_vain += self._tried
        self._resting = max(0, self._resting - 1)
        if self._in_vain >= PATIENCE:  # backward does not reach some unit
            self._in_vain, self._resting, self._rest = 0, self._rest, 2 * self._rest
        choice, is_open = self._choice, self._choice.proofs.is_open
        choice.tries = choice.may_change and not self._resting and any(map(is_open, units))

    @property
    def is_decided(self) -> bool:
        """Whether the next step has no proof to try for, and no choice to make or to measure."""
        may_change = self._choice.may_change
        return not (self._choice.tries or self._is_guess or (may_change and self._tradeoff.is_open))

    def _is_due(self) -> bool:
        """Whether policies were chosen for other inputs or other proofs, or do not fit."""
        top = max(self._inputs)
        fits = max(self._peaks) <= self.room.hbm.room_bytes
        if fits:
            self._tight.clear()
        near = SHRUNK * self._chosen_for <= top <= self._chosen_for
        return self._choice.proofs.learned or self._tradeoff.is_due or not (near and fits)

    def _choose_all(self, units: Sequence[int]) -> None:
        """Choose for all units, leaving room for as much else as possible.

        Best is the room that leaves HBM to homes if that makes a step shorter, then that the whole
        model stays on the device, then that a second unit's frames fit, then that the gradient ring
        does.
        """
        plan = self.room.budget.plan
        most, ring = self.room.hbm.most_bytes, self.room.ring.useful_bytes
        rooms = [most - 2 * plan.least_bytes - ring, most - plan.least_bytes - ring]
        rooms.append(self.room.hbm.room_bytes)
        if self._may_stay:
            rooms.insert(0, most - plan.home_bytes - ring)
        uses = [self.forecast.use(unit) for unit in units]
        earlier, outside = self.forecast.earlier, self.forecast.outside
        best = self._tradeoff.room_bytes(
            units, lambda room: self._cheapest(uses, room - outside, earlier)
        )
        if best is not None:
            rooms.insert(0, best)
        before, had_room = dict(self._choice.policies), self._has_room
        if max(self._peaks) > self.room.hbm.room_bytes:
            self._tight = [tight for tight in self._tight if tight.policies != before]
            self._tight.append(Tight(before, max(self._peaks)))
        fits = (self._choose(units, room - outside, earlier=earlier) for room in rooms)
        self._has_room = any(fits)
        if not self._has_room:
            self._choose(units, self.room.hbm.room_bytes - outside, earlier=earlier)
        if self._has_room != had_room:  # transfers overlap now, or no longer do
            self._largest = Seen()
        if self._choice.policies == before:
            return
        # untried policies run with as few frames as they may need, and are measured so
        largest = max((self.forecast.use(unit).saved_bytes for unit in units), default=0)
        expected = self._step_bytes(units, self._choice.policies)
        self._peaks.clear()
        self._peaks.append(min(expected + largest, self.room.hbm.room_bytes))
        self._is_guess = True

    def fits(self, live_bytes: int) -> bool:
        """Make room for live bytes on a simulated device: shrink the ring first, then frames."""
        ring, left = self.room.ring, self.room.n_bytes - live_bytes
        if ring.limit_bytes > left:
            ring.limit_bytes = max(0, left)
            with host_work():  # they are added up on HOST
                ring.poll()
        if self._choice.is_trying:  # with the room there is: nothing gives way for a proof
            return live_bytes <= self.room.n_bytes
        return self.room.fits(live_bytes)

    def passed(self, live_bytes: int) -> None:
        """There is no room: the step is measured to its end, and refused there.

        Raises OutOfMemory if RAM does not hold it that long, and for a trial, which ends there.
        """
        if self._choice.is_trying:
            raise OutOfMemory("a trial found no room", tier="HBM")
        if not self.room.go_on(live_bytes, self.forecast.where()):
            raise self._refusal(live_bytes, is_whole=False)

    def forward_done(self) -> None:
        """The step goes on."""

    def _refusal(
        self, activation_bytes: int, *, is_whole: bool, home_bytes: int = 0
    ) -> OutOfMemory:
        """Return the error for a step, and forget its measurements.

        ``home_bytes``: of homes that the user's code keeps on HBM.
        """
        excess = self.room.excess or Excess()
        held = max(excess.held_bytes, self.room.hbm.least_bytes)
        error = self.room.budget.refusal(
            activation_bytes,
            where=excess.where,
            known=self.forecast.largest(),
            held_bytes=held + home_bytes,
            is_whole=is_whole,
            is_auto=self._choice.may_change,
        )
        self.spoil()
        return error

    def spoil(self) -> None:
        """Forget the measurements of this step: it came to nothing."""
        self._spoiled, self._choice.tries = True, False
        self._forget()

    def _forget(self) -> None:
        self.room.forget()
        self.meter.restart()

"""HBM is divided between frames and activations, before a peak comes and at every step (floor 2).

[Note: before the peak]  A forward that leaves more than the last one did (a longer sequence, a
larger batch, the first of all) is seen at its first units. What the rest will leave follows from
what these left, in proportion. Where that passes the budget, units that are still to come give way
if the choice is free, and frames are given up: they are clean, and come back when they are needed.
What even that does not hold is a BudgetError with the unit that leaves most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._pytree import tree_iter

from hetero.device import Device, Ticket
from hetero.errors import BudgetError
from hetero.memory.ledger import Ledger
from hetero.plan.activations import KEEP, LEAST, OFFLOAD, RECOMPUTE, Policy, Use, choose, peak_bytes
from hetero.train.budget import Budget
from hetero.train.footprint import Footprint
from hetero.train.meter import Meter, unmeasured
from hetero.train.recompute import versions
from hetero.train.swizzle import plainly
from hetero.types import Kind, Lane, Tier, format_bytes

WINDOW = 16  # steps whose largest peak is what the next one is expected to need
MARGIN = 1 / 16  # of a room, for what a choice that nobody has tried yet may take besides
SHRUNK = 0.75  # inputs of so small a part of those chosen for: units may keep again


@dataclass(slots=True)
class Row:
    """What a unit's forward left when it was seen last."""

    policy: Policy
    input_bytes: int
    left_bytes: int
    saved_bytes: int
    """All that autograd saves; guessed from others of its kind where it was never kept."""
    held_bytes: int
    """By graphs, when it began."""
    seconds: float
    writes: bool
    """To its inputs: it cannot be computed again."""


class Open(NamedTuple):
    """The unit whose forward runs."""

    unit: int
    inputs: list[torch.Tensor]
    input_bytes: int
    versions: list[int] | None
    """Of the inputs, where it was never seen before."""
    held_bytes: int
    began: Ticket | None


class UnitKind(NamedTuple):
    """What units that are alike have in common."""

    module: type | None
    weight_bytes: int
    """Of the parameters that its access pins."""


class Frames(Protocol):
    """The frames that parameters lie in."""

    @property
    def limit(self) -> int:
        """How many there are."""

    def resize(self, limit: int) -> bool:
        """Have so many; False, and nothing changed, while a replica is held."""


class Ring(Protocol):
    """Gradients on their way down, which the device holds until they have landed."""

    limit_bytes: int
    """Of those that it may hold."""

    @property
    def useful_bytes(self) -> int:
        """The limit that lets copies overlap with compute."""

    def poll(self) -> None:
        """Wait until no more are held than may be."""


class Choice(Protocol):
    """The policies of units."""

    policies: dict[int, Policy]

    @property
    def may_change(self) -> bool:
        """Whether they are free."""

    def policy_of(self, unit: int) -> Policy:
        """Return what holds for a unit's next forward."""


class Fitting:
    """What units leave, what fits, and who gives way.

    Args:
        names: of the units.
        kinds: of the units; those of one kind are expected to save alike.
        may_stay: whether a model that fits the device stays there.
    """

    def __init__(
        self,
        budget: Budget,
        ledger: Ledger,
        device: Device,
        *,
        meter: Meter,
        footprint: Footprint,
        ring: Ring,
        frames: Frames,
        choice: Choice,
        names: Sequence[str],
        kinds: Sequence[UnitKind],
        may_stay: bool,
    ) -> None:
        self.budget = budget
        self.meter = meter
        self.rows: dict[int, Row] = {}
        """By unit."""
        self._ledger = ledger
        self._device = device
        self._footprint = footprint
        self._ring = ring
        self._frames = frames
        self._choice = choice
        self._names = names
        self._kinds = kinds
        self._may_stay = may_stay
        self._order: list[int] = []  # units of the last forward
        self._now: list[int] = []  # and of this one, so far
        self._open: Open | None = None
        self._stamps: dict[int, tuple[Ticket, Ticket]] = {}  # of units seen for the first time
        self._spoiled = False  # an error ended a forward or a backward
        self._scale = 1.0  # of what this forward leaves, by what the last one left
        self._beside_bytes = 0  # at the peak, beside what units leave
        self._chosen_for = 0  # bytes of inputs that policies were chosen for
        self._inputs: deque[int] = deque(maxlen=WINDOW)
        self._peaks: deque[int] = deque(maxlen=WINDOW)
        self._failed: list[dict[int, Policy]] = []  # choices that were measured not to fit
        self._is_guess = False  # whether the last of them is expected, and not measured

    # -- a forward -------------------------------------------------------------------------------

    def begin(self) -> None:
        """A forward of the whole model begins."""
        if self._spoiled:  # what an attempt took that came to nothing is not what steps take
            self.meter.restart()
            self._spoiled = False
        elif self._now:
            self._order = self._now
        self._now, self._open, self._scale = [], None, 1.0

    @contextmanager
    def around(self, unit: int, args: Any, kwargs: Any) -> Iterator[None]:
        """Look ahead before a unit's forward, make room, and note what it left.

        Policies may change before the block begins.
        """
        if self._open is not None:  # inside another one
            yield
            return
        inputs = tensors_of((args, kwargs))
        n_bytes = sum(tensor.nbytes for tensor in inputs)
        self._look_ahead(unit, n_bytes)
        first = unit not in self.rows
        then = versions(inputs) if first else None
        began = self._device.stamp() if first else None
        self._open = Open(unit, inputs, n_bytes, then, self._footprint.live_bytes, began)
        try:
            yield
            self._note(self._open)
        except BaseException:
            self._spoiled = True
            raise
        finally:
            self._open = None

    def _look_ahead(self, unit: int, input_bytes: int) -> None:
        """See whether this forward leaves more than the last one did."""
        row = self.rows.get(unit)
        if row is None:
            self._first_sight(unit)
            return
        if row.input_bytes:
            self._scale = max(self._scale, input_bytes / row.input_bytes)
        if self._scale > 1.0 or self._footprint.live_bytes > row.held_bytes:
            self._make_room(unit)

    def _first_sight(self, unit: int) -> None:
        """Nobody knows yet what fits: the first step has as little on the device as can be.

        Of each kind of unit the first goes down whole, which shows what it saves.
        """
        if self._choice.may_change:
            alike = [self.rows[other] for other in self._now if self._alike(unit, other)]
            known = bool(alike) and not any(row.writes for row in alike)
            self._choice.policies[unit] = LEAST if known else OFFLOAD

    def _note(self, seen: Open) -> None:
        """Write down what a unit left."""
        policy, unit = self._choice.policy_of(seen.unit), seen.unit
        left = max(0, self._footprint.live_bytes - seen.held_bytes)
        row, n_bytes = self.rows.get(unit), seen.input_bytes
        saved = self._saved(unit, n_bytes) if policy.recompute else left
        if row is None:
            writes, seconds = versions(seen.inputs) != seen.versions, 0.0
            if seen.began is not None:  # told when the step is over: nothing is waited for here
                self._stamps[unit] = seen.began, self._device.stamp()
        else:
            writes, seconds = row.writes, row.seconds
            if row.input_bytes:
                seconds *= n_bytes / row.input_bytes
            if row.policy == policy and row.left_bytes:
                self._scale = left / row.left_bytes
        self.rows[unit] = Row(policy, n_bytes, left, saved, seen.held_bytes, seconds, writes)
        self._now.append(unit)

    def _saved(self, unit: int, input_bytes: int) -> int:
        """Return what a unit would save, by what it did or what those of its kind did."""
        row = self.rows.get(unit)
        alike = (
            [row]
            if row is not None
            else [row for other, row in self.rows.items() if self._alike(unit, other)]
        )
        known = [r for r in alike if r.input_bytes]
        return int(max((r.saved_bytes * input_bytes / r.input_bytes for r in known), default=0))

    def _alike(self, unit: int, other: int) -> bool:
        return self._kinds[unit] == self._kinds[other]

    # -- room ------------------------------------------------------------------------------------

    def _make_room(self, unit: int) -> None:
        """Before a unit that leaves more than it did: let others give way, and frames."""
        plan, held, ring = self.budget.plan, self._footprint.live_bytes, self._ring
        ahead = [other for other in self._order_from(unit) if other in self.rows]
        uses = [self._use(other) for other in ahead]
        need = held + self._peak_bytes(ahead, uses)
        if need + ring.limit_bytes <= self._beside_frames:
            return
        least = plan.least_bytes // plan.granule_bytes
        room = self.budget.most_bytes - plan.least_bytes
        if need > room and self._choice.may_change:
            self._choose(ahead, uses, room - held)
            need = held + self._peak_bytes(ahead, uses)
        limit = (self.budget.most_bytes - need - ring.limit_bytes) // plan.granule_bytes
        self._frames.resize(max(least, min(limit, self._frames.limit)))
        ring.limit_bytes = max(0, min(ring.limit_bytes, self._beside_frames - need))

    @property
    def _beside_frames(self) -> int:
        """HBM beside buffers and the frames that there are now."""
        return self.budget.most_bytes - self._frames.limit * self.budget.plan.granule_bytes

    def _peak_bytes(self, units: Sequence[int], uses: Sequence[Use]) -> int:
        """Return what units are expected to have on the device at once."""
        policies = [self._choice.policies[unit] for unit in units]
        return peak_bytes(uses, policies, int(max(1.0, self._scale) * self._beside_bytes))

    def _choose(self, units: Sequence[int], uses: Sequence[Use], room_bytes: int) -> bool:
        """Choose policies that fit; the smallest that are not known to fail, and False, where none
        does."""
        found = choose(
            uses,
            int((1 - MARGIN) * room_bytes),
            down=partial(self._device.copy_seconds, Lane.D2H),
            up=partial(self._device.copy_seconds, Lane.H2D),
            working_bytes=int(max(1.0, self._scale) * self._beside_bytes),
        )
        options = [found] if found is not None else self._smallest(uses)
        for option in options:
            policies = {**self._choice.policies, **dict(zip(units, option, strict=True))}
            if policies not in self._failed:
                self._choice.policies.update(policies)
                return found is not None
        return False

    def _smallest(self, uses: Sequence[Use]) -> list[list[Policy]]:
        """Return one policy for all units, each there is, those that should take least first."""
        options = [
            [use.may(policy) for use in uses[:-1]] + [KEEP] * bool(uses)
            for policy in (LEAST, RECOMPUTE, OFFLOAD, KEEP)
        ]
        return sorted(options, key=lambda option: peak_bytes(uses, option))

    def _order_from(self, unit: int) -> list[int]:
        """Return the units from this one on, as the last forward had them."""
        order = self._order
        return order[order.index(unit) :] if unit in order else [unit]

    def _use(self, unit: int) -> Use:
        """Return what a unit is expected to leave in a forward of the present scale."""
        row, scale = self.rows[unit], max(1.0, self._scale)
        return Use(
            int(scale * row.saved_bytes),
            int(scale * row.input_bytes),
            scale * row.seconds,
            self._kinds[unit].weight_bytes,
            again=not row.writes,
        )

    # -- a step ----------------------------------------------------------------------------------

    def needed_bytes(self) -> int:
        """Return what activations are expected to take from here on, by what was measured.

        Where the choice is free, and was made for something else, it is made anew.
        """
        for unit, (began, ended) in self._stamps.items():
            self.rows[unit].seconds = self._device.seconds_between(began, ended)
        self._stamps.clear()
        # 1. what the step had on the device, and how much of it is not explained by what units left
        units = [unit for unit in self._now or self._order if unit in self.rows]
        self._scale, self._beside_bytes = 1.0, 0
        uses, peak = [self._use(unit) for unit in units], self.meter.peak_bytes()
        self._beside_bytes = max(0, peak - self._peak_bytes(units, uses))
        if self._is_guess:  # now it is known
            self._peaks.clear()
            self._is_guess = False
        self._peaks.append(peak)
        # 2. choose for the largest inputs of the last steps
        inputs = sum(use.input_bytes for use in uses)
        self._inputs.append(inputs)
        if self._choice.may_change and inputs and self._is_due():
            self._chosen_for = max(self._inputs)
            self._scale = self._chosen_for / inputs
            self._choose_all(units)
            self._scale = 1.0
        return max(self._peaks)

    def _is_due(self) -> bool:
        """Whether policies were chosen for other inputs, or do not fit."""
        top = max(self._inputs)
        fits = max(self._peaks) <= self.budget.most_bytes - self.budget.plan.least_bytes
        if fits:
            self._failed.clear()
        return not (SHRUNK * self._chosen_for <= top <= self._chosen_for and fits)

    def _choose_all(self, units: Sequence[int]) -> None:
        """Choose for all units, with room for as much else as there can be.

        Best is that the whole model stays on the device, then that a second unit's frames fit, then
        that the gradient ring does.
        """
        uses, plan = [self._use(unit) for unit in units], self.budget.plan
        most, ring = self.budget.most_bytes, self._ring.useful_bytes
        rooms = [most - 2 * plan.least_bytes - ring, most - plan.least_bytes - ring]
        rooms.append(most - plan.least_bytes)
        if self._may_stay:
            rooms.insert(0, most - plan.home_bytes - ring)
        before = dict(self._choice.policies)
        if max(self._peaks) > rooms[-1]:
            self._failed.append(before)
        if not any(self._choose(units, uses, room) for room in rooms):
            self._choose(units, uses, rooms[-1])
        if self._choice.policies == before:
            return
        # what nobody has tried yet is tried with as few frames as may be needed, and then known
        largest = max((use.saved_bytes for use in uses), default=0)
        self._peaks.clear()
        self._peaks.append(min(self._peak_bytes(units, uses) + largest, rooms[-1]))
        self._is_guess = True

    def ring_bytes(self, activation_bytes: int) -> int:
        """Return what the gradient ring can have beside activations and the fewest frames."""
        left = self.budget.most_bytes - self.budget.plan.least_bytes - activation_bytes
        return max(0, min(self._ring.useful_bytes, left))

    def charge(self, activation_bytes: int, ring_bytes: int) -> None:
        """Charge activations and the gradient ring, in place of what was charged before."""
        budget = self.budget
        self._ledger.credit(Tier.HBM, Kind.ACTIVATION, budget.activation_bytes)
        budget.activation_bytes = 0
        self._ledger.charge(Tier.HBM, Kind.ACTIVATION, activation_bytes + ring_bytes, "activations")
        budget.activation_bytes, budget.measured = activation_bytes + ring_bytes, True
        self._ring.limit_bytes = ring_bytes

    def largest(self) -> str:
        """Return the unit that saves most, for an error."""
        if not self.rows:
            return ""
        unit, row = max(self.rows.items(), key=lambda item: item[1].saved_bytes)
        return f"unit {self._names[unit]!r} saves {format_bytes(row.saved_bytes)}"

    def check(self, live_bytes: int) -> None:
        """Raise BudgetError where what is alive on the device passes the budget (simulated).

        Before it does, gradients on their way down are waited for.
        """
        most = self._beside_frames
        if live_bytes + self._ring.limit_bytes <= most:
            return
        if live_bytes <= most:
            self._ring.limit_bytes = most - live_bytes
            with unmeasured():  # where they are added, it is on HOST
                self._ring.poll()
            return
        self._spoiled, budget = True, self.budget
        where = "" if self._open is None else f" in unit {self._names[self._open.unit]!r}"
        needed = live_bytes + budget.buffer_bytes + budget.plan.least_bytes
        raise BudgetError(
            f"activations take {live_bytes} bytes{where}, {live_bytes - most} more than"
            f" hbm={format_bytes(budget.hbm or 0)} has beside buffers and frames; {self.largest()}",
            advice=f"raise hbm= to {needed} bytes or more, lower the batch, or use"
            " activations='auto', micro_batch= or fused_loss=",
            tier="HBM",
            needed_bytes=needed,
        )


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the distinct strided tensors in a value."""
    found = {id(t): t for t in tree_iter(value) if isinstance(t, torch.Tensor)}
    with plainly():
        return [t for t in found.values() if t.layout is torch.strided]

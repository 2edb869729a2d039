"""Forecasts the bytes that each unit's forward leaves on the device (floor 2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hetero.device import Device, Ticket
from hetero.plan.activations import Policy, Use, peaks, staying_bytes
from hetero.train.activations.caches import is_cache
from hetero.train.activations.held import GraphFootprint
from hetero.train.activations.structure import leaves_of
from hetero.train.model.binding import without_faults
from hetero.types import format_bytes


@dataclass(slots=True)
class UnitLeft:
    """Bytes that a unit's forward left when last seen."""

    policy: Policy
    input_bytes: int
    left_bytes: int
    saved_bytes: int
    """All bytes that autograd saves; guessed from others of its kind if never kept."""
    held_bytes: int
    """Held by graphs when it began, at most, in this step or the last one."""
    seconds: float | None
    """Of its compute; None until it is measured."""


class OpenUnit(NamedTuple):
    """The unit whose forward runs."""

    unit: int
    inputs: list[torch.Tensor]
    input_bytes: int
    held_bytes: int
    began: Ticket | None
    """If its compute is measured."""


COMPUTING = 2  # units' bytes that backward takes on top of what forward left
SUMMING = 3  # times a unit's weights: of two bytes, a gradient, and a fused loss's sum in fp32
MEASURED = 3  # forwards of a unit whose compute is measured: in the first ones, copies hold it up


class UnitKind(NamedTuple):
    """A kind of units that are alike."""

    module: type | None
    weight_bytes: int
    """Of the parameters pinned by its access."""


class Forecast:
    """Bytes that units left, and, in proportion to their inputs, will leave.

    Args:
        device: measures the compute of units; None: it is not measured.
        names: of the units.
        kinds: of the units; those of one kind are expected to save alike.
        may_recompute: whether a unit is proven to be recomputable.
    """

    def __init__(
        self,
        device: Device | None,
        footprint: GraphFootprint,
        *,
        names: Sequence[str],
        kinds: Sequence[UnitKind],
        may_recompute: Callable[[int], bool],
    ) -> None:
        self.rows: dict[int, UnitLeft] = {}
        """By unit."""
        self.open: OpenUnit | None = None
        self.scale = 1.0
        """Bytes that this forward leaves, relative to the last one."""
        self.beside_bytes = 0
        """On the device at the peak, on top of those that units left, in all forwards."""
        self.earlier = 0
        """Forwards of a step that wait for their backwards when its last one begins."""
        self.outside_bytes = 0
        """Held by graphs of those, on top of the bytes that units left."""
        self.end_bytes = 0
        """On the device after the last unit's forward, on top of those held by graphs."""
        self.between_bytes = 0
        """Saved between units; they stay on the device if no unit offloads."""
        self._device = device
        self._footprint = footprint
        self._names = names
        self._kinds = kinds
        self._may_recompute = may_recompute
        self._order: list[int] = []  # units of the last forward
        self._places: dict[int, int] = {}  # the first of each unit in this order
        self._ahead: dict[float, list[int]] = {}  # by scale: the peak from each place on
        self._staying: dict[float, int] = {}  # by scale: left on the device by a whole forward
        self._now: list[int] = []  # units of this forward, so far
        self._n_measured: Counter[int] = Counter()  # forwards, by unit
        self._stamps: dict[int, tuple[Ticket, Ticket]] = {}  # of this step's measured units
        self._held_bytes = 0  # by graphs, when the last unit's forward ended
        self._began: dict[int, int] = {}  # by unit: held by graphs when it began, in this step

    # -- a forward -------------------------------------------------------------------------------

    def begin(self, *, anew: bool) -> None:
        """Begin a forward of the whole model; ``anew`` after one that was abandoned."""
        if self._now and not anew:
            self._order = self._now
            places = zip(reversed(self._order), reversed(range(len(self._order))), strict=True)
            self._places = dict(places)
        self._now, self.open, self.scale = [], None, 1.0
        self.chosen()
        self._footprint.forward_begins()

    def grows(self, unit: int, input_bytes: int) -> bool:
        """Whether this forward leaves more than the last one, by a known unit's inputs."""
        row = self.rows[unit]
        if row.input_bytes:
            self.scale = max(self.scale, input_bytes / row.input_bytes)
        return self.scale > 1.0 or self._footprint.live_bytes > row.held_bytes

    def enter(self, unit: int, inputs: list[torch.Tensor]) -> None:
        self.open = OpenUnit(
            unit,
            inputs,
            sum(tensor.nbytes for tensor in inputs),
            self._footprint.live_bytes,
            self._stamp() if self._n_measured[unit] < MEASURED else None,
        )

    def _stamp(self) -> Ticket | None:
        return None if self._device is None else self._device.stamp()

    def entered(self, unit: int) -> None:
        """The weights of the open unit are there: it computes from now on."""
        if self.open is not None and self.open.unit == unit and self.open.began is not None:
            self.open = self.open._replace(began=self._stamp())

    def note(self, policy: Policy) -> None:
        """End the open unit's forward: record the bytes it left under its policy."""
        if self.open is None:
            return
        seen, unit = self.open, self.open.unit
        left = max(0, self._footprint.live_bytes - seen.held_bytes)
        row, n_bytes = self.rows.get(unit), seen.input_bytes
        saved = self._saved(unit, n_bytes) if policy.recompute else left
        ended = self._stamp() if seen.began is not None else None
        if seen.began is not None and ended is not None:  # read when the step is over, not here
            self._stamps[unit] = seen.began, ended
            self._n_measured[unit] += 1
        seconds = None
        if row is not None:
            seconds = row.seconds
            if row.input_bytes and seconds is not None:
                seconds *= n_bytes / row.input_bytes
            if row.policy == policy and row.left_bytes:
                self.scale = left / row.left_bytes
        began = self._began[unit] = max(seen.held_bytes, self._began.get(unit, 0))
        held = began if row is None else max(began, row.held_bytes)
        self.rows[unit] = UnitLeft(policy, n_bytes, left, saved, held, seconds)
        self._now.append(unit)
        self._held_bytes = self._footprint.live_bytes

    def _saved(self, unit: int, input_bytes: int) -> int:
        """Return the bytes a unit would save, by its last forward or by its kind."""
        row = self.rows.get(unit)
        alike = [row] if row is not None else self._of_kind(unit, self.rows)
        known = [r for r in alike if r.input_bytes]
        return int(max((r.saved_bytes * input_bytes / r.input_bytes for r in known), default=0))

    def knows_kind(self, unit: int) -> bool:
        """Whether a unit of this one's kind showed what it saves."""
        return any(not row.policy.recompute for row in self._of_kind(unit, self.rows))

    def unseen_bytes(self, held_bytes: int) -> int:
        """Return the bytes expected in the first backward, if ``held_bytes`` are there now and
        units to come leave what others of their kind left, those of unknown kinds nothing; with
        room to compute."""
        left: dict[UnitKind, int] = {}
        for unit, row in self.rows.items():
            kind = self._kinds[unit]
            left[kind] = max(left.get(kind, 0), row.saved_bytes)
        unseen = (kind for unit, kind in enumerate(self._kinds) if unit not in self.rows)
        coming = sum(left.get(kind, 0) for kind in unseen)
        return held_bytes + coming + COMPUTING * max(left.values(), default=0)

    @property
    def gradient_bytes(self) -> int:
        """The most bytes that gradients of one unit's weights are expected to take."""
        return SUMMING * max((kind.weight_bytes for kind in self._kinds), default=0)

    def expected_bytes(self, unit: int) -> int:
        """Return the bytes that a unit is expected to save: of one never seen, as others of its
        kind, or as the largest."""
        if unit in self.rows:
            return self.use(unit).saved_bytes
        rows = self._of_kind(unit, self.rows) or [*self.rows.values()]
        return max((row.saved_bytes for row in rows), default=0)

    def _of_kind(self, unit: int, others: Iterable[int]) -> list[UnitLeft]:
        kind = self._kinds[unit]
        return [self.rows[other] for other in others if self._kinds[other] == kind]

    # -- ahead -----------------------------------------------------------------------------------

    def ahead(self, unit: int) -> list[int]:
        """Return the units from this one on, in the order of the last forward."""
        at = self._places.get(unit)
        return [unit] if at is None else self._order[at:]

    def use(self, unit: int) -> Use:
        """Return a unit's expected `Use` in a forward of the present scale."""
        row, scale = self.rows[unit], max(1.0, self.scale)
        return Use(
            int(scale * row.saved_bytes),
            int(scale * row.input_bytes),
            scale * (row.seconds or 0.0),
            self._kinds[unit].weight_bytes,
            again=self._may_recompute(unit),
        )

    def working_bytes(self, *, goes_down: bool) -> int:
        """Return the bytes expected at the peak on top of those that units leave.

        ``goes_down``: whether any unit offloads; tensors saved between units then go down, too.
        """
        return self._scaled(self.beside_bytes, goes_down=goes_down)

    def standing_bytes(self, units: Sequence[int], policies: Mapping[int, Policy]) -> int:
        """Return the bytes that graphs of earlier forwards are expected to hold at the peak."""
        uses, chosen = [self.use(unit) for unit in units], [policies[unit] for unit in units]
        return self.outside + self.earlier * staying_bytes(uses, chosen)

    @property
    def outside(self) -> int:
        """The bytes of `outside_bytes` in a forward of the present scale."""
        return int(max(1.0, self.scale) * self.outside_bytes)

    @property
    def to_come(self) -> int:
        """How many of `earlier` forwards are this one, or come after it."""
        return max(0, self.earlier - self._footprint.waiting)

    def behind_bytes(self, *, goes_down: bool) -> int:
        """Return the bytes expected after the last unit's forward on top of those units left."""
        return self._scaled(self.end_bytes, goes_down=goes_down)

    def _scaled(self, n_bytes: int, *, goes_down: bool) -> int:
        between = 0 if goes_down else self.between_bytes
        return int(max(1.0, self.scale) * (n_bytes + between))

    def peak_bytes(
        self, units: Sequence[int], policies: Mapping[int, Policy], *, overlaps: bool = True
    ) -> int:
        """Return the bytes that units are expected to have on the device at once."""
        return self._peaks(units, policies, overlaps=overlaps)[0]

    def peak_ahead(self, unit: int, policies: Mapping[int, Policy]) -> int:
        """Return `peak_bytes` of the units from this one on, while policies do not change.

        Units ask in turn, so it is computed for all at once. What forwards up to the last one will
        leave is added.
        """
        at = self._places.get(unit)
        if at is None:
            return self.peak_bytes([unit], policies)
        if self.scale not in self._ahead:
            uses = [self.use(unit) for unit in self._order]
            chosen = [policies[unit] for unit in self._order]
            self._ahead[self.scale] = self._peaks(self._order, policies)
            self._staying[self.scale] = staying_bytes(uses, chosen)
        return self._ahead[self.scale][at] + self.to_come * self._staying[self.scale]

    def chosen(self) -> None:
        """Policies have changed."""
        self._ahead.clear()
        self._staying.clear()

    def _peaks(
        self, units: Sequence[int], policies: Mapping[int, Policy], *, overlaps: bool = True
    ) -> list[int]:
        uses, chosen = [self.use(unit) for unit in units], [policies[unit] for unit in units]
        goes_down = any(policy.offload for policy in policies.values())
        working, end = (of(goes_down=goes_down) for of in (self.working_bytes, self.behind_bytes))
        return peaks(uses, chosen, working, end_bytes=end, overlaps=overlaps)

    # -- a step ----------------------------------------------------------------------------------

    def close(
        self, peak: int, end: int, policies: Mapping[int, Policy], *, overlaps: bool
    ) -> list[int]:
        """End a step and return its units.

        ``peak`` bytes were on the device, ``end`` of them after the last unit's forward.
        """
        for unit, (began, ended) in self._stamps.items():
            row = self.rows[unit]
            seconds = 0.0 if self._device is None else self._device.seconds_between(began, ended)
            row.seconds = seconds if row.seconds is None else min(row.seconds, seconds)
        self._stamps.clear()
        for unit, held in self._began.items():
            self.rows[unit].held_bytes = held
        self._began.clear()
        units = self.units()
        if any(policy.offload for policy in policies.values()):
            self.between_bytes = self._footprint.between_bytes
        self.scale, self.beside_bytes, self.end_bytes, self.outside_bytes = 1.0, 0, 0, 0
        # what earlier forwards hold stands until their backwards: it is no work of a unit
        self.earlier, standing = self._footprint.earlier, self._footprint.earlier_bytes
        self.outside_bytes = max(0, standing - self.standing_bytes(units, policies))
        expected = standing + self.peak_bytes(units, policies, overlaps=overlaps)
        self.beside_bytes = max(0, peak - expected - self._stayed_bytes())
        self.end_bytes = max(0, end - self._held_bytes)
        return units

    def _stayed_bytes(self) -> int:
        """Return the bytes that stayed up for lack of room below, on top of those of the two units
        that are on the device at once in any case."""
        offloaded = (row.left_bytes for row in self.rows.values() if row.policy.offload)
        return max(0, self._footprint.stayed_bytes - 2 * max(offloaded, default=0))

    def units(self) -> list[int]:
        """Return the units of the last forward, in its order."""
        return [unit for unit in self._now or self._order if unit in self.rows]

    def where(self) -> str:
        """Return the running unit, for an error."""
        return "" if self.open is None else f" in unit {self._names[self.open.unit]!r}"

    def largest(self) -> str:
        """Return the unit that saves most, for an error."""
        if not self.rows:
            return ""
        unit, row = max(self.rows.items(), key=lambda item: item[1].saved_bytes)
        return f"unit {self._names[unit]!r} saves {format_bytes(row.saved_bytes)}"


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the distinct strided tensors in a value.

    Tensors of caches of keys and values are left out (pytrees see them in older transformers):
    they grow from unit to unit, and the bytes that a unit leaves do not grow with them.
    """
    leaves = leaves_of(value, is_cache)
    found = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    with without_faults():
        return [t for t in found.values() if t.layout is torch.strided]

"""Foresees whether activations fit next to a model that stays on its device (floor 2).

[Note: watched]  Such a model was chosen to stay before any activation was measured. So its first
steps are watched: before a unit computes, it is known what units left so far, what is free, and
what units to come will leave. A unit that will not find room gives way. The watch ends after two
steps in which none did: wrappers of units come off. It begins again with a forward that is larger
than those seen, and after a lack of room.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hetero.device import first_line
from hetero.errors import OutOfMemory
from hetero.internals import RUN_BACKWARD, Replacement, in_backward, install
from hetero.plan.activations import KEEP, OFFLOAD, RECOMPUTE
from hetero.train.activations.allocator import DeviceBytes
from hetero.train.activations.forecast import tensors_of
from hetero.train.activations.policy import ActivationPolicies, Unwatched
from hetero.train.activations.proof import DIGEST_BYTES
from hetero.train.activations.saved import SavedTensors
from hetero.train.engine.budget import paging_bytes
from hetero.train.engine.dividing import forecast_of
from hetero.train.engine.fitting import MARGIN, PATIENCE
from hetero.train.engine.forward_room import ForwardRoom
from hetero.train.engine.setup import Setup
from hetero.train.model.graph import leaves_of
from hetero.types import format_bytes, noop

QUIET = 2  # steps in a row in which no unit gave way, until the watch ends
UNSEEN = 1 / 2  # of the room, in the first forward, for what never ran: a head, a loss, backward
RETREAT = 1 / 8  # of the room, left free for good after each lack of it


class NoForesight:
    """Of a model in RAM, which no allocator counts."""

    is_decided = True

    def attach(self) -> None: ...

    def step_made(self) -> None: ...

    def close(self) -> None: ...


class Foresight:
    """Watches a model that stays, and refuses in hetero's words what found no room."""

    def __init__(
        self,
        setup: Setup,
        activations: ActivationPolicies,
        saved: SavedTensors,
        counted: DeviceBytes,
    ) -> None:
        self._setup = setup
        self._activations = activations
        self._saved = saved
        self._room = ForwardRoom(setup, counted)
        self._forecast = forecast_of(setup, saved.footprint, activations, device=None)
        self._keeps = dict.fromkeys(activations.policies, KEEP)
        self._params = {id(param) for param in setup.params}
        self._unguard: Callable[[], object] = noop
        self._end: Callable[[], None] | None = None  # of the watch, while there is one
        self._quiet = 0  # steps in a row in which no unit gave way
        self._gave_way = 0  # forwards of units, in this step
        self._in_vain = 0  # steps in a row that tried for proofs, and made none
        self._seen_bytes = 0  # inputs of the largest forward that fitted
        self._input_bytes = 0  # and of this step's largest
        self._beside_bytes = 0  # on top of what units leave, at the peaks of this step
        self._withheld = 0.0  # share of the room that is left free, after lacks of it
        self._retreats = False  # whether all units give way, after one
        self._where = ""

    # -- on and off ------------------------------------------------------------------------------

    def attach(self) -> None:
        """Follow the model's forwards and backwards."""
        setup = self._setup
        self._room.attach()
        setup.hooks.guard_memory(setup.model, self)
        _following.add(self)
        self._unguard = finalizer = weakref.finalize(self, install(GUARDS))
        finalizer.atexit = False

    def close(self) -> None:
        """Follow nothing any more."""
        _following.discard(self)
        self._unguard()

    def _watch(self) -> None:
        """Begin to watch, or watch for longer."""
        self._quiet = 0
        if self._end is None:
            self._activations.watch = self
            self._activations.overlaps = False  # the device holds less meanwhile
            self._end = noop  # units that are cut into slices have their wrappers for good
            if not self._activations.shapes:
                units, hooks = self._setup.blueprint.units, self._setup.hooks
                self._end = hooks.watch_units(units, self._activations)

    def _rest(self) -> None:
        """End the watch: units run as torch runs them."""
        if self._end is not None:
            self._end()
            self._end = None
            self._activations.watch = Unwatched()

    @property
    def is_decided(self) -> bool:
        """Whether the next step has no proof to try for."""
        return not self._activations.tries

    # -- a forward -------------------------------------------------------------------------------

    def begins(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """A forward of the whole model begins: watch it if it is larger than those that fitted."""
        activations = self._activations
        if not activations.may_change or not torch.is_grad_enabled() or in_backward():
            return
        n_bytes = sum(tensor.nbytes for tensor in tensors_of((args, kwargs)))
        if n_bytes > self._seen_bytes:
            self._watch()
        if self._end is not None:
            self._input_bytes = max(self._input_bytes, n_bytes)
            if self._end is not noop:
                activations.begin(args, kwargs)

    def begin(self) -> None:
        """A watched forward begins, on top of what earlier ones of the step left."""
        anew = not self._room.is_open
        if anew:
            self._activations.tries = self._may_try and self._gave_way > 0
            self._gave_way = 0
        else:
            self._measure()
        self._room.begin()
        self._look()
        self._forecast.begin(anew=anew and self._retreats)

    @contextmanager
    def around(self, unit: int, args: Any, kwargs: Any) -> Iterator[None]:
        """Choose a unit's policy before its forward, and note the bytes that it left."""
        forecast, activations = self._forecast, self._activations
        if forecast.open is not None:  # inside another one
            yield
            return
        inputs = tensors_of((args, kwargs))
        self._look()
        activations.policies[unit] = KEEP
        if self._retreats or not self._fits(unit, inputs):
            self._give_way(unit)
        pushed = activations.policy_of(unit).offload and self._saved.push_where_differentiated()
        forecast.enter(unit, inputs)
        try:
            yield
            self._look()
            forecast.note(activations.used(unit))
        except torch.OutOfMemoryError:
            self._where = forecast.where()
            raise
        finally:
            forecast.open = None
            if pushed:
                self._saved.pop()

    def entered(self, unit: int) -> None:
        """A unit computes."""

    def _look(self) -> None:
        """Take all bytes that came since the forward began for bytes that graphs hold."""
        self._saved.footprint.live_bytes = self._room.taken_bytes

    # -- room ------------------------------------------------------------------------------------

    def _fits(self, unit: int, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether there is room for a unit to keep its activations, if all after it do so."""
        forecast, held = self._forecast, self._saved.footprint.live_bytes
        room = (1 - MARGIN - self._withheld) * self._room.n_bytes
        if self._activations.proofs.is_open(unit):
            room -= DIGEST_BYTES
        if unit not in forecast.rows:
            return forecast.unseen_bytes(held) <= UNSEEN * room
        forecast.grows(unit, sum(tensor.nbytes for tensor in inputs))
        return held + forecast.peak_ahead(unit, self._keeps) <= room

    def _give_way(self, unit: int) -> None:
        """Recompute a unit if it is proven to give the same bits; else let its activations go down,
        or recompute it and compare, where there is no room below."""
        activations = self._activations
        if activations.proofs.holds(unit):
            activations.policies[unit] = RECOMPUTE
        else:
            if self._may_try and not activations.tries:
                activations.tries = True
            activations.policies[unit] = OFFLOAD
            if activations.room_below() < self._forecast.expected_bytes(unit):
                activations.policies[unit] = KEEP
                activations.recompute_unproven(unit)
        self._gave_way += activations.policies[unit] != KEEP

    @property
    def _may_try(self) -> bool:
        """Whether units that gave way may be computed again for a proof."""
        return self._in_vain < PATIENCE

    # -- a step ----------------------------------------------------------------------------------

    def step_made(self) -> None:
        """A step is made: the watch ends if no unit gave way for some."""
        activations = self._activations
        if self._end is None or not self._room.is_open:
            return
        self._measure()
        self._room.end()
        self._beside_bytes = 0
        if activations.tries:
            self._in_vain = 0 if activations.proofs.learned else self._in_vain + 1
        activations.proofs.learned = False
        self._retreats = False
        if not activations.offloads:
            self._setup.offload.shrink()
        self._seen_bytes = max(self._seen_bytes, self._input_bytes)
        self._quiet = 0 if self._gave_way else self._quiet + 1
        if self._quiet >= QUIET:
            activations.tries = False
            self._rest()

    def _measure(self) -> None:
        """Note the peak of a forward, and of what came after it, on top of what units left."""
        forecast, activations = self._forecast, self._activations
        policies = {unit: activations.used(unit) for unit in activations.policies}
        forecast.close(self._room.peak_bytes, 0, policies, overlaps=False)
        self._beside_bytes = max(self._beside_bytes, forecast.beside_bytes)
        forecast.beside_bytes = self._beside_bytes
        self._saved.footprint.restart()

    # -- no room ---------------------------------------------------------------------------------

    def leads_here(self, roots: Sequence[Any]) -> bool:
        """Whether a graph leads to parameters of this model."""
        return any(id(leaf) in self._params for leaf in leaves_of(roots))

    def refusal(self, error: torch.OutOfMemoryError, where: str = "") -> OutOfMemory:
        """Return the error for a forward, or a backward, that found no room; watch what follows."""
        setup, where = self._setup, where or self._where
        states = setup.blueprint.home_bytes + setup.budget.buffer_bytes
        there = self._room.most_bytes
        needed = max(there, states + self._room.taken_bytes) + 1
        if self._activations.may_change and torch.is_grad_enabled():
            self._withheld = min(UNSEEN, self._withheld + RETREAT)
            self._retreats = True
            self._room.forget()
            self._where = ""
            self._watch()
        return OutOfMemory(
            f"activations take more{where} than the {format_bytes(max(0, there - states))} that"
            f" weights, gradients and states leave of {format_bytes(there)}: {first_line(error)}",
            advice=f"{self._advice()}, or let weights be paged, with hbm= of at most"
            f" {paging_bytes(setup.blueprint)} bytes; with hbm= above that, more than {needed - 1}"
            " are needed",
            tier="HBM",
            needed_bytes=needed,
        )

    def _advice(self) -> str:
        if self._activations.may_change:
            return "lower the batch, use micro_batch= or fused_loss="
        return "use activations='auto', lower the batch"


_following: weakref.WeakSet[Foresight] = weakref.WeakSet()


def _refusing(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward whose lack of room is an error of the model that the graph leads to."""

    @functools.wraps(run)
    def backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return run(roots, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            found = next((each for each in _following if each.leads_here(roots)), None)
            if found is None:
                raise
            raise found.refusal(error, " in backward") from error

    return backward


GUARDS: tuple[Replacement, ...] = (RUN_BACKWARD.replaced(_refusing),)
"""Replaced functions of torch while models stay on a CUDA device."""

"""Room on the device for the step of a model that stays there and that torch steps (floor 2).

[Note: kept step]  torch's rules allocate while they write: the first step makes states, and foreach
steps make copies of whole lists after they have decayed weights and moved averages. A lack of room
half-way would leave parameters of two steps. So, where a step of this kind was measured before, and
room is short, what it takes is asked for before anything is written. A first one is made with
copies of what it may write to in RAM, from which it is undone; unless there is plenty of room, or
RAM has none. Then a step that had begun to write is torn: the error says so, and the model is
refused until a checkpoint is loaded.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from hetero.device import first_line
from hetero.errors import OutOfMemory
from hetero.train.activations.allocator import AllocatedBytes
from hetero.train.engine.budget import paging_bytes
from hetero.train.engine.setup import Setup
from hetero.train.update.rules import Group, Rule, State, frozen, kinds_of
from hetero.types import Kind, Tier, format_bytes

PLENTY = 4  # copies of the gradients, on top of states: no rule of torch's makes so many at once
SHORT = 2  # times what a step takes: if less is free, room is asked for before
States = defaultdict[torch.Tensor, State]


class NoStepRoom:
    """Of a model in RAM, which no allocator counts."""

    torn = ""

    def kept(self, groups: Sequence[Group], states: States) -> AbstractContextManager[None]:
        """Make a step inside."""
        return nullcontext()


class StepRoom:
    """Makes torch's steps such that a lack of room leaves the last one's weights, if it can."""

    def __init__(self, setup: Setup, rule: Rule) -> None:
        self.torn = ""
        """Why parameters are of two steps; "" if they are not."""
        self._setup = setup
        self._rule = rule
        self._counted = AllocatedBytes(setup.device)
        self._takes: dict[object, int] = {}  # bytes of each kind of step that was measured
        self._lists = False  # whether parameters are stepped as lists

    @contextmanager
    def kept(self, groups: Sequence[Group], states: States) -> Iterator[None]:
        """Make a step inside; OutOfMemory if the device has no room for it ([Note: kept step])."""
        self.torn = ""
        params = self._stepped(groups)
        kind = self._kind(groups, params, states)
        self._lists = any(
            group.get("foreach", False) is not False and not group.get("fused") for group in groups
        )
        takes = self._takes.get(kind)
        before: Before | Versions = UNSEEN
        if takes is None:
            before = self._before(groups, params, states)
            self._counted.restart()
            began = self._counted.now_bytes()
        elif self._is_short_of(SHORT * takes):
            self._ask_for(takes, params)
            before = self._versions(params, states)
        try:
            yield
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)  # which hold what the step made on HBM
            raise self._failed(before, takes, params, states, error) from error
        finally:
            if isinstance(before, Before):
                self._setup.ledger.credit(Tier.HOST, Kind.BUFFER, before.n_bytes)
        if takes is None:
            self._takes[kind] = self._counted.peak_bytes() - began

    # -- what a step writes to -------------------------------------------------------------------

    def _stepped(self, groups: Sequence[Group]) -> list[torch.Tensor]:
        """Return what the parameters with a gradient have inside."""
        parts = self._setup.parts
        found = (p for group in groups for p in group["params"])
        return [p for p in found if parts.grad(p) is not None]

    def _kind(
        self, groups: Sequence[Group], params: Sequence[torch.Tensor], states: States
    ) -> object:
        """Return what decides how many bytes a step takes."""
        fresh = sum(1 for param in params if not states.get(param))
        n_bytes = sum(param.nbytes for param in params)
        return tuple(map(kinds_of, groups)), len(params), n_bytes, fresh

    def _is_short_of(self, n_bytes: int) -> bool:
        """Whether less is free; the driver is asked only if the allocator's own blocks are less."""
        kept = self._setup.device.memory.reserved_bytes() - self._counted.now_bytes()
        return kept < n_bytes and self._free_bytes() < n_bytes

    def _free_bytes(self) -> int:
        return self._counted.most_bytes() - self._counted.now_bytes()

    def _state_bytes(self, params: Sequence[torch.Tensor], states: States) -> int:
        """Return the bytes of states that are about to appear."""
        blueprint = self._setup.blueprint
        fresh = [param for param in params if not states.get(param)]
        return sum(p.numel() * blueprint.costs[self._setup.bucket(p).id].state for p in fresh)

    def _before(
        self, groups: Sequence[Group], params: Sequence[torch.Tensor], states: States
    ) -> Before | Versions:
        """Return copies in RAM, if the device may lack room, and RAM does not."""
        setup = self._setup
        gradients = sum(param.nbytes for param in params)
        known = {param: states[param] for param in params if param in states}
        n_bytes = gradients + sum(_bytes_of(state) for state in known.values())
        free = setup.ledger.free(Tier.HOST)
        room = setup.ram() if free is None else min(free, setup.ram())
        plenty = self._state_bytes(params, states) + PLENTY * gradients
        if self._free_bytes() >= plenty or n_bytes > room:
            return self._versions(params, states)
        setup.ledger.charge(Tier.HOST, Kind.BUFFER, n_bytes, "a copy before a first step")
        return Before(
            n_bytes,
            [(group, frozen(group)) for group in groups],
            [(param, self._lowered(param)) for param in params],
            {p: {k: (v, self._lowered(v)) for k, v in state.items()} for p, state in known.items()},
        )

    def _lowered(self, value: Any) -> Any:
        """Return a copy in RAM of a parameter, or of a state's value."""
        if not isinstance(value, torch.Tensor):
            return value
        return self._setup.parts.local(value).detach().to("cpu", copy=True)

    def _versions(self, params: Sequence[torch.Tensor], states: States) -> Versions:
        """Return what tells whether a rule that is known has written."""
        if self._rule.known is None:
            return UNSEEN
        known = {param: dict(states[param]) for param in params if param in states}
        values = [*params, *(v for state in known.values() for v in state.values())]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        return Versions([(each, self._setup.parts.version(each)) for each in tensors], known)

    # -- room ------------------------------------------------------------------------------------

    def _ask_for(self, n_bytes: int, params: Sequence[torch.Tensor]) -> None:
        """Take so many bytes in pieces like those of a step, and leave them to the allocator."""
        held: list[torch.Tensor] = []
        left = n_bytes
        try:
            while left > 0:
                for param in params:
                    held.append(torch.empty_like(self._setup.parts.local(param).detach()))
                    left -= held[-1].nbytes
                    if left <= 0:
                        break
        except torch.OutOfMemoryError as error:
            held.clear()
            raise self._refusal(n_bytes, error, UNTOUCHED) from error

    def _failed(
        self,
        before: Before | Versions,
        takes: int | None,
        params: Sequence[torch.Tensor],
        states: States,
        error: torch.OutOfMemoryError,
    ) -> OutOfMemory:
        """Undo a step, and return its error; if that is impossible, the model is torn."""
        if isinstance(before, Before):
            self._restore(before, params, states)
        elif before.has_changed(self._setup.parts.version):
            self.torn = NO_ROOM
            return self._refusal(takes, error, TORN)
        else:
            _take_back(before.states, params, states)
        return self._refusal(takes, error, UNTOUCHED)

    def _restore(self, before: Before, params: Sequence[torch.Tensor], states: States) -> None:
        for group, settings in before.groups:
            group.update(settings)
        for param, value in before.params:
            self._setup.parts.local(param).detach().copy_(value)
        kept = {p: {k: v for k, (v, _) in state.items()} for p, state in before.states.items()}
        _take_back(kept, params, states)
        for state in before.states.values():
            for value, saved in state.values():
                if isinstance(value, torch.Tensor):
                    self._setup.parts.local(value).copy_(saved)

    def _refusal(self, takes: int | None, error: torch.OutOfMemoryError, left: str) -> OutOfMemory:
        return no_room(self._setup, error, left, takes=takes, lists=self._lists)


def no_room(
    setup: Setup,
    error: torch.OutOfMemoryError,
    left: str,
    *,
    takes: int | None = None,
    lists: bool = False,
) -> OutOfMemory:
    """Return the error for a step that found no room, which left weights as ``left`` says.

    ``takes``: the bytes of such a step, if they were measured. ``lists``: whether the optimizer
    steps all parameters at once, with a copy of them all.
    """
    counted = AllocatedBytes(setup.device)
    now, most = counted.now_bytes(), counted.most_bytes()
    less = "give the optimizer foreach=False, which copies one parameter at a time, " * lists
    known = takes is not None
    need = f"the {format_bytes(takes or 0)} that this step takes" if known else "this step"
    needed = max(most + 1, now + (takes or 0))
    return OutOfMemory(
        f"{format_bytes(max(0, most - now))} of {format_bytes(most)} are free for {need}; {left}:"
        f" {first_line(error)}",
        advice=f"let go of other tensors on the device, {less}or let weights be paged, with hbm= of"
        f" at most {paging_bytes(setup.blueprint)} bytes; a step needs"
        f" {'' if known else 'at least '}{needed} bytes of HBM",
        tier="HBM",
        needed_bytes=needed,
    )


class Before(NamedTuple):
    """Copies in RAM of all that a step may write to."""

    n_bytes: int
    groups: list[tuple[Group, Group]]
    params: list[tuple[torch.Tensor, torch.Tensor]]
    states: dict[torch.Tensor, dict[str, tuple[Any, Any]]]


class Versions(NamedTuple):
    """How often each tensor was written when a step began; of a rule that is known."""

    seen: list[tuple[torch.Tensor, int]] | None
    states: dict[torch.Tensor, State]

    def has_changed(self, version: Callable[[torch.Tensor], int]) -> bool:
        """Whether the step may have written."""
        return self.seen is None or any(version(each) != was for each, was in self.seen)


UNSEEN = Versions(None, {})
NO_ROOM = "a step found no room on the device, and had perhaps changed some weights"
UNTOUCHED = "weights and states are those of the last step"
LOST = (
    "some weights may be of this step and others of the last one: build the model and the optimizer"
    " anew, and load the last checkpoint"
)
TORN = (
    "some weights may be of this step and others of the last one, so that the model must not be"
    " used before a checkpoint is loaded"
)


def _take_back(
    kept: dict[torch.Tensor, State], params: Sequence[torch.Tensor], states: States
) -> None:
    """Let states be those that there were."""
    for param in params:
        if param in kept:
            states[param].clear()
            states[param].update(kept[param])
        else:
            states.pop(param, None)


def _bytes_of(state: State) -> int:
    return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))

"""The states that torch would keep: those of a parameter's shape lie in homes (floor 2).

``state[p]`` is torch's own dict. Its tensors with one number per element are the homes' (kind
STATE), or read them; the others are as torch has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch

from hetero.errors import StateError
from hetero.memory.home import Home, cut
from hetero.memory.homestore import HomeStore
from hetero.memory.layout import Bucket, Layout, Segment
from hetero.train.gradients.slot import Factors, GradSlot
from hetero.train.model.lazy import ShownTensor, handle, is_handle
from hetero.train.update.rules import SCALARS, Group, Rule, State, copied, is_elementwise
from hetero.types import Kind

Missing = tuple[str, ...] | None  # states that appear with an update; None if none does


class Ready(NamedTuple):
    """A parameter with a gradient at home: its state, and the gradient's factors."""

    segment: Segment
    state: State
    factors: tuple[float, ...]
    slot: GradSlot
    """Keeps the gradient's home until the update is done."""
    numbers: tuple[tuple[str, Any], ...]
    """The states that are not one number per element."""

    def paged(self) -> list[str]:
        """Return the keys of its states that have one number per element."""
        shape = self.segment.spec.shape
        return [k for k, v in self.state.items() if is_elementwise(k, v, shape)]


class UpdatePiece(NamedTuple):
    """Parameters that are updated as one: neighbours that share scalars and factors, or whole
    tensors that a rule is given together."""

    rows: tuple[Ready, ...]
    missing: Missing = None

    @property
    def first(self) -> Ready:
        return self.rows[0]

    @property
    def run(self) -> slice:
        """The elements of its bucket."""
        return slice(self.first.segment.offset, self.rows[-1].segment.end)

    @property
    def numel(self) -> int:
        return self.rows[-1].segment.end - self.first.segment.offset

    def slices(self, size: int | None) -> Iterator[slice]:
        """Cut the run at multiples of ``size``; None: not at all."""
        whole = self.run
        return iter([whole]) if size is None else cut_run(whole, size)


def cut_run(run: slice, size: int) -> Iterator[slice]:
    """Cut a run at multiples of ``size``; an empty one is one piece, since it has a state."""
    return cut(run.start, run.stop, size) if run.start < run.stop else iter([run])


def pieces(rows: Sequence[Ready], missing: Sequence[Missing]) -> Iterator[UpdatePiece]:
    """Yield the longest runs of neighbours that may be updated as one."""

    def shared(numbered: tuple[int, tuple[Ready, Missing]]) -> tuple[int, Missing, object]:
        place, (row, new) = numbered
        numbers = row.numbers if new is None else numbers_in(row.state, row.segment)
        scalars = [(k, float(v) if isinstance(v, torch.Tensor) else v) for k, v in numbers]
        return row.segment.position - place, new, (tuple(row.state), scalars, row.factors)

    for (_, new, _), run in groupby(enumerate(zip(rows, missing, strict=True)), shared):
        yield UpdatePiece(tuple([row for _, (row, _) in run]), new)


def numbers_in(state: State, segment: Segment) -> tuple[tuple[str, Any], ...]:
    """Return the states that are not one number per element."""
    shape = segment.spec.shape
    return tuple(item for item in state.items() if not is_elementwise(*item, shape))


def numbers_of(factors: Sequence[Factors]) -> list[tuple[float, ...]]:
    """Return pending factors as numbers; waits for the device once, not for each."""
    distinct = {id(f.clip): f.clip for f in factors if f.clip is not None}  # often one for all
    clips = list(distinct.values())
    if clips and clips[0].is_meta:  # a plan's numbers are 1
        values = [1.0] * len(clips)
    else:
        values = torch.stack([clip.to(clips[0].device) for clip in clips]).tolist() if clips else []
    numbers = dict(zip(distinct, values, strict=True))
    known = {
        id(f): tuple(x for x in (f.unscale, numbers.get(id(f.clip), 1.0)) if x != 1.0)
        for f in {id(f): f for f in factors}.values()
    }
    return [known[id(f)] for f in factors]


class Elementwise:
    """Stands for a state with one number per element, which lies in a home."""


class StateHomes:
    """Keeps states of a parameter's shape in homes of its bucket."""

    def __init__(self, rule: Rule, layout: Layout, store: HomeStore) -> None:
        self._rule = rule
        self._layout = layout
        self._store = store

    def home(self, key: str, bucket: Bucket, dtype: torch.dtype) -> Home:
        """Return the home of a state of a bucket; it is made if there is none."""
        return self._store.get(Kind.STATE, key, bucket, dtype)

    def show(self, state: State, key: str, home: Home, segment: Segment) -> None:
        """Make a parameter's state its part of a home."""
        if not isinstance(state.get(key), ShownTensor):
            state[key] = handle(self._store, home, segment)

    def needed(self, group: Group, row: Ready) -> dict[str, Home]:
        """Return the homes of a parameter's states, those included that are about to appear.

        Homes on disk have to exist before the step, so that it does not fail half-way, and those
        that other ranks write to.
        """
        bucket, keys = self._layout.bucket(row.segment), row.paged()
        if self._store.pool.spills or bucket.n_shares > 1:
            dtype, shape = self._dtype(row.segment), row.segment.spec.shape
            found = self._rule.states_of(group, dtype, shape)
            for key, state_dtype in found.items():
                self.home(key, bucket, state_dtype)
            keys = list(dict.fromkeys((*keys, *found)))
        return {key: self._store.homes[key, bucket.id] for key in keys}

    def views(self, row: Ready) -> State:
        """Return a parameter's state for a rule: its homes' own tensors, which are pinned."""
        bucket = self._layout.bucket(row.segment).id
        homes = {k: self._store.homes[k, bucket].view(row.segment) for k in row.paged()}
        return {**row.state, **homes}

    def keep(self, row: Ready, state: State) -> None:
        """Take the state that a rule left: tensors of the parameter's shape go to the homes."""
        bucket = self._layout.bucket(row.segment)
        for key, value in state.items():
            if not is_elementwise(key, value, row.segment.spec.shape):
                row.state[key] = value
                continue
            known = (key, bucket.id) in self._store.homes
            home = self.home(key, bucket, value.dtype)
            if not (home.stays or known):
                raise StateError(f"state {key!r} of {row.segment.spec.name!r} was not foreseen")
            if home.is_share:
                home.write(row.segment, value)
            elif value is not (view := home.view(row.segment)):
                view.copy_(value)
            self.show(row.state, key, home, row.segment)

    def share(self, bucket: Bucket, piece: UpdatePiece, after: State) -> None:
        """Give every parameter of a run its part of the run's state."""
        for row in piece.rows:
            for key, value in after.items():
                if isinstance(value, Elementwise):
                    self.show(row.state, key, self._store.homes[key, bucket.id], row.segment)
                elif isinstance(row.state.get(key), torch.Tensor):
                    row.state[key].copy_(value)
                else:
                    row.state[key] = copied(value)

    def ready(self, slot: GradSlot, state: State, factors: tuple[float, ...]) -> Ready:
        """Return a parameter's row; states that do not lie in homes come there first."""
        segment, homes = slot.segment, self._store.homes
        bucket, numbers = self._layout.home[segment.index][0], []
        for item in state.items():
            key, value = item
            known = homes.get((key, bucket))
            if known is not None and value is known.view(segment):
                continue  # as the last step left it
            if key not in SCALARS and is_elementwise(key, value, segment.spec.shape):
                self.adopt(segment, state)
                return Ready(segment, state, factors, slot, numbers_in(state, segment))
            numbers.append(item)
        return Ready(segment, state, factors, slot, tuple(numbers))

    def adopt(self, segment: Segment, state: State, *, own: bool = False) -> State:
        """Return a state whose tensors of the parameter's shape lie in the homes.

        With ``own`` the other tensors are copied too, as when a state dict is loaded, to where
        updates run: optimizers that stepped on the device have them there.
        """
        bucket = self._layout.bucket(segment)
        for key, value in state.items():
            if own:
                value = self._rule.loaded(key, value, self._dtype(segment))
            if not is_elementwise(key, value, segment.spec.shape):
                state[key] = self._here(value, bucket) if own else value
                continue
            home = self.home(key, bucket, value.dtype)
            if not is_handle(value, home, segment):
                home.write(segment, value)
                state[key] = handle(self._store, home, segment)
        return state

    def _here(self, value: Any, bucket: Bucket) -> Any:
        """Return a copy of a state's value where updates of a bucket run."""
        if not isinstance(value, torch.Tensor):
            return value
        place = self._store.homes[Kind.PARAM.value, bucket.id].device
        if place.type != "cpu" and value.dim() == 0:  # masters' formulas read numbers on the CPU
            return copied(value)
        return value.detach().to(place, copy=True)

    def _dtype(self, segment: Segment) -> torch.dtype:
        """Return the dtype that a rule sees of a parameter."""
        return torch.float32 if self._layout.bucket(segment).has_master else segment.spec.dtype

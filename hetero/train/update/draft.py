"""The updater: what a step does to each bucket, closed at once and carried out later (floor 2).

`Updater.close` looks at every gradient, takes the groups' settings as they are at that moment, and
says for each bucket which slices of work its update is. Nothing is updated yet: the engine gives
the buckets to the worker in the order in which the next forward needs them.

Two arithmetics. Parameters that keep their dtype are updated by the user's optimizer class itself
(rules.py), on flat runs where that gives the same bits. Working weights with an fp32 master are
updated by the written formulas (formulas.py) in one pass of the kernel, or of torch where there is
none; rules without a formula run on a whole tensor's master.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from hetero.cores import Cores
from hetero.errors import StateError
from hetero.jobs import Slice
from hetero.memory.extent import Request, Span, Use
from hetero.memory.home import Home, cut
from hetero.memory.homestore import HomeStore
from hetero.memory.layout import Bucket, Layout, Segment
from hetero.train.gradients.store import NONE, Factors, GradSlot, GradStore
from hetero.train.model.lazy import Shown, handle, is_handle
from hetero.train.update import kernel
from hetero.train.update.formulas import Coefficients, Formula
from hetero.train.update.masters import Masters
from hetero.train.update.rules import (
    EXACT,
    Group,
    Rule,
    State,
    frozen,
    is_elementwise,
    kinds_of,
)
from hetero.train.update.trial import Trials, same
from hetero.types import Kind

RULE_NUMEL = 2**18  # elements per call of a rule: below, the calls themselves begin to cost
KERNEL_NUMEL = 2**20
PARAM = Kind.PARAM.value


@dataclass(slots=True)
class Update:
    """What one bucket's update does: slices that may run in parallel, and the steps that follow."""

    bucket: Bucket
    slices: list[Slice] = field(default_factory=list)
    finishes: list[Slice] = field(default_factory=list)
    fresh: bool = False
    """Whether states appear, which is not left to a thread."""
    scaled: list[int] = field(default_factory=list)
    """Indices of the parameters whose stored gradients are multiplied by their pending factors."""
    touched: list[int] = field(default_factory=list)
    """Indices of the parameters."""
    requests: list[Request] = field(default_factory=list)
    """What the slices need from disk, in their order."""


class Ready(NamedTuple):
    """A parameter with a gradient at home: its state, and what the gradient is multiplied by."""

    segment: Segment
    state: State
    factors: tuple[float, ...]
    slot: GradSlot
    """Keeps the gradient's home until the update is done."""


class Settings(NamedTuple):
    """What a group says of its parameters at one moment."""

    group: Group
    kinds: str


class Piece(NamedTuple):
    """Neighbouring parameters that are updated as one: they share scalars and factors."""

    rows: tuple[Ready, ...]
    missing: tuple[str, ...] | None
    """The states that appear with this update; None where none has to."""

    @property
    def first(self) -> Ready:
        return self.rows[0]

    def cuts(self, size: int) -> Iterator[tuple[int, int]]:
        """Cut the run at multiples of ``size``, so that what is updated at once is small."""
        for run in cut(self.first.segment.offset, self.rows[-1].segment.end, size):
            yield run.start, run.stop


class Updater:
    """Updates homes from gradients at home, and keeps the states torch would keep.

    States that have a parameter's shape live in homes of the bucket (kind STATE), the others as
    they are; ``states`` passed to `close` maps a parameter to the dict torch has in ``state[p]``,
    which updates fill in place.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        params: Sequence[torch.nn.Parameter],
        layout: Layout,
        *,
        grads: GradStore,
        store: HomeStore,
        masters: Masters,
        native: kernel.Library | None,
        cores: Cores,
        stream_to: torch.device | None = None,
    ) -> None:
        self.rule = Rule(inner)
        self.formula = self.rule.formula
        self._trials = Trials(self.rule, inner)
        self._may_write = self.rule.known is None  # to gradients, which then show it
        self._in_place = not store.pool.spills or self._may_write  # factors, in gradients at home
        self.native = native
        self._params = params
        self._index = {id(p): i for i, p in enumerate(params)}
        self._layout = layout
        self._grads = grads
        self._store = store
        self._masters = masters
        self._stream_to = stream_to
        self._stepped: dict[int, str] = {}  # the kind of settings a parameter was stepped with
        self._kept: set[int] = set()  # parameters that had states when they were stepped last
        self._counts: list[tuple[torch.Tensor, float]] = []  # step counts as this step leaves them
        self._begun: list[Ready] = []
        self._cores = cores

    # -- closing a step --------------------------------------------------------------------------

    def close(
        self,
        groups: Sequence[Group],
        states: defaultdict[torch.Tensor, State],
        begun: Collection[int] = (),
    ) -> list[Update]:
        """Return the updates of all buckets that have gradients; nothing is updated yet.

        Those of the ``begun`` parameters are under way. All gradients are brought home and looked
        at before the first state is made, so that a gradient that cannot be stepped leaves
        everything as it was; as do settings with which the rule is not to be stepped so
        (ConfigError).
        """
        self._trials.admit(groups)
        ready = [(group, self._ready(group, states, begun)) for group in groups]
        updates: dict[int, Update] = {}
        self._counts, self._begun = [], []
        try:
            for group, rows in ready:
                settings = frozen(group)
                kinds = kinds_of(settings)
                for bucket, members in self._by_bucket(rows):
                    update = updates.setdefault(bucket.id, Update(bucket))
                    self._draft(update, settings, kinds, members)
        except BaseException:
            for row in self._begun:
                row.state.clear()
            raise
        self._set_counts()
        for group, rows in ready if self.rule.known is None else ():
            _count(group, self.rule.settings_after(group, stepped=bool(rows)))
        self._masters.settle()
        return list(updates.values())

    def open(
        self,
        bucket: Bucket,
        slots: Sequence[GradSlot],
        settings: Mapping[int, Settings],
        states: defaultdict[torch.Tensor, State],
    ) -> Update | None:
        """Return the update of one bucket whose gradients have all come, before the step.

        ``settings`` are of the parameters' groups, by index. None where something has to be looked
        at that a step looks at: a parameter in no group, or a state that is about to appear.
        """
        if any(slot.segment.index not in settings for slot in slots) or self.rule.known is None:
            return None
        update, self._counts, self._begun = Update(bucket), [], []
        found: dict[int, tuple[Settings, list[Ready]]] = {}
        for slot in slots:
            now = settings[slot.segment.index]
            state = self.adopt(slot.segment, states[self._params[slot.segment.index]])
            row = Ready(slot.segment, state, (), slot)
            if not self._is_settled(row, now.kinds):
                return None
            found.setdefault(id(now), (now, []))[1].append(row)
        for now, rows in found.values():
            self._draft(update, now.group, now.kinds, rows)
        self._set_counts()
        return update

    def settings(self, groups: Sequence[Group]) -> dict[int, Settings]:
        """Return what the groups say now of each parameter, by its index."""
        found: dict[int, Settings] = {}
        for group in groups:
            now = frozen(group)
            of_group = Settings(now, kinds_of(now))
            indices = (self._index.get(id(param), -1) for param in group["params"])
            found.update((index, of_group) for index in indices if index >= 0)
        return found

    def _set_counts(self) -> None:
        """Leave step counts as the updates that were drafted leave them."""
        for count, value in self._counts:
            count.fill_(value)
        self._counts, self._begun = [], []  # references that are ours look like a user's

    def _is_settled(self, row: Ready, kinds: str) -> bool:
        """Whether a parameter was stepped so before, and still has the states of that."""
        index = row.segment.index
        return self._stepped.get(index) == kinds and bool(row.state or index not in self._kept)

    def _ready(
        self,
        group: Group,
        states: defaultdict[torch.Tensor, State],
        begun: Collection[int],
    ) -> list[Ready]:
        indices = (self._index.get(id(param), -1) for param in group["params"])
        mine = (i for i in indices if i >= 0 and i not in begun)
        slots = [slot for i in mine if (slot := self._grads.closed(i)) is not None]
        numbers = numbers_of([slot.factors for slot in slots])
        return [
            Ready(
                slot.segment,
                self.adopt(slot.segment, states[self._params[slot.segment.index]]),
                number,
                slot,
            )
            for slot, number in zip(slots, numbers, strict=True)
        ]

    def _by_bucket(self, rows: Sequence[Ready]) -> Iterator[tuple[Bucket, list[Ready]]]:
        found: dict[int, list[Ready]] = {}
        for row in rows:
            found.setdefault(self._bucket(row.segment).id, []).append(row)
        for bucket_id, members in found.items():
            yield (
                self._layout.buckets[bucket_id],
                sorted(members, key=lambda row: row.segment.position),
            )

    def _draft(self, update: Update, group: Group, known: str, rows: list[Ready]) -> None:
        bucket = update.bucket
        draft: Callable[[Update, Group, list[Ready]], None]
        if bucket.has_master:
            draft = self._draft_formula if self.formula is not None else self._draft_masters
        elif self.rule.may_flatten(group, bucket.dtype):
            draft = self._draft_flat
        else:
            draft = self._draft_whole
        made_here = bucket.has_master and self.formula is not None
        fresh = self.rule.known is None
        for row in rows:
            index = row.segment.index
            fresh |= self._lost_state(row) or self._stepped.get(index) != known
            self._stepped[index] = known
            update.touched.append(index)
        update.fresh |= fresh and not made_here
        draft(update, group, rows)

    def _lost_state(self, row: Ready) -> bool:
        """Whether a parameter that had states has none: they were cleared, and appear again."""
        index = row.segment.index
        if row.state:
            self._kept.add(index)
            return False
        lost = index in self._kept
        self._kept.discard(index)
        return lost

    # -- the formulas, on masters ----------------------------------------------------------------

    def _draft_formula(self, update: Update, group: Group, rows: list[Ready]) -> None:
        formula, bucket = self.formula, update.bucket
        if formula is None:
            return
        fills = formula.arrays(group)
        homes = {k: self._store.get(Kind.STATE, k, bucket, torch.float32) for k in fills}
        fresh = [
            missing
            if (missing := tuple(k for k in fills if k not in row.state)) or not row.state
            else None
            for row in rows
        ]
        for row, new in zip(rows, fresh, strict=True):
            if new is not None:
                self._begin(row, formula.scalars(group), fills, homes)
        for piece in self._pieces(rows, fresh):
            scalars = {k: float(piece.first.state[k]) for k in formula.scalars(group)}
            numbers, after = formula.coefficients(group, scalars, piece.missing is not None)
            for row in piece.rows:
                self._counts.extend((row.state[key], value) for key, value in after.items())
            for start, end in self._cuts(piece, bucket, KERNEL_NUMEL):
                run, missing = slice(start, end), piece.missing or ()
                moments = [
                    Span(home, start, end, Use.FRESH if k in missing else Use.WRITE)
                    for k, home in homes.items()
                ]
                request = self._request(update, start, end, self._masters.low(bucket), *moments)
                update.slices.append(
                    partial(
                        self._run_formula,
                        formula,
                        numbers,
                        param=self._store.homes[PARAM, bucket.id].part(run),
                        low=self._masters.low(bucket).part(run),
                        grad=self._grads.home(bucket).part(run),
                        states=[homes[k].part(run) for k in fills],
                        factors=piece.first.factors,
                        fills=[(homes[k].part(run), fills[k]) for k in missing],
                        request=request,
                    )
                )

    def _cuts(self, piece: Piece, bucket: Bucket, numel: int) -> Iterator[tuple[int, int]]:
        """Cut a piece into slices; where anything lies on disk, at the borders of extents."""
        pool = self._store.pool
        if not pool.spills:
            numel = self._at_once(bucket, numel)
            return piece.cuts(bucket.chunk_numel * max(1, numel // bucket.chunk_numel))
        return piece.cuts(pool.extent_numel)

    def _at_once(self, bucket: Bucket, numel: int) -> int:
        """Return how many elements a call takes: what has no bytes costs the calls alone."""
        is_meta = self._store.homes[PARAM, bucket.id].device.type == "meta"
        return sys.maxsize if is_meta else numel

    def _request(self, update: Update, start: int, end: int, *others: Home | Span) -> Request:
        """Return what a slice needs from disk: weights, gradients, and the other homes given."""
        bucket, grad_use = update.bucket, Use.WRITE if self._may_write else Use.READ
        request = Request(
            (
                Span(self._store.homes[PARAM, bucket.id], start, end, Use.WRITE),
                Span(self._grads.home(bucket), start, end, grad_use),
                *(x if isinstance(x, Span) else Span(x, start, end, Use.WRITE) for x in others),
            )
        )
        if request.needs:
            update.requests.append(request)
        return request

    def _run_formula(
        self,
        formula: Formula,
        numbers: Coefficients,
        *,
        param: torch.Tensor,
        low: torch.Tensor,
        grad: torch.Tensor,
        states: list[torch.Tensor],
        factors: tuple[float, ...],
        fills: list[tuple[torch.Tensor, float]],
        request: Request,
    ) -> None:
        here = self.native is not None and self._stream_to is None
        with self._store.held(request), nullcontext() if here else self._turn():
            for state, value in fills:
                state.fill_(value)
            with self._streamed([param, low, *states], grad) as ((p, l, *s), g):
                kernel.update(
                    formula,
                    numbers,
                    param=p,
                    low=l,
                    grad=g,
                    states=s,
                    factors=factors,
                    native=self.native,
                )

    def _turn(self) -> AbstractContextManager[None]:
        """Return the turn of a slice that is the same on any cut: a device has one queue."""
        return self._cores.one() if self._stream_to is None else self._cores.all()

    @contextmanager
    def _streamed(
        self, homes: list[torch.Tensor], grad: torch.Tensor
    ) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
        """Bring pieces of homes to where they are updated, and back; nothing moves at home."""
        if self._stream_to is None:
            yield homes, grad
            return
        there = [home.to(self._stream_to, copy=True) for home in homes]
        yield there, grad.to(self._stream_to, copy=True)
        for home, moved in zip(homes, there, strict=True):
            home.copy_(moved)

    def _begin(
        self,
        row: Ready,
        scalars: dict[str, float],
        fills: dict[str, float],
        homes: dict[str, Home],
    ) -> None:
        """Give a parameter the state that torch begins with; the first update fills it."""
        if not row.state:
            self._begun.append(row)
        for key, value in scalars.items():
            row.state.setdefault(key, torch.tensor(value, dtype=torch.float32))
        for key in fills:
            if key not in row.state:
                row.state[key] = handle(self._store, homes[key], row.segment)

    # -- torch's rule, on flat runs --------------------------------------------------------------

    def _draft_flat(self, update: Update, group: Group, rows: list[Ready]) -> None:
        bucket = update.bucket
        for piece in self._pieces(rows, [None] * len(rows)):
            if piece.first.factors and self._in_place:
                update.scaled.extend(row.segment.index for row in piece.rows)
            after: State = {}
            keys = self._elementwise_keys(group, bucket, piece.first)
            homes = {key: self._store.homes[key, bucket.id] for key in keys}
            for start, end in self._cuts(piece, bucket, RULE_NUMEL):
                request = self._request(update, start, end, *homes.values())
                # an extent may be long: what lies between a rule's operations stays in the cache
                work = [
                    partial(self._run_flat, group, bucket, run, piece.first, homes, after)
                    for run in cut(start, end, self._at_once(bucket, RULE_NUMEL))
                ]
                update.slices.append(partial(self._hold, request, work))
            segment = piece.first.segment
            if segment.offset == piece.rows[-1].segment.end:  # without elements, but not stateless
                none = slice(segment.offset, segment.offset)
                once = partial(self._run_flat, group, bucket, none, piece.first, homes, after)
                update.slices.append(once)
            update.finishes.append(partial(self._share, bucket, piece, after))

    def _hold(self, request: Request, work: Sequence[Slice]) -> None:
        """Do a slice's work with all that it needs in memory: it fails before it begins."""
        with self._store.held(request):
            for run in work:
                run()

    def _elementwise_keys(self, group: Group, bucket: Bucket, first: Ready) -> list[str]:
        """Return the states of a run that have a home, those included that are about to appear.

        Homes on disk have to be there before the step, so that nothing fails in its middle.
        """
        shape = first.segment.spec.shape
        keys = [k for k, v in first.state.items() if is_elementwise(k, v, shape)]
        if not self._store.pool.spills:
            return keys
        appearing = self._appearing(group, bucket, bucket.dtype, (4, 4))
        return list(dict.fromkeys((*keys, *appearing)))

    def _appearing(
        self, group: Group, bucket: Bucket, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> list[str]:
        """Return the states that steps with these settings need a home for, and make it."""
        found = self.rule.states_of(group, dtype, shape)
        for key, state_dtype in found.items():
            self._store.get(Kind.STATE, key, bucket, state_dtype)
        return list(found)

    def _run_flat(
        self,
        group: Group,
        bucket: Bucket,
        run: slice,
        first: Ready,
        homes: dict[str, Home],
        after: State,
    ) -> None:
        """Step a run of a bucket; ``after`` takes the state with its scalars."""
        flat = self._store.homes[PARAM, bucket.id].part(run)
        grad = self._multiplied(self._grads.home(bucket).part(run), first.factors)
        there = [key for key in homes if key in first.state]
        here = [flat, *(homes[key].part(run) for key in there)]
        with self._turn(), self._streamed(here, grad) as ((param, *moved), param_grad):
            param.grad = param_grad
            before = {k: _copied(v) for k, v in first.state.items() if k not in there}
            before.update(zip(there, moved, strict=True))
            (done,) = self.rule.run(group, [param], [before])
        for key, value in done.items():
            if is_elementwise(key, value, flat.shape) and value is not before.get(key):
                home = homes.get(key) or self._store.get(Kind.STATE, key, bucket, value.dtype)
                home.part(run).copy_(value)
        after.update(
            {k: _Shaped() if is_elementwise(k, v, flat.shape) else v for k, v in done.items()}
        )

    def _share(self, bucket: Bucket, piece: Piece, after: State) -> None:
        """Give every parameter of a run its part of the run's state."""
        for segment, state, _, _ in piece.rows:
            for key, value in after.items():
                if isinstance(value, _Shaped):
                    if not isinstance(state.get(key), Shown):
                        home = self._store.homes[key, bucket.id]
                        state[key] = handle(self._store, home, segment)
                elif isinstance(state.get(key), torch.Tensor):
                    state[key].copy_(value)
                else:
                    state[key] = _copied(value)

    def _pieces(
        self, rows: Sequence[Ready], fresh: Sequence[tuple[str, ...] | None]
    ) -> Iterator[Piece]:
        run: list[Ready] = []
        key: object = None
        before: tuple[str, ...] | None = None
        for row, new in zip(rows, fresh, strict=True):
            scalars = tuple(
                (k, float(v) if isinstance(v, torch.Tensor) else v)
                for k, v in row.state.items()
                if not is_elementwise(k, v, row.segment.spec.shape)
            )
            here = (tuple(row.state), scalars, row.factors, new)
            if run and (here != key or row.segment.position != run[-1].segment.position + 1):
                yield Piece(tuple(run), before)
                run = []
            key, before = here, new
            run.append(row)
        if run:
            yield Piece(tuple(run), before)

    # -- torch's rule, on whole tensors ----------------------------------------------------------

    def _draft_whole(self, update: Update, group: Group, rows: list[Ready]) -> None:
        written = [row for row in rows if self._may_write or (row.factors and self._in_place)]
        update.scaled.extend(row.segment.index for row in written)
        alone = self._store.pool.spills  # no more in memory at once than has to be
        for some in [[row] for row in rows] if alone else [rows]:
            work = partial(self._run_whole, group, update.bucket, some)
            update.slices.append(
                partial(self._hold, self._whole_request(update, group, some), [work])
            )

    def _whole_request(self, update: Update, group: Group, rows: Sequence[Ready]) -> Request:
        """Return what whole parameters need from disk, which is one parameter then."""
        if not self._store.pool.spills:
            return Request(())
        bucket, segment = update.bucket, rows[0].segment
        homes = [self._store.homes[k, bucket.id] for k in self._whole_keys(group, bucket, rows[0])]
        if bucket.has_master:
            homes.append(self._masters.low(bucket))
        return self._request(update, segment.offset, segment.end, *homes)

    def _whole_keys(self, group: Group, bucket: Bucket, row: Ready) -> list[str]:
        """Return the states of a parameter that have a home, now or after this step."""
        shape = row.segment.spec.shape
        keys = [k for k, v in row.state.items() if is_elementwise(k, v, shape)]
        dtype = self._state_dtype(row.segment)
        return list(dict.fromkeys((*keys, *self._appearing(group, bucket, dtype, shape))))

    def _run_whole(self, group: Group, bucket: Bucket, rows: list[Ready]) -> None:
        home, grads = self._store.homes[PARAM, bucket.id], self._grads.home(bucket)
        views = [home.view(row.segment) for row in rows]
        for view, row in zip(views, rows, strict=True):
            view.grad = self._multiplied(grads.view(row.segment), row.factors)
        with self._cores.all():
            states = self.rule.run(group, views, [self._views(row) for row in rows])
        for view, row, state in zip(views, rows, states, strict=True):
            view.grad = None
            self._keep(row, state)

    def _draft_masters(self, update: Update, group: Group, rows: list[Ready]) -> None:
        for row in rows:
            work = partial(self._run_master, group, row)
            request = self._whole_request(update, group, [row])
            update.slices.append(partial(self._hold, request, [work]))

    def _run_master(self, group: Group, row: Ready) -> None:
        """Step one parameter's fp32 master, and round it to its working weight."""
        master = self._masters.value(row.segment)
        grad = self._grads.home(self._bucket(row.segment)).view(row.segment)
        master.grad = _scaled(torch.empty_like(master).copy_(grad), row.factors)
        with self._cores.all():
            (state,) = self.rule.run(group, [master], [self._views(row)])
        self._keep(row, state)
        self._masters.assign(row.segment, master)

    def _multiplied(self, grad: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
        """Return a gradient at home times its factors; on disk it stays as it is, and they pend."""
        return _scaled(grad if self._in_place or not factors else grad.clone(), factors)

    # -- states ----------------------------------------------------------------------------------

    def _views(self, row: Ready) -> State:
        """Return a parameter's state for a rule: its homes' own tensors, which are pinned."""
        homes, bucket = self._store.homes, self._bucket(row.segment).id
        return {
            k: homes[k, bucket].view(row.segment)
            if is_elementwise(k, v, row.segment.spec.shape)
            else v
            for k, v in row.state.items()
        }

    def _keep(self, row: Ready, state: State) -> None:
        """Take what a rule left: tensors of the parameter's shape lie in the homes."""
        for key, value in state.items():
            if not is_elementwise(key, value, row.segment.spec.shape):
                row.state[key] = value
                continue
            bucket = self._bucket(row.segment)
            known = (key, bucket.id) in self._store.homes
            home = self._store.get(Kind.STATE, key, bucket, value.dtype)
            view = home.view(row.segment)
            if not (home.stays or known):
                raise StateError(f"state {key!r} of {row.segment.spec.name!r} was not foreseen")
            if value is not view:
                view.copy_(value)
            if not isinstance(row.state.get(key), Shown):
                row.state[key] = handle(self._store, home, row.segment)

    def adopt(self, segment: Segment, state: State, *, own: bool = False) -> State:
        """Return a state whose tensors of the parameter's shape lie in the homes.

        With ``own`` the other tensors are copied too, as when a state dict is loaded.
        """
        homes, bucket_id = self._store.homes, self._layout.home[segment.index][0]
        for key, value in state.items():
            known = homes.get((key, bucket_id))
            if not own and known is not None and value is known.view(segment):
                continue  # as the last step left it
            if own and isinstance(value, torch.Tensor) and key not in EXACT:
                value = _cast(value, self._state_dtype(segment))
            if not is_elementwise(key, value, segment.spec.shape):
                state[key] = _copied(value) if own else value
                continue
            home = self._store.get(Kind.STATE, key, self._bucket(segment), value.dtype)
            if not is_handle(value, home, segment):
                home.write(segment, value)
                state[key] = handle(self._store, home, segment)
        return state

    def _state_dtype(self, segment: Segment) -> torch.dtype:
        return torch.float32 if self._bucket(segment).has_master else segment.spec.dtype

    def _bucket(self, segment: Segment) -> Bucket:
        return self._layout.buckets[self._layout.home[segment.index][0]]


class _Shaped:
    """Stands for a state with one number per element, which lies in a home."""


def numbers_of(factors: Sequence[Factors]) -> list[tuple[float, ...]]:
    """Return pending factors as numbers; waits for the device once, not for each."""
    clips = [f.clip for f in factors if f.clip is not None]
    together = [clip.to(clips[0].device) for clip in clips]
    values = iter(torch.stack(together).tolist() if clips else [])
    return [
        tuple(x for x in (f.unscale, 1.0 if f.clip is None else next(values)) if x != 1.0)
        if f is not NONE
        else ()
        for f in factors
    ]


def _scaled(grad: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
    for factor in factors:
        grad.mul_(factor)
    return grad


def _cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a loaded state in its parameter's dtype, as torch's load_state_dict does."""
    return value.to(dtype) if value.is_floating_point() and dtype.is_floating_point else value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _count(group: Group, after: Group) -> None:
    """Change the settings that a step changes, in the user's own group."""
    for key, value in after.items():
        if not same(value, group.get(key)):
            group[key] = value

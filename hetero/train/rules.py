"""Updates: the given optimizer's own arithmetic, on flat runs at the homes (floor 2).

The rule is torch's `step` of the user's class, run on a worker whose parameters are pieces of the
HOST homes. Elementwise rules give the same bits on any cut of an index space, so parameters that
share a group, their scalars (step counts) and an unbroken run of gradients are updated as one
piece, chunk by chunk. Fused kernels depend on vector tails and other rules on whole tensors: they
run on per-tensor segments.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch

from hetero.errors import ConfigError
from hetero.memory.layout import Bucket, Layout, Segment
from hetero.memory.slab import Home, HomeStore
from hetero.train.grads import GradStore
from hetero.types import Kind

O = torch.optim
ELEMENTWISE = (
    *(O.SGD, O.Adam, O.AdamW, O.NAdam, O.RAdam, O.Adamax),
    *(O.Adagrad, O.Adadelta, O.RMSprop, O.ASGD, O.Rprop),
)
WHOLE_TENSOR = tuple(getattr(O, name) for name in ("Adafactor", "Muon") if hasattr(O, name))
SCALARS = frozenset({"step", "mu", "mu_product", "eta"})  # per parameter, whatever their shape
UPDATE_NUMEL = 2**18  # elements per call of a rule: below, the calls themselves begin to cost
State = dict[str, Any]


class Piece(NamedTuple):
    """Neighbouring parameters of a bucket that are updated as one: they share their scalars."""

    bucket: Bucket
    segments: tuple[Segment, ...]


def make_worker(inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and settings, without parameters, states or hooks."""
    worker = object.__new__(type(inner))
    worker.__dict__.update({k: v for k, v in inner.__dict__.items() if k != "step"})
    worker._optimizer_step_pre_hooks = OrderedDict()
    worker._optimizer_step_post_hooks = OrderedDict()
    worker.param_groups = []
    worker.state = defaultdict(dict)
    return worker


class Updater:
    """Updates HOST homes from HOST gradients, and keeps the states torch would keep.

    States that have a parameter's shape live in homes of the bucket (kind STATE), the others as
    they are; `states` passed to `update` maps a parameter to the dict torch has in ``state[p]``.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        params: Sequence[torch.nn.Parameter],
        layout: Layout,
        *,
        grads: GradStore,
        store: HomeStore,
    ) -> None:
        self._params = params
        self._index = {id(p): i for i, p in enumerate(params)}
        self._layout = layout
        self._grads = grads
        self._store = store
        self._worker = make_worker(inner)
        self._step = raw_step(type(inner))
        self._elementwise = type(inner) in ELEMENTWISE
        self.touched: list[int] = []

    def update(
        self, groups: Sequence[dict[str, Any]], states: MutableMapping[torch.Tensor, State]
    ) -> None:
        """Update every parameter that has a gradient; `touched` holds their indices.

        All gradients are brought home and looked at before the first update, so that a gradient
        that cannot be stepped leaves every parameter as it was.
        """
        self.touched = []
        work: list[tuple[dict[str, Any], list[Segment]]] = []
        for group in groups:
            indices = (self._index.get(id(p), -1) for p in group["params"])
            ready = [i for i in indices if i >= 0 and self._grads.home(i) is not None]
            work.append((group, [self._layout.home[i][1] for i in ready]))
        for group, segments in work:
            flat = [s for s in segments if self._may_flatten(group, s)]
            whole = [s for s in segments if not self._may_flatten(group, s)]
            self._update_part(group, flat, states, self._update_flat)
            self._update_part(group, whole, states, self._update_whole)

    def _may_flatten(self, group: dict[str, Any], segment: Segment) -> bool:
        """Two-byte arithmetic differs between the body and the tail of torch's vector loops."""
        wide = segment.spec.dtype.itemsize >= 4
        return self._elementwise and not group.get("fused") and wide

    def _update_part(
        self,
        group: dict[str, Any],
        part: list[Segment],
        states: MutableMapping[torch.Tensor, State],
        update: Callable[[dict[str, Any], Sequence[Segment], Sequence[State]], list[State]],
    ) -> None:
        rows = [self.adopt(s, states.get(self._params[s.index])) for s in part]
        self.touched.extend(segment.index for segment in part)
        for segment, state in zip(part, update(group, part, rows), strict=True):
            states[self._params[segment.index]] = state

    def adopt(self, segment: Segment, state: State | None, *, own: bool = False) -> State:
        """Return a state whose tensors of the parameter's shape lie in the homes.

        With ``own`` the other tensors are copied too, as when a state dict is loaded.
        """
        if state is None:
            return {}
        for key, value in state.items():
            if own and isinstance(value, torch.Tensor) and key != "step":
                value = _cast(value, segment.spec.dtype)
            if not _elementwise(key, value, segment.spec.shape):
                state[key] = _copied(value) if own else value
                continue
            home = self._home(key, segment, value.dtype).segments[segment.position]
            if value is not home:
                home.copy_(value)
                state[key] = home
        return state

    # -- flat runs -------------------------------------------------------------------------------

    def _update_flat(
        self, group: dict[str, Any], ready: Sequence[Segment], rows: Sequence[State]
    ) -> list[State]:
        state_of = {s.index: row for s, row in zip(ready, rows, strict=True)}
        for piece in self._pieces(ready, state_of):
            first = state_of[piece.segments[0].index]
            after: State = {}
            for start, end in _cuts(piece):
                after = self._run(group, piece.bucket, start, end, first)
            for segment in piece.segments:
                self._share(segment, after, state_of[segment.index])
        return [state_of[s.index] for s in ready]

    def _pieces(self, ready: Sequence[Segment], state_of: dict[int, State]) -> Iterator[Piece]:
        run: list[Segment] = []
        key: object = None
        for segment in sorted(ready, key=lambda s: (self._bucket(s).id, s.position)):
            state = state_of[segment.index]
            scalars = tuple(
                (k, float(v) if isinstance(v, torch.Tensor) else v)
                for k, v in state.items()
                if not _elementwise(k, v, segment.spec.shape)
            )
            here = (self._bucket(segment).id, tuple(state), scalars)
            if run and (here != key or segment.position != run[-1].position + 1):
                yield Piece(self._bucket(run[0]), tuple(run))
                run = []
            key = here
            run.append(segment)
        if run:
            yield Piece(self._bucket(run[0]), tuple(run))

    def _run(
        self, group: dict[str, Any], bucket: Bucket, start: int, end: int, before: State
    ) -> State:
        """Step elements [start, end) of a bucket; return the state with its scalars advanced."""
        homes, kind = self._store.homes, Kind.PARAM.value
        flat = homes[kind, bucket.id].flat[start:end]
        flat.grad = homes[Kind.GRAD.value, bucket.id].flat[start:end]
        state: State = {
            key: homes[key, bucket.id].flat[start:end]
            if (key, bucket.id) in homes and key not in SCALARS
            else _copied(value)
            for key, value in before.items()
        }
        after = self._call(group, [flat], [state])[0]
        for key, value in after.items():
            if _elementwise(key, value, flat.shape) and value is not state.get(key):
                home = self._store.get(Kind.STATE, key, bucket, value.dtype)
                home.flat[start:end].copy_(value)
        return after

    def _share(self, segment: Segment, after: State, state: State) -> None:
        """Give one parameter of a run its part of the run's state."""
        for key, value in after.items():
            if (key, self._bucket(segment).id) in self._store.homes and key not in SCALARS:
                state[key] = self._home(key, segment, None).segments[segment.position]
            elif isinstance(state.get(key), torch.Tensor):
                state[key].copy_(value)
            else:
                state[key] = _copied(value)

    # -- whole tensors ---------------------------------------------------------------------------

    def _update_whole(
        self, group: dict[str, Any], ready: Sequence[Segment], rows: Sequence[State]
    ) -> list[State]:
        """Step per-tensor segments, one bucket at a time."""
        done: dict[int, State] = {}
        by_bucket: dict[int, list[tuple[Segment, State]]] = {}
        for segment, row in zip(ready, rows, strict=True):
            by_bucket.setdefault(self._bucket(segment).id, []).append((segment, row))
        for bucket_id, members in by_bucket.items():
            home = self._store.homes[Kind.PARAM.value, bucket_id]
            grad = self._store.homes[Kind.GRAD.value, bucket_id]
            views = [home.segments[s.position] for s, _ in members]
            for view, (segment, _) in zip(views, members, strict=True):
                view.grad = grad.segments[segment.position]
            states = self._call(group, views, [state for _, state in members])
            for view, (segment, _), state in zip(views, members, states, strict=True):
                view.grad = None
                done[segment.index] = self.adopt(segment, state)
        return [done[s.index] for s in ready]

    # -- both ------------------------------------------------------------------------------------

    def _call(
        self, group: dict[str, Any], params: list[torch.Tensor], states: list[State]
    ) -> list[State]:
        worker = self._worker
        worker.param_groups = [{**group, "params": params}]
        worker.state = defaultdict(dict, {p: s for p, s in zip(params, states, strict=True) if s})
        self._step(worker)
        after = [dict(worker.state[p]) for p in params]
        worker.param_groups, worker.state = [], defaultdict(dict)
        return after

    def _bucket(self, segment: Segment) -> Bucket:
        return self._layout.buckets[self._layout.home[segment.index][0]]

    def _home(self, key: str, segment: Segment, dtype: torch.dtype | None) -> Home:
        return self._store.get(Kind.STATE, key, self._bucket(segment), dtype)


def _elementwise(key: str, value: Any, shape: Sequence[int]) -> bool:
    """Return whether a state entry is one number per element of its parameter."""
    return (
        isinstance(value, torch.Tensor)
        and key not in SCALARS
        and tuple(value.shape) == tuple(shape)
    )


def _cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a loaded state in its parameter's dtype, as torch's load_state_dict does."""
    return value.to(dtype) if value.is_floating_point() and dtype.is_floating_point else value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _cuts(piece: Piece) -> Iterator[tuple[int, int]]:
    """Cut a run at chunk borders, so that what is updated at once stays in the cache."""
    at, end = piece.segments[0].offset, piece.segments[-1].end
    chunk = piece.bucket.chunk_numel
    size = chunk * max(1, UPDATE_NUMEL // chunk)
    while at < end:
        stop = min(end, (at // size + 1) * size)
        yield at, stop
        at = stop


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers whose step does not work parameter by parameter, by name."""
    kind = type(optimizer)
    if kind in (*ELEMENTWISE, *WHOLE_TENSOR):
        flagged = [f for g in optimizer.param_groups for f in ("differentiable",) if g.get(f)]
        if flagged:
            raise ConfigError(
                f"{kind.__name__}(differentiable=True) cannot be paged", advice="drop the flag"
            )
        return
    raise ConfigError(
        f"optimizer {kind.__name__} is not supported: its step is not known to work parameter by"
        " parameter",
        advice="use one of " + ", ".join(k.__name__ for k in (*ELEMENTWISE, *WHOLE_TENSOR)),
    )


def raw_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return a class's step without the wrapper that runs user hooks and profiles."""
    step = kind.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step

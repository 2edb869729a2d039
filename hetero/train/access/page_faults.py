"""Page faults: operations on paged parameters outside an access (floor 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol
from weakref import WeakMethod

import torch
from torch import nn

from hetero.device import ALONE, use_count
from hetero.errors import OutOfMemory, StateError
from hetero.internals import tree_iter
from hetero.memory.layout import Segment
from hetero.memory.manager import ANY, Positions
from hetero.modes import in_own_mode, own_mode
from hetero.train.access.backward import BackwardAccess
from hetero.train.access.early import EarlyUpdates, NoEarlyUpdates
from hetero.train.access.home_view import StateDictView
from hetero.train.access.pages import ParameterPages
from hetero.train.access.step_events import StepEvents
from hetero.train.activations.structure import leaves_of
from hetero.train.model import faults
from hetero.train.model.binding import without_faults
from hetero.train.model.parts import Parts
from hetero.train.model.watched import watched
from hetero.train.update.masters import Scaling


class Lender(Protocol):
    """The runtime that owns the pages."""

    @property
    def pages(self) -> ParameterPages: ...

    @property
    def state_dicts(self) -> StateDictView: ...

    @property
    def events(self) -> StepEvents: ...

    @property
    def backward(self) -> BackwardAccess: ...

    @property
    def early(self) -> EarlyUpdates | NoEarlyUpdates: ...

    def lend(self, buckets: Sequence[int], why: str) -> AbstractContextManager[None]:
        """Hold buckets and bind their parameters inside a block."""

    def call_with(
        self,
        buckets: Sequence[int],
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        only: Positions = ANY,
    ) -> Any:
        """Call a function on parameters of buckets, in an access of its own; code may keep the
        memory of ``only`` some parameters."""

    @property
    def is_running(self) -> bool:
        """Whether the model is inside its forward or a backward pass through it."""

    def quiesce(self) -> None:
        """Bring every gradient and every written parameter home."""


class PageFaults:
    """Serves the classes of paged parameters (see `faults.Faults`), and `hetero.gathered`.

    Args:
        scaling: of the loss, under precision="fp16".
        is_shared: whether ranks share homes.
    """

    def __init__(
        self,
        runtime: Lender,
        *,
        place: torch.device,
        scaling: Scaling | None,
        parts: Parts,
        is_shared: bool,
    ) -> None:
        self.scaling = scaling
        self._parts = parts
        self._runtime = runtime
        self._place = place
        self._is_shared = is_shared
        written = WeakMethod(self.written_through_view)

        def tell(storage: int) -> None:
            if (found := written()) is not None:
                found(storage)

        self._written = tell

    @property
    def _pages(self) -> ParameterPages:
        return self._runtime.pages

    @property
    def index(self) -> dict[int, int]:
        """Position of every parameter, by its id."""
        return self._pages.binding.index

    def fault(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a function on parameters that are not bound (see faults.py)."""
        faults.refuse_transforms()
        if self._runtime.state_dicts.takes(func):
            return self._runtime.state_dicts.carry_out(func, args)
        index, home = self.index, self._pages.layout.home
        places = (index.get(id(value), -1) for value in leaves_of((args, dict(kwargs))))
        given: dict[int, list[int]] = {}  # positions by bucket
        for bucket, segment in (home[i] for i in places if i >= 0):
            given.setdefault(bucket, []).append(segment.position)
        buckets = tuple(given)
        if not buckets:
            with without_faults():  # only the class is an argument, no parameter
                return func(*args, **kwargs)
        only = given if self._is_shared else ANY
        found = self._runtime.call_with(buckets, func, args, kwargs, only)
        if any(isinstance(t, torch.Tensor) and t.requires_grad for t in tree_iter(found)):
            self._runtime.early.outside(buckets)
        if not self._is_shared or self._runtime.is_running:
            return found
        replicas = (self._pages.manager.replicas.get(bucket) for bucket in buckets)
        return watched(found, {r.cdata: self._written for r in replicas if r is not None})

    def written_through_view(self, storage: int) -> None:
        """A view outside of an access was written: ranks bring that home here."""
        if (replica := self._pages.manager.arena.by_storage.get(storage)) is not None:
            self._pages.manager.flush_and_wait(replica.bucket.id)

    @in_own_mode
    def alias(self, param: nn.Parameter) -> torch.Tensor:
        """Return ``param.data`` of a bound parameter; writes through it are not counted."""
        bucket, segment = self._pages.home(param)
        self._pages.manager.expose(bucket, [segment.position] if self._is_shared else None)
        return self._parts.data(param)

    @in_own_mode
    def assign(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Carry out ``param.data = value`` by copying; a change of geometry is refused."""
        bucket, segment = self._pages.home(param)
        spec, place, binding = segment.spec, self._place, self._pages.binding
        if tuple(value.shape) != spec.shape or value.dtype != spec.dtype or value.device != place:
            raise StateError(
                f"parameter {spec.name!r} is {spec.dtype} {list(spec.shape)} on {place}; data of"
                f" {value.dtype} {list(value.shape)} on {value.device} cannot replace it",
                advice="convert the model before hetero.prepare, or release it first",
            )
        with torch.no_grad(), self._runtime.lend((bucket,), "assign"):
            replica = self._pages.manager.replicas[bucket]
            view = replica.views[segment.position]
            if view.data_ptr() == value.data_ptr():
                return
            kept = binding.bound[bucket] == 1 and replica.aliases(binding.count(bucket))
            if kept or use_count(value) > ALONE:
                whose = "its old value" if kept else "the new one"
                raise StateError(
                    f"data of {spec.name!r} is assigned while a view of {whose} is alive, which"
                    " torch would keep (apart from the parameter, or as an alias of it)",
                    advice="copy: backup = p.detach().clone(), and p.data.copy_(new)",
                )
            view.copy_(value)
            self._pages.note_write(segment)
        self._pages.manager.settle()
        # torch would alias the two: detect later writes to `value`, and graphs that saved the
        # old bytes
        torch.autograd.graph.increment_version(param)
        self._pages.assigned(param, value)

    def assign_grad(self, param: nn.Parameter, *, adds: bool) -> None:
        """A gradient was set: it goes home as autograd's do."""
        self._runtime.backward.gradient_assigned(param, adds=adds)

    def geometry(self, param: nn.Parameter) -> torch.Tensor:
        """Return a meta tensor with the parameter's own shape and strides."""
        spec = self._pages.home(param)[1].spec
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")

    def name(self, param: nn.Parameter) -> str:
        """Return the parameter's name in its model."""
        return self._pages.home(param)[1].spec.name

    @contextmanager
    def gathered(self, params: Sequence[nn.Parameter], *, write: bool) -> Iterator[None]:
        """Hold parameters, full and current, inside a block."""
        self._runtime.events.before_use()
        manager, versions = self._pages.manager, self._pages.versions
        homes = {self.index[id(p)]: self._pages.home(p) for p in params}
        buckets = tuple(dict.fromkeys(bucket for bucket, _ in homes.values()))
        self._runtime.quiesce()
        with self._lent(buckets):
            before = versions(homes)
            with self._pages.not_stepped(before):
                yield
            now = versions(homes)
            changed = [homes[i] for i in homes if now[i] != before[i]]
            if write:
                with own_mode():
                    for bucket, segment in homes.values():
                        manager.write(bucket, segment.offset, segment.end)
        if changed and not write:
            self._undo(changed)
        with own_mode():
            for bucket in buckets:
                manager.flush_and_wait(bucket)

    @contextmanager
    def _lent(self, buckets: Sequence[int]) -> Iterator[None]:
        """Hold buckets inside a block; if they find no room, say what all of them would need."""
        with ExitStack() as lent:
            try:
                lent.enter_context(self._runtime.lend(buckets, "gathered"))
            except OutOfMemory as error:
                if len(buckets) > 1:
                    least = self._pages.manager.arena.budget_for(buckets)
                    error.needed_bytes = max(error.needed_bytes, least)
                    error.advice = (
                        "gather fewer parameters at a time, as those of one module"
                        " (hetero.gathered(module)): all that are gathered need room in hbm at"
                        f" once; or raise hbm= to at least {error.needed_bytes} bytes"
                    )
                raise
            yield

    @in_own_mode
    def _undo(self, changed: Sequence[tuple[int, Segment]]) -> None:
        """Undo writes to parameters that were gathered to be read, and raise StateError."""
        for bucket in {bucket for bucket, _ in changed}:
            self._pages.manager.discard_writes(bucket)
        for _, segment in changed:
            self._pages.masters.not_written(segment)
        names = ", ".join(repr(segment.spec.name) for _, segment in changed)
        raise StateError(
            f"parameter {names} was written inside gathered(write=False); the write is undone",
            advice="use hetero.gathered(..., write=True)",
        )

"""Gradients: flushed to HOST as they are produced, and still torch's to look at (floor 2).

A gradient that autograd has accumulated is flushed at the *next* hetero event, so hooks of the
user's that run after ours still see ``p.grad``. What they see later is a `LazyGrad`: a tensor
subclass whose bytes are fetched, one tensor at a time, when somebody computes with it. ``p.grad``
itself is the only truth: None means no gradient, as in torch.

[Note: gradient leases]  A gradient that somebody else holds, as an object or through a view (a
preset flat buffer), stays where it is, so that writes through the alias count; the step copies it.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from hetero.device import ALONE, Device, Ticket, use_count
from hetero.errors import ConfigError
from hetero.memory.layout import Layout
from hetero.memory.link import Link
from hetero.memory.slab import HomeStore
from hetero.train.swizzle import get_grad, set_grad
from hetero.types import Kind, Lane

_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


class GradSlot:
    """One parameter's flushed gradient: on HOST, or taken back by somebody who looked closely.

    ``value`` is a private device tensor once an alias of the gradient was handed out; it is then
    the truth until it is flushed again.
    """

    __slots__ = ("__weakref__", "_device", "home", "ticket", "value")

    def __init__(self, home: torch.Tensor, device: Device, ticket: Ticket | None) -> None:
        self.home = home
        self.value: torch.Tensor | None = None
        self.ticket = ticket
        self._device = device

    def landed(self) -> torch.Tensor:
        """Return the HOST bytes once they have arrived."""
        if self.ticket is not None:
            self._device.sync(self.ticket)
            self.ticket = None
        return self.home

    def fetch(self) -> torch.Tensor:
        """Return the gradient on the device, for one operation."""
        if self.value is not None:
            return self.value
        home = self.landed()
        place = self._device.torch_device
        return home if home.device == place else home.to(place)

    def keep(self) -> torch.Tensor:
        """Return a private tensor that aliases may refer to; it replaces the HOST bytes."""
        if self.value is None:
            home = self.landed()
            private = torch.empty_strided(
                home.shape, home.stride(), dtype=home.dtype, device=self._device.torch_device
            )
            self.value = private.copy_(home)
        return self.value

    def store(self, fetched: torch.Tensor) -> None:
        """Write back what an in-place operation left in a fetched tensor."""
        if self.value is None and fetched is not self.home:
            self.home.copy_(fetched)


class LazyGrad(torch.Tensor):
    """A gradient at home on HOST that computes like a tensor on the parameter's device."""

    slot: GradSlot

    @staticmethod
    def __new__(cls, slot: GradSlot, device: torch.device) -> LazyGrad:
        home = slot.home
        self = torch.Tensor._make_wrapper_subclass(
            cls, home.shape, strides=home.stride(), dtype=home.dtype, device=device
        )
        self.slot = slot
        return self

    def __init__(self, slot: GradSlot, device: torch.device) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.slot.fetch())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.slot.fetch().clone()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.slot.keep().__array__(*args, **kwargs)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.slot.keep().__dlpack__(**kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.slot.fetch().clone().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        return self.slot.keep().numpy(force=force)

    def tolist(self) -> Any:
        return self.slot.fetch().tolist()

    def data_ptr(self) -> int:
        return self.slot.keep().data_ptr()

    def share_memory_(self) -> Any:
        return self.slot.keep().share_memory_()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            return cls(args[0].slot, args[0].device)
        if func is _UNSCALE:  # a list of all gradients: one tensor on the device at a time
            for grad in args[0]:
                _call(func, ([grad], *args[1:]), kwargs)
            return None
        return _call(func, args, kwargs)


def _call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one operation on fetched gradients and write back what it changed."""
    returns_view = any(
        r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
    )
    fetched: dict[int, tuple[LazyGrad, torch.Tensor]] = {}

    def unwrap(value: Any) -> Any:
        if not isinstance(value, LazyGrad):
            return value
        if id(value) not in fetched:
            slot = value.slot
            fetched[id(value)] = (value, slot.keep() if returns_view else slot.fetch())
        return fetched[id(value)][1]

    out = func(*tree_map(unwrap, args), **tree_map(unwrap, dict(kwargs)))
    if not func._schema.is_mutable:
        return out
    back: dict[int, LazyGrad] = {}
    for lazy, tensor in fetched.values():
        lazy.slot.store(tensor)
        back[id(tensor)] = lazy
    return tree_map(lambda value: back.get(id(value), value), out)


class GradStore:
    """Takes gradients to their HOST homes; `pending` ones leave at the next event."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        layout: Layout,
        *,
        device: Device,
        link: Link,
        store: HomeStore,
    ) -> None:
        self._params = params
        self._layout = layout
        self._device = device
        self._link = link
        self._store = store
        self._index = {id(p): i for i, p in enumerate(params)}
        probe = torch.zeros(())
        probe.grad = torch.zeros(())
        self._alone = holders(probe)  # differs between releases of torch
        self._pending: list[int] = []
        self._slots: dict[int, weakref.ref[GradSlot]] = {}
        self._flight: deque[tuple[Ticket, torch.Tensor]] = deque()
        self._flight_bytes = 0
        self.ring_bytes = max((b.n_bytes for b in layout.buckets), default=0)
        self.on_arrival: Callable[[], None] = lambda: None

    def arrived(self, param: nn.Parameter) -> None:
        """Post-accumulate hook: note the gradient; it is flushed at the next event."""
        self._pending.append(self._index[id(param)])
        self.on_arrival()

    def flush_pending(self) -> None:
        """Start the way home of every gradient that has arrived."""
        if self._pending:
            pending, self._pending = self._pending, []
            for index in dict.fromkeys(pending):
                self.flush(index)

    def flush(self, index: int) -> None:
        """Take one gradient home and leave a LazyGrad behind; None and flushed ones stay."""
        param = self._params[index]
        held = holders(param) > self._alone
        grad = get_grad(param)
        if grad is None or grad.requires_grad:
            return  # a graph hangs on it (create_graph): the step takes a copy
        if isinstance(grad, LazyGrad):
            if grad.slot.value is None or use_count(grad.slot.value) > ALONE:
                return
            grad = grad.slot.value
        elif held or grad.layout is not torch.strided or use_count(grad) > ALONE:
            return  # [Note: gradient leases]
        slot = self._take(index, grad)
        set_grad(param, LazyGrad(slot, self._device.torch_device))

    def home(self, index: int) -> torch.Tensor | None:
        """Return a parameter's gradient on HOST, ready to be read; None when it has none."""
        grad = get_grad(self._params[index])
        if grad is None:
            return None
        if isinstance(grad, LazyGrad):
            mine = self._slots.get(index, _gone)() is grad.slot
            if mine and grad.slot.value is None:
                return grad.slot.landed()
            value = grad.slot.fetch()
        else:
            value = grad.detach()
        assert_dense(value, self._layout.home[index][1].spec.name)
        return self._take(index, value).landed()

    def reset(self) -> None:
        """Forget arrivals and finish what is under way (after an error, or at the end)."""
        self._pending.clear()
        while self._flight:
            self._retire()

    def _take(self, index: int, grad: Any) -> GradSlot:
        bucket_id, segment = self._layout.home[index]
        name = segment.spec.name
        assert_dense(grad, name)
        home = self._store.get(Kind.GRAD, Kind.GRAD.value, self._layout.buckets[bucket_id])
        # 1. whoever still holds the last gradient of this parameter keeps its numbers
        old = self._slots.get(index, _gone)()
        if old is not None and old.value is None:
            old.keep()
        # 2. bring it into the home's geometry, which is the parameter's own
        spec = segment.spec
        grad = grad.resolve_conj().resolve_neg()
        if tuple(grad.stride()) != spec.stride or grad.dtype != spec.dtype:
            same = torch.empty_strided(
                spec.shape, spec.stride, dtype=spec.dtype, device=grad.device
            )
            grad = same.copy_(grad)
        # 3. queue the way down behind the compute that made it; hold the source until it landed
        target = home.segments[segment.position]
        raw = torch.as_strided(grad, (spec.numel,), (1,)).view(torch.uint8)
        ticket = self._link.move(
            Lane.D2H,
            torch.as_strided(target, (spec.numel,), (1,)).view(torch.uint8),
            raw,
            after=(self._device.mark(),),
            subject=name,
            why="grad",
        )
        self._hold(ticket, raw)
        slot = GradSlot(target, self._device, ticket)
        self._slots[index] = weakref.ref(slot)
        return slot

    def _hold(self, ticket: Ticket, source: torch.Tensor) -> None:
        self._flight.append((ticket, source))
        self._flight_bytes += source.numel()
        while self._flight and (
            self._flight_bytes > self.ring_bytes or self._device.query(self._flight[0][0])
        ):
            self._retire()

    def _retire(self) -> None:
        ticket, source = self._flight.popleft()
        self._device.sync(ticket)
        self._flight_bytes -= source.numel()


def holders(param: torch.Tensor) -> int:
    """Return how many references there are to the object ``param.grad``."""
    grad = get_grad(param)
    return sys.getrefcount(grad)


def _gone() -> None:
    return None


def assert_dense(grad: Any, name: str) -> None:
    """Refuse gradients that are not plain strided tensors, by name."""
    if isinstance(grad, torch.Tensor) and grad.layout is not torch.strided:
        raise ConfigError(
            f"the gradient of {name!r} is {grad.layout}",
            advice="build the module with sparse=False; hetero trains dense gradients",
        )

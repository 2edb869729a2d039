"""Tensors whose bytes are elsewhere, and fetched when an operation uses them (floor 2)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from hetero.internals import make_wrapper, tree_map
from hetero.memory.home import Home
from hetero.memory.homestore import HomeStore
from hetero.memory.layout import Segment
from hetero.memory.shown import alias, take
from hetero.modes import in_own_mode, own_mode

_DETACH = torch.ops.aten.detach.default


class LazySlot(Protocol):
    """Access to the bytes of a lazy tensor, as tensors on its device."""

    def read(self) -> torch.Tensor:
        """Return the value for one operation that does not write."""

    def exact(self) -> torch.Tensor:
        """Return the value for one operation that writes it."""

    def store(self, written: torch.Tensor) -> None:
        """Write back the tensor of `exact` after an operation has written it."""

    def keep(self) -> torch.Tensor:
        """Return a tensor that may be aliased: writes through aliases count."""


class Lazy(torch.Tensor):
    """A tensor without bytes that computes as the one its slot fetches."""

    slot: LazySlot

    @staticmethod
    def __new__(
        cls,
        slot: Any,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Lazy:
        self: Lazy = make_wrapper(cls, shape, strides=stride, dtype=dtype, device=device)
        self.slot = slot
        return self

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # mypy sees no name of torch's
        return repr(_read(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return _read(self).clone()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return _keep(self).__array__(*args, **kwargs)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return _keep(self).__dlpack__(**kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _read(self).clone().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        return _keep(self).numpy(force=force)

    def tolist(self) -> Any:
        return _read(self).tolist()

    def data_ptr(self) -> int:
        return _keep(self).data_ptr()

    def share_memory_(self) -> Any:
        return _keep(self).share_memory_()

    @classmethod
    def shortcut(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operation that needs no bytes; NotImplemented for others."""
        return NotImplemented

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # mypy: torch's own takes no class
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DETACH:
            return _detached(args[0])
        if takes_lists(func) and len(args[0]) > 1:
            return one_by_one(partial(cls.__torch_dispatch__, func, types), args, kwargs)
        with own_mode():  # no call between: a gradient looks at the frames of who adds to it
            done = cls.shortcut(func, args, kwargs)
        return call(func, args, kwargs) if done is NotImplemented else done


@in_own_mode
def _detached(lazy: Lazy) -> Lazy:
    return type(lazy)(lazy.slot, lazy.shape, lazy.stride(), lazy.dtype, lazy.device)


@in_own_mode
def _read(lazy: Lazy) -> torch.Tensor:
    return lazy.slot.read()


@in_own_mode
def _exact(lazy: Lazy) -> torch.Tensor:
    return lazy.slot.exact()


@in_own_mode
def _keep(lazy: Lazy) -> torch.Tensor:
    return lazy.slot.keep()


@in_own_mode
def _store(lazy: Lazy, written: torch.Tensor) -> None:
    lazy.slot.store(written)


@functools.cache
def takes_lists(func: Any) -> bool:
    """Whether an operation does the same to each tensor of a list, without the others."""
    name, overload = func._schema.name.removeprefix("aten::"), func._schema.overload_name
    if not name.startswith(("_foreach_", "_amp_foreach_")):
        return False
    scalars_in_a_tensor = overload == "Tensor" and name.startswith("_foreach_addc")
    return not scalars_in_a_tensor and overload != "ScalarAndTensor"


def one_by_one(
    run: Callable[[Sequence[Any], Mapping[str, Any]], Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[Any] | None:
    """Run an operation on lists for one tensor of each after another: the device need not hold all
    of them at once."""
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
    n = len(lists[0])
    if any(len(each) != n for each in lists):
        raise RuntimeError(f"lists of {', '.join(str(len(each)) for each in lists)} tensors")

    def nth(value: Any, i: int) -> Any:
        return value[i : i + 1] if isinstance(value, (list, tuple)) else value

    found = [
        run([nth(a, i) for a in args], {key: nth(v, i) for key, v in kwargs.items()})
        for i in range(n)
    ]
    return None if found[0] is None or not len(found[0]) else [each[0] for each in found]


def call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one operation on fetched tensors and write back its changes."""
    views = any(
        r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
    )
    written: dict[int, tuple[Lazy, torch.Tensor]] = {}

    def write(value: Any) -> Any:
        if not isinstance(value, Lazy):
            return value
        if id(value) not in written:
            written[id(value)] = (value, _exact(value))
        return written[id(value)][1]

    def read(value: Any) -> Any:
        if not isinstance(value, Lazy):
            return value
        if id(value) in written:
            return written[id(value)][1]
        return _keep(value) if views else _read(value)

    places = {
        a.name: a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments
    }
    flags = list(places.values())
    # written arguments first: a read of the same tensor must get the same fetched one
    args = [tree_map(write, a) if flags[i] else a for i, a in enumerate(args)]
    named = {k: tree_map(write, v) if places.get(k) else v for k, v in kwargs.items()}
    out = func(*tree_map(read, args), **tree_map(read, named))
    back: dict[int, Lazy] = {}
    for lazy, tensor in written.values():
        _store(lazy, tensor)
        back[id(tensor)] = lazy
    return tree_map(lambda value: back.get(id(value), value), out) if back else out


class HomeSlot:
    """A tensor whose home is on disk, on the device or encoded: read and written as a whole.

    ``keep`` returns an alias of the home's copy (see [Note: copies that are shown] in shown.py).
    """

    def __init__(
        self,
        home: Home,
        segment: Segment,
        *,
        read: Callable[[], torch.Tensor],
        keep: Callable[[], torch.Tensor],
        write: Callable[[torch.Tensor], None],
    ) -> None:
        self.home = home
        self.segment = segment
        self.read = read
        self.exact = read
        self.keep = keep
        self.store = write


class ShownTensor(Lazy):
    """A parameter or a state in a state dict, read or decoded when used."""

    slot: HomeSlot


def handle(store: HomeStore, home: Home, segment: Segment) -> torch.Tensor:
    """Return a segment for a state dict: the home's tensor if it shows the value, else lazy."""
    if home.shows:
        return home.view(segment)

    def there() -> Home:
        """Return the home as it is with what was written to views of the segment."""
        store.before_use()
        now = home.now
        if segment in now.copies and now.copies[segment].written:
            take(now, segment)
        return now

    def read() -> torch.Tensor:
        return there().read(segment)

    def keep() -> torch.Tensor:
        return alias(there(), segment)

    def write(value: torch.Tensor) -> None:
        there().write(segment, value)

    return shown(HomeSlot(home, segment, read=read, keep=keep, write=write))


def shown(slot: HomeSlot) -> Lazy:
    """Return a slot's lazy tensor, with the geometry of its segment."""
    spec, home = slot.segment.spec, slot.home
    return ShownTensor(slot, spec.shape, spec.stride, home.dtype, home.shown_on)


def is_handle(value: torch.Tensor, home: Home, segment: Segment) -> bool:
    """Whether a tensor is the one that `handle` returns for a segment, and not a copy of it."""
    if isinstance(value, ShownTensor):
        return value.slot.home.now is home and value.slot.segment is segment
    return value is home.view(segment)

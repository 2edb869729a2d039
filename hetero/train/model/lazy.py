"""Tensors that are at home elsewhere, and fetched when an operation uses them (floor 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from hetero.internals import make_wrapper, tree_map
from hetero.memory.home import Home
from hetero.memory.homestore import HomeStore
from hetero.memory.layout import Segment

_aten = torch.ops.aten


class LazySlot(Protocol):
    """Where the bytes of a lazy tensor are; all tensors are on the lazy tensor's device."""

    def read(self) -> torch.Tensor:
        """Return the value for one operation that does not write."""

    def exact(self) -> torch.Tensor:
        """Return the value for one operation that writes it."""

    def store(self, written: torch.Tensor) -> None:
        """Write back what an operation left in the tensor that `exact` gave."""

    def keep(self) -> torch.Tensor:
        """Return a tensor that aliases may refer to: what is written to them counts."""


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

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.slot.read())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.slot.read().clone()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.slot.keep().__array__(*args, **kwargs)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.slot.keep().__dlpack__(**kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.slot.read().clone().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        return self.slot.keep().numpy(force=force)

    def tolist(self) -> Any:
        return self.slot.read().tolist()

    def data_ptr(self) -> int:
        return self.slot.keep().data_ptr()

    def share_memory_(self) -> Any:
        return self.slot.keep().share_memory_()

    @classmethod
    def shortcut(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operation that needs no bytes; NotImplemented for others."""
        return NotImplemented

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.detach.default:
            it = args[0]
            return type(it)(it.slot, it.shape, it.stride(), it.dtype, it.device)
        done = cls.shortcut(func, args, kwargs)
        return call(func, args, kwargs) if done is NotImplemented else done


def call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one operation on fetched tensors and write back what it changed."""
    views = any(
        r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
    )
    written: dict[int, tuple[Lazy, torch.Tensor]] = {}

    def write(value: Any) -> Any:
        if not isinstance(value, Lazy):
            return value
        if id(value) not in written:
            written[id(value)] = (value, value.slot.exact())
        return written[id(value)][1]

    def read(value: Any) -> Any:
        if not isinstance(value, Lazy):
            return value
        if id(value) in written:
            return written[id(value)][1]
        return value.slot.keep() if views else value.slot.read()

    places = {
        a.name: a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments
    }
    flags = list(places.values())
    # what is written comes first: a read of the same tensor must see that very one
    args = [tree_map(write, a) if flags[i] else a for i, a in enumerate(args)]
    named = {k: tree_map(write, v) if places.get(k) else v for k, v in kwargs.items()}
    out = func(*tree_map(read, args), **tree_map(read, named))
    back: dict[int, Lazy] = {}
    for lazy, tensor in written.values():
        lazy.slot.store(tensor)
        back[id(tensor)] = lazy
    return tree_map(lambda value: back.get(id(value), value), out) if back else out


class HomeSlot:
    """A tensor that is at home on disk, or in code: read, and written back, as a whole.

    ``keep`` gives an alias of the copy that stands for it (see [Note: copies that are shown] in
    home.py).
    """

    def __init__(
        self,
        view: torch.Tensor,
        *,
        read: Callable[[], torch.Tensor],
        keep: Callable[[], torch.Tensor],
        write: Callable[[torch.Tensor], None],
    ) -> None:
        self.view = view  # which part of a home it is
        self.read = read
        self.exact = read
        self.keep = keep
        self.store = write


class ShownTensor(Lazy):
    """A parameter or a state, in a state dict, that is read, or decoded, when it is used."""

    slot: HomeSlot


def handle(store: HomeStore, home: Home, segment: Segment) -> torch.Tensor:
    """Return a home's part for a state dict: its own tensor where it shows the value, else one that
    reads itself."""
    view = home.view(segment)
    if home.shows:
        return view

    def read() -> torch.Tensor:
        store.before_use()
        return home.read(segment)

    def keep() -> torch.Tensor:
        store.before_use()
        return home.alias(segment)

    def write(value: torch.Tensor) -> None:
        store.before_use()
        home.write(segment, value)

    return shown(HomeSlot(view, read=read, keep=keep, write=write), segment)


def shown(slot: HomeSlot, segment: Segment) -> Lazy:
    """Return a tensor of a slot, with the geometry of its segment."""
    spec, view = segment.spec, slot.view
    return ShownTensor(slot, spec.shape, spec.stride, view.dtype, view.device)


def is_handle(value: torch.Tensor, home: Home, segment: Segment) -> bool:
    """Whether a tensor is what `handle` returns of a home's part, and not a copy of it."""
    view = home.view(segment)
    return value is view or (isinstance(value, ShownTensor) and value.slot.view is view)

"""Views of weights that ranks share, which tell when a program writes through them (floor 2).

Such a write is made outside of any access, and comes home at once (see [Note: settled writes] in
memory/unsettled.py). One that torch's functions do not see (by numpy, by a collective of
torch.distributed) is found at the next access.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from hetero.internals import (
    functorch_level,
    modes_on,
    tree_iter,
    tree_map,
    version_of,
    without_torch_function,
)
from hetero.types import noop

Wrote = Callable[[int], object]
"""Is told the address of a storage that was written."""


UNCOUNTED = ("apply_", "map_", "map2_")
"""Functions that write, and raise no version."""


class WatchedView(torch.Tensor):
    """A plain tensor apart from that; copies of it are plain."""

    hetero_wrote: Wrote = staticmethod(noop)  # of results of compiled code

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if torch.compiler.is_compiling():  # what compiled code writes is found at the next access
            traced = super().__torch_function__
            return traced(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # torch's
        kwargs = kwargs or {}
        views = [each for each in tree_iter((args, kwargs)) if isinstance(each, WatchedView)]
        is_alone = all(kind in PLAIN for kind in types)
        if not is_alone or functorch_level() is not None or modes_on():
            # weights whose bytes are elsewhere, classes of a program's, and what sees operations
            args, kwargs = tree_map(_plain_if_view, (args, kwargs))
        before = [_version(view) for view in views]
        with without_torch_function() if is_alone else nullcontext():
            found = func(*args, **kwargs)
        for view, then in zip(views, before, strict=True):
            if _version(view) != then or getattr(func, "__name__", "") in UNCOUNTED:
                view.hetero_wrote(_storage(view))
        return watched(found, {_storage(view): view.hetero_wrote for view in views})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's has a keyword
        return repr(_plain(self))

    def __format__(self, spec: str) -> str:
        return format(_plain(self).detach(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _apart(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = copy.deepcopy(_apart(self), memo)
        found: torch.Tensor = memo[id(self)]
        return found


def watched(found: Any, wrote: Mapping[int, Wrote]) -> Any:
    """Return a function's result, with views of these storages watched."""
    if type(found) is tuple or type(found) is list:
        return type(found)(watched(each, wrote) for each in found)
    if type(found) is not torch.Tensor or found.layout is not torch.strided:
        return found
    if functorch_level() is not None or modes_on():
        return found
    tell = wrote.get(_storage(found))
    if tell is None:
        return found
    view = found.as_subclass(WatchedView)
    view.hetero_wrote = tell
    return view


PLAIN = (WatchedView, torch.Tensor, torch.nn.Parameter)


def _plain(view: WatchedView) -> torch.Tensor:
    with without_torch_function():
        return view.as_subclass(torch.Tensor)


def _plain_if_view(value: Any) -> Any:
    return _plain(value) if isinstance(value, WatchedView) else value


def _apart(view: WatchedView) -> torch.Tensor:
    """Return a plain leaf, or parameter, with a view's memory; a view with a graph as it is."""
    with without_torch_function():
        is_leaf, asks = view.is_leaf, view.requires_grad
        if not is_leaf:
            return view.as_subclass(torch.Tensor)
        found = view.detach().as_subclass(torch.Tensor)
        if getattr(view, "_is_param", False):
            return torch.nn.Parameter(found, asks)
        return found.requires_grad_(asks)


def _version(view: WatchedView) -> int:
    with without_torch_function():
        return 0 if view.is_inference() else version_of(view)


def _storage(tensor: torch.Tensor) -> int:
    with without_torch_function():
        return int(tensor.untyped_storage()._cdata)

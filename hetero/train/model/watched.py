"""Views of weights that ranks share, which tell when a program writes through them (floor 2).

Such a write is made outside of any access, and comes home at once (see [Note: settled writes] in
memory/unsettled.py). One that torch's functions do not see (by numpy, by a collective of
torch.distributed) is found at the next access.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hetero.internals import tree_iter, tree_map, version_of, without_torch_function

Wrote = Callable[[int], object]
"""Is told the address of a storage that was written."""


class WatchedView(torch.Tensor):
    """A plain tensor apart from that; copies of it are plain."""

    hetero_wrote: Wrote

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        views = [each for each in tree_iter((args, kwargs)) if isinstance(each, WatchedView)]
        before = [_version(view) for view in views]
        if all(kind in PLAIN for kind in types):
            with without_torch_function():
                found = func(*args, **kwargs)
        else:  # parameters whose bytes are elsewhere, and classes of a program's
            given, named = tree_map(_plain_if_view, (args, kwargs))
            found = func(*given, **named)
        for view, then in zip(views, before, strict=True):
            if _version(view) != then:
                view.hetero_wrote(_storage(view))
        return watched(found, {_storage(view): view.hetero_wrote for view in views})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's has a keyword
        return repr(_plain(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(_plain(self), memo)


def watched(found: Any, wrote: Mapping[int, Wrote]) -> Any:
    """Return a function's result, with views of these storages watched."""
    if type(found) is tuple or type(found) is list:
        return type(found)(watched(each, wrote) for each in found)
    if type(found) is not torch.Tensor or found.layout is not torch.strided:
        return found
    tell = wrote.get(_storage(found))
    is_differentiated = found.requires_grad and torch.is_grad_enabled()
    if tell is None or is_differentiated:  # autograd refuses writes to such a view
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


def _version(view: WatchedView) -> int:
    with without_torch_function():
        return 0 if view.is_inference() else version_of(view)


def _storage(tensor: torch.Tensor) -> int:
    with without_torch_function():
        return int(tensor.untyped_storage()._cdata)

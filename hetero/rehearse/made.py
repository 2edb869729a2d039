"""Operations of updates without bytes, whose results are made anew (floor 4)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hetero.rehearse.clock import FREE, geometry, maker
from hetero.train.activations.meter import tensors_in
from hetero.train.model.looking import Unguarded

_RESIZE = torch.ops.aten.resize_.default  # may leave more memory than the geometry shows

Call = Callable[..., Any]


class Made(Unguarded):
    """Runs an operation once for arguments of some geometry, and then makes its result.

    The time of updates is modelled as a whole, so operations matter for what they refuse alone, and
    the same arguments are refused at once. On tensors that have bytes all of them run.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Any, Call | None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view or func in FREE:
            return func(*args, **kwargs)
        try:
            key = func, geometry(args), geometry(tuple(kwargs.items()))
            is_known = key in self._known
        except TypeError:  # an argument that cannot be hashed
            return func(*args, **kwargs)
        if is_known:
            makes = self._known[key] or partial(func, **kwargs)
            return makes(*args)
        before = geometry(args)
        found = func(*args, **kwargs)
        self._known[key] = written(func, args, found, before) or made(func, args, kwargs, found)
        return found


def made(func: Any, args: Any, kwargs: dict[str, Any], found: Any) -> Call | None:
    """Return a call that makes an operation's result; None if it has to run."""
    make = maker(func, [*tensors_in((*args, *kwargs.values()))], [*tensors_in(found)], found)
    return None if make is None else lambda *given: make()


def written(func: Any, args: Any, found: Any, before: Any) -> Call | None:
    """Return a call that returns the tensor that an operation wrote to; None if it does more.
    Autograd, which is above modes, counts the write."""
    arguments = func._schema.arguments
    first = bool(arguments) and arguments[0].alias_info is not None
    alone = first and all(argument.alias_info is None for argument in arguments[1:])
    if not alone or func is _RESIZE or torch.Tag.inplace_view in func.tags:
        return None
    if found is not args[0] or not found.is_meta or geometry(args) != before:
        return None
    return lambda first, *others: first

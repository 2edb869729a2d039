"""Where a block of a chain may be cut in two (floor 3).

A block that adds the output of some of its modules to its input, and goes on from that sum alone,
is two in a row: ``t = x + first(x)``, then ``second(t)``. In the half that has the second part the
first one gives -0.0, which leaves every number as it is, so that ``x`` stands for ``t``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hetero.internals import DispatchMode, tree_iter

BLANKS = ("_like", "new_")
"""In the names of operations whose results take geometry alone from their arguments."""
_aten = torch.ops.aten


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    return (each for each in tree_iter(value) if isinstance(each, torch.Tensor))


def storage_of(tensor: torch.Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place


def are_alike(*values: Any) -> bool:
    """Whether values are tensors of one shape and dtype."""
    return len({(getattr(v, "shape", v), getattr(v, "dtype", v)) for v in values}) == 1


def first_of(args: Any, kwargs: Any) -> torch.Tensor | None:
    """Return the first tensor of a call."""
    found = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
    return next(found, None)


Around = Callable[[Callable[..., Any], Any, Any], Any]


def wrap(model: nn.Module, name: str, around: Around) -> None:
    """Call ``around(forward, args, kwargs)`` in place of a module's forward."""
    module = model.get_submodule(name)
    act = module.forward
    module.forward = lambda *args, **kwargs: around(act, args, kwargs)


def unwrap(model: nn.Module, names: Sequence[str]) -> None:
    for name in names:
        vars(model.get_submodule(name)).pop("forward", None)


@dataclass(frozen=True)
class Waist:
    """The two parts of a block: names, in it, of its modules."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    """In the order of their calls: the first one is given the sum."""
    n_outputs: int
    """What the last module of the first part returns: a tensor (0), or a tuple of so many."""


class Narrowing(DispatchMode):
    """Looks for the waist of a block while it runs.

    Args:
        block: without parameters of its own.
        x: what it is given.
    """

    def __init__(self, block: nn.Module, x: torch.Tensor) -> None:
        super().__init__()
        self._block = block
        self._x = x
        self._kept: list[torch.Tensor] = [x]  # alive, so that no other takes their places
        self._sums: dict[int, set[int]] = {}
        self._stale: set[int] = {storage_of(x)}
        """Storages that come from ``x``, in the first part."""
        self._calls: list[tuple[str, Any]] = []
        self._given: torch.Tensor | None = None
        """First to the last module so far."""
        self._waist_at: int | None = None

    def run(self, act: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Waist | None]:
        """Run the block; return its result and its waist, if it has one."""
        names = [name for name, _ in self._block.named_children()]
        for name in names:
            wrap(self._block, name, partial(self._child, name))
        try:
            with self:
                found = act(*args, **kwargs)
        finally:
            unwrap(self._block, names)
        return found, None if self._is_stale(found) else self._waist()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **kwargs or {})
        self._kept += tensors_of(found)
        name = func.overloadpacket.__name__
        if self._is_stale((args, kwargs)) and not any(each in name for each in BLANKS):
            self._stale |= set(map(storage_of, tensors_of(found)))
        if func is _aten.add.Tensor and not kwargs and are_alike(*args):
            self._sums[storage_of(found)] = set(map(storage_of, args))
        return found

    def _is_stale(self, value: Any) -> bool:
        return any(storage_of(each) in self._stale for each in tensors_of(value))

    def _child(self, name: str, act: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._waist_at is None and args and self._calls and self._is_sum(args[0]):
            self._waist_at = len(self._calls)
            self._stale.discard(storage_of(args[0]))
        if self._waist_at is None:
            self._given = first_of(args, kwargs)
        found = act(*args, **kwargs)
        self._kept += tensors_of(found)
        self._calls.append((name, found))
        return found

    def _is_sum(self, t: Any) -> bool:
        """Whether a tensor is the block's input and what its last module returned."""
        added = list(tensors_of(self._calls[-1][1]))[:1]
        parts = {storage_of(self._x), *map(storage_of, added)}
        return are_alike(t, self._x) and len(parts) == 2 and self._sums.get(storage_of(t)) == parts

    def _waist(self) -> Waist | None:
        at, names = self._waist_at, [name for name, _ in self._calls]
        own = any(param is not None for param in self._block._parameters.values())
        is_alike = self._given is not None and self._given.shape == self._x.shape
        if at is None or own or not is_alike or len(set(names)) < len(names):
            return None
        last = self._calls[at - 1][1]
        others = [found for n, (_, found) in enumerate(self._calls) if n != at - 1]
        if not all(isinstance(found, torch.Tensor) for found in others):
            return None
        n_outputs = 0 if isinstance(last, torch.Tensor) else len(last)
        is_known = isinstance(last, (torch.Tensor, tuple))
        return Waist(tuple(names[:at]), tuple(names[at:]), n_outputs) if is_known else None

"""Modes that look at a program's operations, and change no bit of it (floor 2).

[Note: formulas under a mode]  Under any dispatch mode torch takes other formulas in some backwards:
those that it takes for tensors of which it knows nothing (`isTensorSubclassLike`, in its
FunctionsManual.cpp). That of `prod` rounds differently; of 136 operations that were tried, no other
does. So modes that only look are off while a node of `prod` computes. What it makes is told after
it; its temporaries, of the size of what `prod` was given, are not seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hetero.internals import (
    TRILINEAR,
    DispatchMode,
    as_called,
    modes_on,
    pop_modes,
    push_modes,
    switching_autocast,
)
from hetero.types import noop

PRODUCTS = frozenset({"ProdBackward0", "ProdBackward1"})
Call = Callable[..., Any]


class Unguarded(DispatchMode):
    """A mode whose work costs less than dynamo's guard against compiling it would."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class OnlyLooks(Unguarded):
    """A mode that leaves results as they are, those of backwards too."""


def bitwise(func: Any) -> Any:
    """Return what a mode that only looks calls for an operation, so that it has the bits that it
    has without the mode. It is called by `__torch_dispatch__` itself: frames between an operation
    and its caller tell who calls."""
    return _trilinear if func is TRILINEAR else func


def _trilinear(*args: Any) -> torch.Tensor:
    """Of nn.Bilinear; made in C++ of operations that autocast casts, which is off in a mode."""
    kind = args[0].device.type
    with as_called():
        casts = torch.is_autocast_enabled(kind)
    with switching_autocast(kind, on=casts):
        found: torch.Tensor = TRILINEAR(*args)
    return found


class LookingMode(OnlyLooks):
    """Looks at the operations of a program that is not ours, whose passes are `unseeing`."""

    supports_higher_order_operators = True  # their inner results are seen when they come out

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code stays compiled: its numbers would change


@contextmanager
def unseen_products(roots: Sequence[Any], made: Call = noop) -> Iterator[None]:
    """Run a backward pass from ``roots`` inside, so that it gives the bits that it would give
    without the modes that are on, if those only look: see [Note: formulas under a mode].

    ``made`` is called with the gradients that each such node made, under the modes.
    """
    modes = modes_on()
    if not modes or not all(isinstance(mode, OnlyLooks) for mode in modes):
        yield  # nothing looks, or the program has a mode of its own, as it would have without us
        return
    handles = []
    for node in nodes_of(roots):
        if type(node).__name__ in PRODUCTS:
            handles += _without_modes(node, made)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _without_modes(node: Any, made: Call) -> list[Any]:
    """Take all modes off while a node computes. If it fails, torch puts back those of the pass."""
    modes: list[Any] = []

    def before(_: Any) -> None:
        modes.extend(pop_modes())

    def after(gradients: Any, _: Any) -> None:
        push_modes(modes)
        modes.clear()
        made(gradients)

    return [node.register_prehook(before), node.register_hook(after)]


def nodes_of(roots: Sequence[Any]) -> Iterator[Any]:
    """Yield the nodes of a graph, of which a root is a tensor or a GradientEdge."""
    ahead = [n for root in roots if (n := getattr(root, "grad_fn", None) or _node(root))]
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        yield node
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                ahead.append(below)


def _node(root: Any) -> Any:
    return getattr(root, "node", None)


def unseeing(run: Call) -> Call:
    """Return a function that runs backward passes, with [Note: formulas under a mode] kept."""

    @functools.wraps(run)
    def passes(roots: Any, *args: Any, **kwargs: Any) -> Any:
        with unseen_products(roots):
            return run(roots, *args, **kwargs)

    return passes

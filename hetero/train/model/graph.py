"""Inspecting autograd's graphs (floor 2).

[Note: out of gc's sight]  A graph holds parameters where gc does not look, and a module may hold a
graph through an output that it has kept. So a parameter, its class, the runtime and all that it
refers to must not refer to a module; else such a model would keep itself alive, with its files and
threads. They call the engine through weak references, and do without it once only parameters or a
graph of the model are left.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class OurHook:
    """Our hook on a parameter: it changes no gradient, and may be called again."""


def users_hooks(param: torch.Tensor) -> list[Any]:
    """Return the hooks on a parameter's gradient that are not ours."""
    hooks = getattr(param, "_backward_hooks", None) or {}
    return [hook for hook in hooks.values() if not isinstance(hook, OurHook)]


def leaves_of(outputs: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield the leaves that gradients of ``outputs``, tensors or edges of a graph, flow to, nearest
    branches first."""
    seen: set[Any] = set()
    stack: list[Any] = [
        getattr(out, "grad_fn", None) or getattr(out, "node", None) for out in outputs
    ]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            yield leaf
        stack.extend(child for child, _ in node.next_functions)


def versions(values: Sequence[Any]) -> list[int]:
    """Return how often each tensor among values was written."""
    return [v._version for v in values if isinstance(v, torch.Tensor) and not v.is_inference()]


def ask_unless_gone(
    owner: T, question: Callable[Concatenate[T, P], R], otherwise: R
) -> Callable[P, R]:
    """Return a weak call of ``question`` with ``owner``: ``otherwise`` once that is gone, see
    [Note: out of gc's sight]."""
    found = weakref.ref(owner)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        here = found()
        return otherwise if here is None else question(here, *args, **kwargs)

    return call


def unless_gone(method: Callable[..., R], otherwise: R) -> Callable[..., R]:
    """Return a weak call of a method: ``otherwise`` once its object is gone, see
    [Note: out of gc's sight]."""
    found = weakref.WeakMethod(method)

    def call(*args: Any) -> R:
        here = found()
        return otherwise if here is None else here(*args)

    return call

"""What autograd's graphs and passes look like from outside (floor 2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

NO_TASK = -1
_task = torch._C._current_graph_task_id


class OurHook:
    """A hook on a parameter that is ours: it changes no gradient, and may be called again."""


def users_hooks(param: torch.Tensor) -> list[Any]:
    """Return the hooks on a parameter's gradient that are not ours."""
    hooks = getattr(param, "_backward_hooks", None) or {}
    return [hook for hook in hooks.values() if not isinstance(hook, OurHook)]


def in_backward() -> bool:
    """Whether the calling thread is inside a backward pass."""
    return bool(_task() != NO_TASK)


def leaves_of(outputs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the leaves that gradients of tensors flow to, nearest branches first."""
    seen: set[Any] = set()
    stack: list[Any] = [output.grad_fn for output in outputs]
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

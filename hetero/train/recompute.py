"""Computing a unit again in backward, from its inputs (floor 2).

Torch's own non-reentrant checkpoint at the unit's border restores its generators and autocast. What
it does not restore are buffers: a batch norm would move its running averages twice. While a unit is
computed again, copies stand in for its buffers, and for a cache that it adds keys and values to.
Nor does it know of other generators: Python's, numpy's and those that modules have of their own
draw again what they drew.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from hetero.errors import StateError
from hetero.train.caches import is_cache, twin

Call = Callable[..., Any]
NO_TASK = -1
_task = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether the calling thread is inside a backward pass."""
    return bool(_task() != NO_TASK)


def recomputed(module: nn.Module, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return ``call(*args, **kwargs)``, of which only the inputs stay until backward."""
    leaves, spec = tree_flatten((tuple(args), kwargs), is_leaf=is_cache)
    distinct, places = told_apart(leaves)
    caches = {at: twin(value) for at, value in enumerate(distinct) if is_cache(value)}

    drawn: list[Drawn] = []

    def run(*distinct: Any) -> Any:
        again = in_backward()
        given = [twin(caches[at]) if again and at in caches else distinct[at] for at in places]
        args, kwargs = tree_unflatten(given, spec)
        if not again:
            with noting(module, drawn):
                return call(*args, **kwargs)
        with buffers_apart(module), drawing_again(drawn):
            return call(*args, **kwargs)

    before = versions(distinct)
    found = checkpoint(run, *distinct, use_reentrant=False)
    if versions(distinct) != before:
        raise StateError(
            f"this {type(module).__name__} writes to its inputs in place; what it was given is gone"
            " when it is computed again",
            advice="keep what it saves with activations='keep', or let it write to a copy",
        )
    return found


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


def told_apart(leaves: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Return each object once, and the place of every leaf among them.

    What a forward was given twice it is given twice again: modules ask whether query is key.
    """
    index: dict[int, int] = {}
    places = [index.setdefault(id(leaf), len(index)) for leaf in leaves]
    return list({id(leaf): leaf for leaf in leaves}.values()), places


@contextmanager
def buffers_apart(module: nn.Module) -> Iterator[None]:
    """Let copies stand in for a module's buffers; what a block does to them is forgotten."""
    held = [(m, dict(m._buffers)) for m in module.modules() if m._buffers]
    for owner, buffers in held:
        owner._buffers.update(
            {name: None if b is None else b.clone() for name, b in buffers.items()}
        )
    try:
        yield
    finally:
        for owner, buffers in held:
            owner._buffers.update(buffers)


class Source(NamedTuple):
    """A generator that torch's checkpoint does not know."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]


class Drawn(NamedTuple):
    """A generator that was drawn from, and its state before."""

    source: Source
    state: Any


def sources(module: nn.Module) -> Iterator[Source]:
    """Yield the generators that a module may draw from, torch's global ones not among them."""
    yield Source(random.getstate, random.setstate, operator.eq)
    yield Source(np.random.get_state, np.random.set_state, _same_arrays)
    found = {id(v): v for m in module.modules() for v in vars(m).values() if _is_generator(v)}
    for generator in found.values():
        yield Source(generator.get_state, generator.set_state, torch.equal)


def _is_generator(value: Any) -> bool:
    return isinstance(value, torch.Generator)


def _same_arrays(first: Any, second: Any) -> bool:
    return bool(np.array_equal(first[1], second[1]) and first[2:] == second[2:])


@contextmanager
def noting(module: nn.Module, drawn: list[Drawn]) -> Iterator[None]:
    """Note which generators a block draws from, and where they stood."""
    before = [Drawn(source, source.get()) for source in sources(module)]
    yield
    drawn[:] = [one for one in before if not one.source.same(one.state, one.source.get())]


@contextmanager
def drawing_again(drawn: Sequence[Drawn]) -> Iterator[None]:
    """Let generators stand where they stood; they go on afterwards as if the block had not run."""
    after = [Drawn(source, source.get()) for source, _ in drawn]
    for source, state in drawn:
        source.set(state)
    try:
        yield
    finally:
        for source, state in after:
            source.set(state)

"""Arguments and outputs as leaves and a structure (floor 2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hetero.internals import TreeSpec, tree_flatten, tree_iter, tree_unflatten
from hetero.train.activations.caches import is_cache

_PLAIN = frozenset({type(None), bool, int, float, str})


class _Fields(NamedTuple):
    """Stands for a dataclass among leaves."""

    kind: type
    names: tuple[str, ...]


class Structure(NamedTuple):
    """The structure of arguments or outputs, including dataclasses unknown to torch."""

    spec: TreeSpec
    inner: tuple[tuple[_Fields, Structure] | None, ...]

    def build(self, leaves: Iterator[Any]) -> Any:
        """Return the structure, in new containers, with ``leaves`` in it."""
        found = []
        for inner in self.inner:
            if inner is None:
                found.append(next(leaves))
                continue
            fields, structure = inner
            values = structure.build(leaves)
            made: Any = object.__new__(fields.kind)
            for name, value in zip(fields.names, values, strict=True):
                object.__setattr__(made, name, value)
            found.append(made)
        return tree_unflatten(found, self.spec)


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of nested containers and dataclasses, and their structure."""
    outer, spec = tree_flatten(value, is_leaf=is_cache)
    leaves: list[Any] = []
    inner: list[tuple[_Fields, Structure] | None] = []
    for leaf in outer:
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            leaves.append(leaf)
            inner.append(None)
            continue
        names = tuple(field.name for field in dataclasses.fields(leaf))
        below, structure = flatten([getattr(leaf, name) for name in names])
        leaves.extend(below)
        inner.append((_Fields(type(leaf), names), structure))
    return leaves, Structure(spec, tuple(inner))


def leaves_of(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Return the leaves torch's pytrees find in a value; usual values take a faster way."""
    found: list[Any] = []
    _add_leaves(value, found, is_leaf)
    return found


def _add_leaves(value: Any, found: list[Any], is_leaf: Callable[[Any], bool] | None) -> None:
    kind = type(value)
    if kind is tuple or kind is list:
        for item in value:
            _add_leaves(item, found, is_leaf)
    elif kind is dict:
        for item in value.values():
            _add_leaves(item, found, is_leaf)
    elif kind in _PLAIN or isinstance(value, torch.Tensor):
        found.append(value)
    else:
        found.extend(tree_iter(value, is_leaf=is_leaf))


def told_apart(leaves: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Return the distinct objects, and every leaf's place among them.

    Aliasing among arguments is preserved: attention checks whether ``query is key``.
    """
    index: dict[int, int] = {}
    places = [index.setdefault(id(leaf), len(index)) for leaf in leaves]
    return list({id(leaf): leaf for leaf in leaves}.values()), places

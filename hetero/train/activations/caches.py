"""Caches of keys and values of transformers: cut into rows, and copied (floor 2).

A unit extends a cache in its forward, so a slice of the batch needs a cache of its own rows. A
`DynamicCache` of plain layers can be cut: its tensors have the batch first, and extending a layer
makes new tensors. A static cache is made for one batch size, windowed and quantized layers keep
more than rows, and other caches are unknown: with these a unit takes the whole batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

LAYER = "DynamicLayer"
TENSORS = ("keys", "values")


def is_cache(value: Any) -> bool:
    """Whether a value is a transformers cache of keys and values, which forwards extend."""
    return not isinstance(value, (torch.Tensor, nn.Module, type)) and all(
        callable(getattr(value, name, None)) for name in ("update", "get_seq_length")
    )


def has_rows(cache: Any) -> bool:
    """Whether a cache can be cut along the batch, and put together again."""
    layers = getattr(cache, "layers", None)
    later = getattr(cache, "layer_class_to_replicate", None)  # of layers added later
    kinds = [type(layer).__name__ for layer in layers or ()]
    if later is not None:
        kinds.append(later.__name__)
    return bool(kinds) and all(kind == LAYER for kind in kinds)


def rows_of(cache: Any, rows: slice) -> Any:
    """Return a cache of some rows; its tensors are views until it is extended."""
    part = copy.copy(cache)
    part.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in part.layers:
        for name in TENSORS:
            tensor = getattr(layer, name)
            if tensor is not None and tensor.numel():
                setattr(layer, name, tensor[rows])
    return part


def put_together(cache: Any, parts: Sequence[Any]) -> None:
    """Update a cache from the caches of its rows."""
    for index in range(max(len(part.layers) for part in parts)):
        layers = [part.layers[index] for part in parts]
        if index < len(cache.layers) and _is_as_it_was(cache.layers[index], layers[0]):
            continue
        whole = copy.copy(layers[0])
        for name in TENSORS:
            tensors = [getattr(layer, name) for layer in layers]
            if tensors[0] is not None and tensors[0].numel():
                setattr(whole, name, torch.cat(tensors))
        if index < len(cache.layers):
            vars(cache.layers[index]).update(vars(whole))
        else:
            cache.layers.append(whole)


def _is_as_it_was(before: Any, after: Any) -> bool:
    """Whether a layer was not extended."""
    if before.keys is None or after.keys is None:
        return before.keys is after.keys
    same: bool = before.keys.shape[1:] == after.keys.shape[1:]
    return same


def twin(cache: Any) -> Any:
    """Return a copy of a cache with the same tensors, to be extended by itself."""
    return copy.deepcopy(cache, {id(tensor): tensor for tensor in tensors_in(cache, set())})


def tensors_in(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an object of plain attributes and containers holds."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    parts: list[Any] = list(value) if isinstance(value, (list, tuple)) else []
    if isinstance(value, dict):
        parts += value.values()
    if not isinstance(value, type):
        parts += getattr(value, "__dict__", {}).values()
    for part in parts:
        yield from tensors_in(part, seen)

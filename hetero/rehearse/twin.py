"""Models, optimizers and batches without bytes: their twins on the meta device (floor 4)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from hetero.dry import META
from hetero.errors import ConfigError, StateError
from hetero.internals import tree_map
from hetero.train.model.units import MARK


class Twin(NamedTuple):
    """A model and its optimizer without their numbers."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None


def twin_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    dtypes: Mapping[int, torch.dtype] = MappingProxyType({}),
) -> Twin:
    """Return copies whose tensors are on the meta device; nothing of the originals is copied.

    Tied weights stay tied, and model and optimizer share parameters. ``dtypes`` are those of the
    copies, by the id of a parameter; the others keep theirs.
    """
    if MARK in model.__dict__:
        raise StateError(
            "the model is prepared already: what it does is in hetero.status and hetero.profile",
            advice="plan before hetero.prepare, or release the model first",
        )
    memo: dict[int, Any] = {}
    for tensor in tensors_of(model, optimizer):
        if id(tensor) not in memo:
            memo[id(tensor)] = without_bytes(tensor, dtypes.get(id(tensor)))
    try:
        return Twin(copy.deepcopy(model, memo), copy.deepcopy(optimizer, memo))
    except (TypeError, RuntimeError) as error:
        raise ConfigError(
            f"{type(model).__name__} cannot be copied: {error}",
            advice="plan with a module as it is made, before it has run, or with the name of a"
            " function that makes it",
        ) from error


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    """Yield parameters with their gradients, buffers, and the states that have a shape."""
    for param in model.parameters():
        yield param
        if param.grad is not None:
            yield param.grad
    yield from model.buffers()
    for state in optimizer.state.values() if optimizer is not None else ():
        yield from (v for v in state.values() if isinstance(v, torch.Tensor) and v.dim())


def without_bytes(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor of the same geometry and kind on the meta device."""
    dtype = dtype or tensor.dtype
    blank = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=META)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(blank, tensor.requires_grad)
    return blank.requires_grad_(tensor.requires_grad)


def batch_twin(batch: Any) -> Any:
    """Return a batch whose tensors are on the meta device."""
    return tree_map(lambda x: without_bytes(x) if isinstance(x, torch.Tensor) else x, batch)

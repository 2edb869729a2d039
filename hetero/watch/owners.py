"""Tensors of a program that have an owner: its modules and its optimizers (floor 4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from hetero.internals import is_traceable_wrapper_subclass, tree_iter
from hetero.train.model.units import MARK
from hetero.train.update.optimizer import Optimizer, unwrapped
from hetero.watch.picture import OUTSIDE, MemoryUse


class Owned(NamedTuple):
    """A tensor with the module that it belongs to."""

    use: MemoryUse
    module: str
    tensor: torch.Tensor


def is_prepared(model: nn.Module) -> bool:
    """Whether hetero manages a model, or one inside of it."""
    return any(MARK in module.__dict__ for module in model.modules())


def module_names(models: Iterable[nn.Module]) -> dict[int, str]:
    """Return the names of all modules, by id: in the first model that has them."""
    names: dict[int, str] = {}
    for model in models:
        for name, module in model.named_modules():
            names.setdefault(id(module), name or type(model).__name__)
    return names


def owned(
    models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[Owned]:
    """Yield parameters, gradients, buffers and states of plain models, each parameter's once."""
    names: dict[int, str] = {}
    models = [model for model in models if not is_prepared(model)]
    paths = module_names(models)
    for model in models:
        for module in model.modules():
            name = paths[id(module)]
            for param in module._parameters.values():
                if param is not None and id(param) not in names:
                    names[id(param)] = name
                    yield from with_gradient(name, param)
            yield from (
                Owned(MemoryUse.BUFFERS, name, b) for b in module._buffers.values() if b is not None
            )
    for optimizer in optimizers:
        if isinstance(unwrapped(optimizer), Optimizer):
            continue  # to read its states would wait for them
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in names:
                    names[id(param)] = OUTSIDE
                    yield from with_gradient(OUTSIDE, param)
        for stepped, state in list(optimizer.state.items()):
            for value in tree_iter(state):
                if isinstance(value, torch.Tensor):
                    yield Owned(MemoryUse.STATES, names.get(id(stepped), OUTSIDE), value)


def with_gradient(name: str, param: torch.Tensor) -> Iterator[Owned]:
    """Yield a parameter, and its gradient if it has one."""
    yield Owned(MemoryUse.PARAMETERS, name, param)
    if param.grad is not None:
        yield Owned(MemoryUse.GRADIENTS, name, param.grad)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage that holds a tensor's bytes; None for a wrapper, or a sparse tensor."""
    if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
        return None
    return tensor.untyped_storage()

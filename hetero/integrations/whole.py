"""Whole tensors of a prepared model, as files of other libraries have them (floor 4)."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from hetero.api import company_of
from hetero.export import is_plain, write
from hetero.io import IO
from hetero.parallel.mesh import parts_of
from hetero.train.access.hooks import before_load
from hetero.train.model.parts import Parts

STAGED = ".hetero-weights"  # while parameters are read from disk, or from other ranks
MAPPED_BYTES = 5 * 10**9  # of tensors in one of its files


def has_plain_state(model: nn.Module) -> bool:
    """Whether all tensors of a model's state dict are in this process's memory, and whole."""
    values = model.state_dict().values()
    return all(is_plain(value) for value in values if isinstance(value, torch.Tensor))


@contextmanager
def for_files(model: nn.Module, folder: Path, *, writes: bool) -> Iterator[nn.Module | None]:
    """Yield a module whose state dict is plain: the model, or one made of exported files; None on a
    rank that reads along while another one ``writes``."""
    if has_plain_state(model):
        yield model
    elif writes:
        with exported_state(model, folder) as state:
            yield Weights(state)
    else:
        if company_of(model).size > 1:  # else the others have models of their own
            take_part(model, folder)
        yield None


@contextmanager
def exported_state(model: nn.Module, folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Yield a model's state dict as plain tensors, mapped from files.

    safetensors writes tensors in memory, and parameters with homes on disk, or of which other ranks
    have parts, are not. They are exported into the folder and mapped from there, so that memory
    holds one piece at a time. Collective where ranks share the model: the others `take_part`.
    """
    staged = folder / STAGED
    try:
        read(model, staged, writes=True)
        mapped: dict[str, torch.Tensor] = {}
        for path in staged.glob("*.safetensors"):
            mapped.update(load_file(path))
        first: dict[int, str] = {}
        names = model.named_parameters(remove_duplicate=False)
        tied = {name: first.setdefault(id(param), name) for name, param in names}
        yield {name: mapped[tied.get(name, name)] for name in model.state_dict()}
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def take_part(model: nn.Module, folder: Path) -> None:
    """Read what `exported_state` reads, on a rank that shares the model of the one that writes."""
    read(model, folder / STAGED, writes=False)


def read(model: nn.Module, staged: Path, *, writes: bool) -> None:
    """Read a model's tensors, of which each rank that shares it may have its own writer."""
    comm = company_of(model)
    write(model, staged, MAPPED_BYTES, IO(), comm, gathers=comm.node is None, writes=writes)


class Weights(nn.Module):
    """A state dict, as the module that has it."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._state = state

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return OrderedDict(self._state)


@contextmanager
def whole_values(model: nn.Module) -> Iterator[None]:
    """Let loads inside the block give whole tensors to parameters of which ranks have parts."""
    parts = parts_of(model)
    with ExitStack() as undo:
        for module in model.modules() if parts.kinds else ():
            if any(isinstance(param, parts.kinds) for param in module.parameters(recurse=False)):
                undo.callback(before_load(module, partial(cut, parts, module)))
        yield


def cut(parts: Parts, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Replace each whole tensor for a divided parameter by this rank's part of it."""
    for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
        place, value = parts.place(prefix + name, param), state.get(prefix + name)
        if place is None or not isinstance(value, torch.Tensor) or value.shape != param.shape:
            continue
        if parts.inside(value) is None:
            part = value[tuple(slice(first, end) for first, end in place.box)]
            state[prefix + name] = parts.wrapping(param)(part)

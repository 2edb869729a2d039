"""Running a position-wise module on a part of the sequence at a time (floor 2)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from hetero.errors import ConfigError
from hetero.interrupts import theirs
from hetero.train.activations.reach import Reach
from hetero.train.activations.recompute import Forward

M = TypeVar("M", bound=nn.Module)
TILE = "_hetero_tile"
MLP = re.compile(r"(?i)mlp|feed_?forward|ffn")  # class names of position-wise parts of blocks
MIXES = re.compile(r"(?i)moe|expert|sparse|router|conv|attention")  # or mixes positions


def tile(module: M, dim: int = 1, *, size: int) -> M:
    """Let a position-wise module, such as an MLP or a norm, take ``size`` positions at a time.

    Its intermediate tensors then exist for one tile only, in forward and in backward, which
    recomputes each tile. The module is changed in place and returned; tile it before
    `hetero.prepare`. Numbers are those of the module called on the tiles: gradients of its
    parameters are sums over tiles, which may differ from one product in the last bits.

    Args:
        module: maps a tensor to one of the same size in ``dim``, each position by itself. Other
            arguments are passed on as they are.
        dim: the dimension of positions, 1 for [batch, sequence, features].
        size: positions of a tile, 1 or more.

    Raises ConfigError for a size below 1, or a module whose forward is not its class's own.

    Example:
        >>> import torch, hetero
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 8))
        >>> x = torch.ones(2, 100, 8)
        >>> plain = mlp(x)
        >>> torch.allclose(hetero.tile(mlp, size=16)(x), plain)
        True
    """
    if size < 1:
        raise ConfigError(f"size={size}", advice="positions of a tile, 1 or more")
    if TILE not in module.__dict__ and "forward" in module.__dict__:
        raise ConfigError(
            f"the forward of this {type(module).__name__} was replaced",
            advice="tile a module before anything else wraps it, hetero.prepare included",
        )
    object.__setattr__(module, TILE, (dim, size))
    # a bound method: copies of the module call their own
    object.__setattr__(module, "forward", MethodType(_tiled, module))
    return module


def untile(module: nn.Module, before: tuple[int, int] | None) -> None:
    """Let a module take as many positions at a time as before; None: all."""
    found = module.__dict__.get("forward")
    if before is None and isinstance(found, MethodType) and found.__func__ is _tiled:
        del module.__dict__["forward"], module.__dict__[TILE]
    else:  # with None, a user's patch holds the tiled forward
        object.__setattr__(module, TILE, before or (1, sys.maxsize))


def mlps(block: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules of a block that are MLPs by their class name.

    One has two linear layers or more, and nothing that routes, convolves or attends.
    """
    for child in block.children():
        names = [type(part).__name__ for part in child.modules()]
        layers = sum(name.endswith("Linear") or name == "Conv1D" for name in names)
        alone = not any(MIXES.search(name) for name in names if name != "Conv1D")
        if MLP.search(names[0]) and layers > 1 and alone:
            yield child
        else:
            yield from mlps(child)


def _tiled(module: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    dim, size = module.__dict__[TILE]
    call = partial(type(module).forward, module)
    if x.shape[dim] <= size:
        return theirs(call, x, *args, **kwargs)
    outputs, reach = [], Reach()
    for part in x.split(size, dim):
        if torch.is_grad_enabled():  # also while the enclosing block is recomputed
            name = f"tiled {type(module).__name__}"
            given, place = (part, *args), part.device
            forward = Forward(
                *(name, module, call, given, kwargs), place=place, reach=reach, saved=None
            )
            outputs.append(forward.recomputed(given, kwargs, None))
        else:
            outputs.append(theirs(call, part, *args, **kwargs))
    for part, output in zip(x.split(size, dim), outputs, strict=True):
        if not isinstance(output, torch.Tensor) or output.shape[dim] != part.shape[dim]:
            raise ConfigError(
                f"{type(module).__name__} does not map positions to positions: it made"
                f" {list(getattr(output, 'shape', ()))} of {list(part.shape)}",
                advice=f"tile modules that keep the size of dimension {dim}",
            )
    return torch.cat(outputs, dim)

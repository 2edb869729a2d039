"""accelerate's `ParallelismConfig` as a mesh (floor 4)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from hetero.errors import ConfigError
from hetero.parallel.mesh import AXES, REPLICATE, SHARD, STAGES

LAUNCHED = "ACCELERATE_USE_PARALLELISM_CONFIG"
"""The variable by which `accelerate launch` asks for one; its sizes are in others."""


def mesh_of_sizes(axes: Any) -> dict[str, int]:
    """Return the mesh of a ParallelismConfig; ConfigError for other axes than a mesh has."""
    size = int(getattr(axes, "sp_size", 1))
    if size > 1:
        raise ConfigError(
            f"parallelism_config with sp_size={size}, which is DeepSpeed's",
            advice=f"use {', '.join(f'{name}_size' for name in AXES)}",
        )
    return {name: int(getattr(axes, f"{name}_size", 1)) for name in AXES}


def axes_of_sizes(sizes: Mapping[str, int]) -> Any:
    """Return the ParallelismConfig of a mesh; None in releases of accelerate without one."""
    try:
        from accelerate.parallelism_config import ParallelismConfig
    except ImportError:
        return None
    given = {f"{name}_size": size for name, size in sizes.items() if name != STAGES}
    if sizes[SHARD] == 1:  # it knows no copies without shares
        given |= {f"{SHARD}_size": sizes[REPLICATE], f"{REPLICATE}_size": 1}
    return ParallelismConfig(**given, sp_size=1)


def drop_masks(model: nn.Module) -> None:
    """Let attention of a model of transformers compute without masks, causally: accelerate's own
    hooks, which refuse models whose masks say more than that."""
    from accelerate import big_modeling  # not in old releases

    try:
        attach = vars(big_modeling)["_attach_context_parallel_hooks"]
    except KeyError:
        raise ConfigError(
            "this release of accelerate knows no parts of sequences",
            advice="install one that has ParallelismConfig(cp_size=), or write a loop:"
            " docs/context-parallel.md",
        ) from None
    attach(model)


@contextmanager
def without(variable: str) -> Iterator[str]:
    """Take a variable out of the environment for the length of a block; gives its value."""
    value = os.environ.pop(variable, None)
    try:
        yield value or ""
    finally:
        if value is not None:
            os.environ[variable] = value


def launched_axes(asked: str) -> Any:
    """Return the ParallelismConfig that `accelerate launch` asked for; None without one."""
    if asked.lower() != "true":
        return None
    from accelerate.parallelism_config import ParallelismConfig  # not in old releases

    return ParallelismConfig()

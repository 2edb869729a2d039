"""accelerate's `ParallelismConfig` as a mesh (floor 4)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hetero.errors import ConfigError
from hetero.parallel.mesh import REPLICATE, SHARD

LAUNCHED = "ACCELERATE_USE_PARALLELISM_CONFIG"
"""The variable by which `accelerate launch` asks for one; its sizes are in others."""
OTHERS = ("tp", "cp", "sp")


def mesh_of_sizes(axes: Any) -> dict[str, int]:
    """Return the mesh of a ParallelismConfig; ConfigError for other axes than a mesh has."""
    for name in OTHERS:
        size = getattr(axes, f"{name}_size", 1)
        if size > 1:
            raise ConfigError(
                f"parallelism_config with {name}_size={size}",
                advice=f"use {REPLICATE}_size and {SHARD}_size: they share the model",
            )
    return {name: int(getattr(axes, f"{name}_size", 1)) for name in (REPLICATE, SHARD)}


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

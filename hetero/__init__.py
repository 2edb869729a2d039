"""hetero: virtual memory for training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hetero.config import Config
from hetero.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    DivergenceError,
    HeteroError,
    StateError,
    StorageError,
    TransferError,
)
from hetero.version import __version__

if TYPE_CHECKING:
    from hetero.api import (
        Status,
        backward,
        empty_init,
        gathered,
        prepare,
        release,
        status,
    )
    from hetero.train.optimizer import Optimizer

_LAZY = {
    **dict.fromkeys(
        ("prepare", "backward", "gathered", "empty_init", "status", "Status", "release"),
        "hetero.api",
    ),
    "Optimizer": "hetero.train.optimizer",
}


def __getattr__(name: str) -> Any:
    """Import torch-bound names when first used, so that ``hetero --help`` does not load torch."""
    import importlib

    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'hetero' has no attribute {name!r}")


__all__ = [
    "BudgetError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "DivergenceError",
    "HeteroError",
    "Optimizer",
    "StateError",
    "Status",
    "StorageError",
    "TransferError",
    "__version__",
    "backward",
    "empty_init",
    "gathered",
    "prepare",
    "release",
    "status",
]

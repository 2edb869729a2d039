"""hetero: virtual memory for training."""

from __future__ import annotations

import sys
from types import ModuleType
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
    from hetero import optim as optim
    from hetero.api import backward, empty_init, gathered, no_sync, prepare, release
    from hetero.checkpoint.load import load_checkpoint
    from hetero.checkpoint.save import Save, save_checkpoint
    from hetero.export import export
    from hetero.functional.loss import linear_cross_entropy
    from hetero.integrations.pretrained import from_pretrained
    from hetero.integrations.transformers import enable, trainer
    from hetero.rehearse.plan import Plan, plan
    from hetero.rehearse.split import split
    from hetero.report.make import report
    from hetero.report.profile import Profile, profile
    from hetero.status import Status, status
    from hetero.train.activations.tiles import tile
    from hetero.train.update.optimizer import Optimizer
    from hetero.watch.face import watch

_LAZY = {
    **dict.fromkeys(
        ("prepare", "backward", "gathered", "no_sync", "empty_init", "release"), "hetero.api"
    ),
    **dict.fromkeys(("status", "Status"), "hetero.status"),
    **dict.fromkeys(("save_checkpoint", "Save"), "hetero.checkpoint.save"),
    "load_checkpoint": "hetero.checkpoint.load",
    "export": "hetero.export",
    **dict.fromkeys(("enable", "trainer"), "hetero.integrations.transformers"),
    "from_pretrained": "hetero.integrations.pretrained",
    **dict.fromkeys(("profile", "Profile"), "hetero.report.profile"),
    "report": "hetero.report.make",
    **dict.fromkeys(("plan", "Plan"), "hetero.rehearse.plan"),
    "split": "hetero.rehearse.split",
    "Optimizer": "hetero.train.update.optimizer",
    "linear_cross_entropy": "hetero.functional.loss",
    "tile": "hetero.train.activations.tiles",
    "watch": "hetero.watch.face",
}


_EXTRA = ("enable", "from_pretrained", "trainer")  # they are built on transformers


def __getattr__(name: str) -> Any:
    """Import torch-bound names on first use, so that ``hetero --help`` does not load torch."""
    import importlib

    if name == "optim":  # a module
        return importlib.import_module("hetero.optim")
    if name not in _LAZY:
        raise AttributeError(f"module 'hetero' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if name not in _EXTRA or str(error.name).partition(".")[0] == "hetero":
            raise
        return _absent(name, str(error.name))


def _absent(name: str, library: str) -> Any:
    """Return what stands for a name whose library is not installed: ``import *`` finds it."""

    def absent(*_: Any, **__: Any) -> Any:
        raise ConfigError(
            f"hetero.{name} needs {library}, which is not installed",
            advice=f"pip install {library}, or install hetero with its extra hf",
        )

    absent.__name__ = absent.__qualname__ = name
    absent.__doc__ = f"Raise ConfigError: {library} is not installed."
    return absent


def __dir__() -> list[str]:
    """Return the public names, of which most are imported on first use."""
    return sorted({*globals(), *__all__, "optim"})


class _Face(ModuleType):
    """Keeps a public name when a submodule of the same name is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _LAZY and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face


__all__ = [
    "BudgetError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "DivergenceError",
    "HeteroError",
    "Optimizer",
    "Plan",
    "Profile",
    "Save",
    "StateError",
    "Status",
    "StorageError",
    "TransferError",
    "__version__",
    "backward",
    "empty_init",
    "enable",
    "export",
    "from_pretrained",
    "gathered",
    "no_sync",
    "linear_cross_entropy",
    "load_checkpoint",
    "plan",
    "prepare",
    "profile",
    "release",
    "report",
    "save_checkpoint",
    "split",
    "status",
    "tile",
    "trainer",
    "watch",
]

"""Prepared models as seen by frameworks (floor 4)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import nn

from hetero.api import engine_of, release
from hetero.checkpoint.load import load_checkpoint, same_generators
from hetero.checkpoint.save import KINDS
from hetero.train.model.units import MARK


def is_prepared(thing: Any) -> bool:
    return isinstance(thing, nn.Module) and MARK in thing.__dict__


def trains(thing: Any) -> bool:
    """Whether something is a model prepared with its optimizer."""
    return is_prepared(thing) and engine_of(thing).optimizer is not None


def plain_again(model: nn.Module) -> None:
    """Release a model if it is prepared."""
    if is_prepared(model):
        release(model)


def load_states(folder: str | Path, model: nn.Module, kinds: Collection[str] = KINDS) -> Any:
    """Load a model and its optimizer but no generators; returns the save's ``extra``."""
    engine = engine_of(model)
    with same_generators(engine):
        return load_checkpoint(folder, model, engine.optimizer, kinds=kinds)

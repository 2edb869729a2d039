"""Prepared models as seen by frameworks (floor 4)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from hetero.api import engine_of, prepare_tuned, release
from hetero.checkpoint.load import load_checkpoint, same_generators
from hetero.checkpoint.save import KINDS, STATES
from hetero.config import Config
from hetero.errors import StateError
from hetero.train.access.hooks import before_next_forward
from hetero.train.engine.tuning import Tuning
from hetero.train.model.units import MARK

AVERAGED = Tuning(averages=True)
"""Whole models of several processes are averaged by a framework."""


class Waits(Protocol):
    """Who prepares models with optimizers that come later."""

    hetero_config: Config
    _waiting: dict[int, UnpairedModel]


class UnpairedModel:
    """A model that waits for its optimizer; if it computes first, it is prepared without one."""

    def __init__(self, accelerator: Waits, model: nn.Module) -> None:
        self.model = model
        self._accelerator = accelerator
        self._cancel = before_next_forward(model, self.computes)

    def over(self) -> None:
        self._cancel()
        self._accelerator._waiting.pop(id(self.model), None)

    def computes(self) -> None:
        """Prepare the model for inference: a forward came before the optimizer."""
        self.over()
        prepare_tuned(self.model, None, self._accelerator.hetero_config, AVERAGED)


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


def kinds_left(
    shown: list[tuple[dict[str, Any], dict[str, Any]]], left: list[dict[str, Any]]
) -> list[tuple[str, ...]]:
    """Return the kinds of parts to save of each model.

    Hooks were ``shown`` each state dict (with a copy from before), and ``left`` these in their
    list. Raises StateError if a hook changed the weights in one: hetero saves the model.
    """
    unchanged = [mine for mine, then in shown if same(mine, then)]
    if not all(is_in(each, unchanged) for each in left):
        raise StateError(
            "a hook of save_state changed the weights that are to be saved",
            advice="save them in the hook, and take their dict out of the list of weights",
        )
    return [KINDS if is_in(mine, left) else STATES for mine, _ in shown]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two dicts have identical values, not only equal ones, under the same names."""
    return one.keys() == other.keys() and all(one[name] is value for name, value in other.items())


def is_in(thing: object, those: Iterable[object]) -> bool:
    return any(thing is each for each in those)


def newest(folder: Path) -> str:
    """Return the newest ``checkpoint_<n>``; StateError if there is none."""
    found: Iterable[Path] = folder.glob("checkpoint_*") if folder.is_dir() else ()
    try:
        return str(max(found, key=lambda path: int(path.name.rpartition("_")[2])))
    except ValueError as error:
        raise StateError(
            f"{folder} has no checkpoint", advice="name a directory that save_state wrote"
        ) from error


class Told:
    """A state dict that hooks were told, and what was in it then."""

    def __init__(self) -> None:
        self._state: dict[str, Any] | None = None
        self._then: dict[str, Any] = {}

    def tell(self, state: dict[str, Any]) -> dict[str, Any]:
        self._state, self._then = state, dict(state)
        return state

    def is_in(self, thing: object) -> bool:
        """Whether something is that state dict."""
        return self._state is not None and thing is self._state

    def apart(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict with copies of what was told: it may be of the model that loads it,
        where one of several names of a tensor would read what another wrote."""
        told = {id(value) for value in self._then.values() if isinstance(value, torch.Tensor)}
        return {name: v.clone() if id(v) in told else v for name, v in state.items()}

    def is_as_told(self, state: dict[str, Any] | None) -> bool:
        """Whether a state dict has the values that were told, and no others."""
        return state is not None and self._state is not None and same(state, self._then)

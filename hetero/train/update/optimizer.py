"""The optimizer that users step: a real torch optimizer whose states live at home (floor 2)."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from itertools import chain
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn

from hetero.device import ALONE, use_count
from hetero.errors import ConfigError, StateError
from hetero.internals import note_step
from hetero.interrupts import theirs
from hetero.train.gradients.clip import OWN_NORMS, Norms, clip_grad_norm_, clip_parts_
from hetero.train.model.binding import without_faults
from hetero.train.model.parts import Parts
from hetero.train.update.masters import LossScaler
from hetero.train.update.rules import Group

HOOKS = tuple(
    f"_optimizer_{what}_{when}_hooks"
    for what in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)

MASTERS, SCALER = "masters", "scaler"


class StepEngine(Protocol):
    """The engine, as the optimizer asks it."""

    @property
    def skipped(self) -> bool:
        """Whether loss scaling skipped the last step."""

    def step(self, optimizer: Optimizer) -> None:
        """Update all parameters that have a gradient."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the model's parameters in its own order."""

    def adopt(self, param: torch.Tensor, state: dict[str, Any], group: Group) -> dict[str, Any]:
        """Return a state with torch's keys whose tensors are the homes' or copies."""

    def groups(self) -> dict[int, Group]:
        """Return the group of each parameter that is in one, by its id."""

    def admit(self, param: torch.Tensor) -> None:
        """Raise ConfigError for a parameter of another model, or one that lacks its master."""

    @property
    def parts(self) -> Parts:
        """What parameters have inside."""

    def note_clip(self, max_norm: float, norm_type: float) -> None:
        """Gradients are clipped to a global norm."""

    @property
    def norms(self) -> Norms:
        """The norms of all stages' gradients."""

    def was_cut(self, param: nn.Parameter) -> bool:
        """Whether every rank had the whole of a gradient, of which its part is left."""

    def shown_state(self, param: torch.Tensor, value: Any) -> Any:
        """Return a value of a parameter's state as torch keeps it."""

    def finish(self) -> None:
        """Wait until every update is done; raises what one of them raised."""

    def refuse_broken(self) -> None:
        """Raise StateError if a load failed half-way."""

    def saved_masters(self) -> dict[int, torch.Tensor]:
        """Return the ``low`` of each master, for a state dict, by the parameter's id."""

    def load_masters(self, masters: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Take the ``low`` of parameters' masters from a state dict."""

    @property
    def scaler(self) -> LossScaler | None:
        """The dynamic loss scale, under precision="fp16"."""


class Optimizer(torch.optim.Optimizer):
    """Steps the given torch optimizer's arithmetic under hetero's budget.

    ``param_groups`` is the original optimizer's list, so schedulers built on either see the same
    learning rates. ``state[p]`` has torch's keys, shapes and dtypes; its tensors are the homes.
    `step` returns once the step is closed; updates go on while the next forward computes, and reads
    of parameters or states wait for them.
    """

    def __init__(self, inner: torch.optim.Optimizer, engine: StepEngine) -> None:
        groups = [dict(group) for group in inner.param_groups]
        self.known_state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        super().__init__(groups, dict(inner.defaults))
        self.inner = inner
        self._engine = engine
        self.param_groups = inner.param_groups
        for name in HOOKS:  # those registered before prepare go on
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))
        self.state = defaultdict(dict, {p: dict(state) for p, state in inner.state.items()})

    @property
    def state(self) -> defaultdict[torch.Tensor, dict[str, Any]]:
        """The states after the last step; waits for its updates, unlike ``known_state``."""
        engine = getattr(self, "_engine", None)  # torch's constructor reads this too
        if engine is not None:
            engine.finish()
        return self.known_state

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, dict[str, Any]]) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.finish()
        self.known_state = value

    @property
    def states_are_held(self) -> bool:
        """Whether the user's code holds ``state`` itself, and would see it change."""
        return sys.getrefcount(self.known_state) > _MAPPING

    def any_state_is_held(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether the user's code holds a state of these parameters, or a number in one."""
        return _is_any_held(self.known_state, params)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that was prepared, by the name under which monitors look for it."""
        return self.inner

    @property
    def step_was_skipped(self) -> bool:
        """Whether loss scaling skipped the last step, because a gradient was not finite."""
        return self._engine.skipped

    @property
    def loss_scale(self) -> float:
        """The number the next loss is multiplied by; 1 without loss scaling."""
        return 1.0 if self._engine.scaler is None else self._engine.scaler.scale

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step; ``closure``, when given, is evaluated first and its loss returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = theirs(closure)
        with torch.no_grad():  # not around the method: Ctrl-C might keep it from being left
            self._engine.step(self)
        note_step(self.inner)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, as torch does."""
        with without_faults() if set_to_none else nullcontext():  # no bytes are asked for
            super().zero_grad(set_to_none)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the gradients to a global norm and return the norm before clipping.

        The norm is torch's: one norm per whole tensor, then the norm of norms, in the order of
        ``model.parameters()``; one gradient is on the device at a time. Where ranks have stages of
        a pipeline it is the norm of all of them, and all ranks call this.
        """
        params, parts = self._engine.parameters(), self._engine.parts
        if not parts.kinds and self._engine.norms is OWN_NORMS:
            return clip_grad_norm_(
                params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
            )
        self._engine.note_clip(float(max_norm), float(norm_type))
        return clip_parts_(
            *(params, parts, max_norm, norm_type),
            error_if_nonfinite=error_if_nonfinite,
            whole=self._engine.was_cut,
            norms=self._engine.norms,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the prepared model."""
        engine = getattr(self, "_engine", None)  # torch's constructor calls this too
        if engine is not None:
            params = param_group["params"]
            params = [params] if isinstance(params, torch.Tensor) else list(params)
            param_group = {**param_group, "params": params}  # it may have been a generator
            for param in params:
                engine.admit(param)
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this or of the plain torch optimizer; tensors are copied."""
        self._engine.refuse_broken()
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        mine = [len(group["params"]) for group in self.param_groups]
        if sizes != mine:
            raise ValueError(
                f"loaded state dict has parameter groups of sizes {sizes}, the optimizer has {mine}"
            )
        ids = chain.from_iterable(group["params"] for group in groups)
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        of_id = dict(zip(ids, params, strict=True))
        self.state.clear()
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update({k: v for k, v in loaded.items() if k != "params"})
        group_of = self._engine.groups()
        for key, value in state_dict["state"].items():
            param = of_id[key]
            self.state[param] = self._engine.adopt(param, dict(value), group_of[id(param)])
        masters = {of_id[key]: low for key, low in state_dict.get(MASTERS, {}).items()}
        if masters:
            self._engine.load_masters(masters)
        if self._engine.scaler is not None and SCALER in state_dict:
            self._engine.scaler.load_state_dict(state_dict[SCALER])
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict; tensors are aliases of the homes, as torch's are of its own.

        Under "bf16" and "fp16" it also has the part of fp32 masters that working weights lack
        ("masters", by parameter number) and the loss scale ("scaler").
        """
        self._engine.refuse_broken()
        packed = super().state_dict()
        # Dicts of their own, and aliases, which are noticed by the storage's use count.
        params = list(chain.from_iterable(group["params"] for group in self.param_groups))
        shown = self._engine.shown_state
        packed["state"] = {
            number: {key: shown(params[number], _alias(value)) for key, value in state.items()}
            for number, state in packed["state"].items()
            if state
        }
        masters = self._engine.saved_masters()
        if masters:
            packed[MASTERS] = {
                n: shown(p, masters[id(p)]) for n, p in enumerate(params) if id(p) in masters
            }
        if self._engine.scaler is not None:
            packed[SCALER] = self._engine.scaler.state_dict()
        return packed

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError(
            "a prepared optimizer cannot be copied or pickled", advice="save optimizer.state_dict()"
        )


def silence(inner: torch.optim.Optimizer) -> Callable[[], None]:
    """Let an optimizer that was prepared refuse to step; returns a function that undoes this."""
    before = inner.__dict__.get("step")
    vars(inner)["step"] = MethodType(_forgotten, inner)

    def undo() -> None:
        inner.__dict__.pop("step", None)
        if before is not None:
            inner.__dict__["step"] = before

    return undo


def _forgotten(inner: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
    """Stand in for the step of an optimizer that was prepared."""
    raise StateError(
        f"this {type(inner).__name__} was given to hetero.prepare and does not step any more",
        advice="step the optimizer that prepare returned: model, optimizer = hetero.prepare(...)",
    )


vars(_forgotten)["_wrapped_by_lr_sched"] = True  # schedulers look for it


def unwrapped(optimizer: Any) -> Any:
    """Return ours out of the wrappers that accelerate and Lightning put around optimizers."""
    while not isinstance(optimizer, Optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _is_any_held(
    states: Mapping[torch.Tensor, dict[str, Any]], params: Iterable[torch.Tensor]
) -> bool:
    """Whether there is another reference to a state's dict, or to a 0-dim tensor that it owns.

    Tensors of a parameter's shape are homes', which know whether they are held.
    """
    for param in params:
        state = states.get(param)
        if state is None:
            continue
        if sys.getrefcount(state) > _ROW:
            return True
        for value in state.values():
            if type(value) is not torch.Tensor or value.dim() > 0:
                continue
            if sys.getrefcount(value) > _NUMBER or use_count(value) > ALONE:
                return True
    return False


class _Owner:
    """Refers to an object as an optimizer does to its states."""

    def __init__(self) -> None:
        self.states: dict[int, dict[str, Any]] = {0: {}}

    def references(self) -> tuple[int, int, int]:
        """Return the references to the mapping, a state and a number (they differ by release)."""
        state = self.states.get(0, {})
        state["number"] = object()
        for value in state.values():
            number = sys.getrefcount(value)
        return sys.getrefcount(self.states), sys.getrefcount(state), number


_MAPPING, _ROW, _NUMBER = _Owner().references()


def _alias(value: Any) -> Any:
    """Return a state's value for a state dict: numbers stay torch's own objects."""
    return value.detach() if isinstance(value, torch.Tensor) and value.dim() > 0 else value

"""The only place that registers hooks on modules and parameters (floor 2).

Hooks bracket a unit's forward and the whole model's; a module compiled in place is bracketed around
its compiled callable instead, so that nothing of ours is traced. The methods of the model that
would move or copy parameters behind our back are guarded, per instance, and put back on `remove`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hetero.errors import ConfigError, StateError
from hetero.train.runtime import Runtime
from hetero.train.swizzle import plainly
from hetero.train.units import Unit


class Hooks:
    """Everything of ours that hangs on a model, and how to take it off again."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def remove(self) -> None:
        """Take everything off, newest first."""
        while self._undo:
            self._undo.pop()()

    def watch(self, model: nn.Module, units: Sequence[Unit], runtime: Runtime) -> None:
        """Bracket the model's and every unit's forward."""
        self._bracket(model, ModelBracket(runtime))
        for index, unit in enumerate(units):
            if unit.module is not None:
                self._bracket(unit.module, UnitBracket(runtime, index))

    def gradients(
        self, params: Sequence[nn.Parameter], arrived: Callable[[nn.Parameter], None]
    ) -> None:
        """Hear of every gradient that autograd has accumulated."""
        for param in params:
            if param.dtype.is_floating_point or param.dtype.is_complex:
                frozen = not param.requires_grad
                if frozen:
                    param.requires_grad_(True)  # torch takes the hook only then; it may thaw later
                self._keep(param.register_post_accumulate_grad_hook(arrived))
                if frozen:
                    param.requires_grad_(False)

    def guard(self, model: nn.Module, reading: Callable[[], Any]) -> None:
        """Guard moves and copies; let state dicts read and write the homes inside ``reading()``."""
        self._replace(model, "__deepcopy__", functools.partial(_refuse, "copy.deepcopy"))
        self._replace(model, "__reduce_ex__", functools.partial(_refuse, "pickling"))
        for module in model.modules():
            self._replace(module, "_apply", functools.partial(_guarded_apply, module))
            if any(p is not None for p in module._parameters.values()):
                for name in ("_save_to_state_dict", "_load_from_state_dict"):
                    self._replace(module, name, _at_home(reading, getattr(module, name)))

    def _bracket(self, module: nn.Module, bracket: ModelBracket | UnitBracket) -> None:
        compiled = getattr(module, "_compiled_call_impl", None)
        if compiled is not None:
            self._replace(module, "_compiled_call_impl", bracket.around(compiled))
            return
        before, after = bracket.before, bracket.after
        self._keep(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._keep(module.register_forward_hook(after, always_call=True))

    def _keep(self, handle: RemovableHandle) -> None:
        self._undo.append(handle.remove)

    def _replace(self, module: nn.Module, name: str, value: Any) -> None:
        had = name in module.__dict__
        old = module.__dict__.get(name)
        object.__setattr__(module, name, value)

        def undo() -> None:
            if had:
                object.__setattr__(module, name, old)
            else:
                module.__dict__.pop(name, None)

        self._undo.append(undo)


class UnitBracket:
    """A unit's forward: enter before, leave after, also when it raises."""

    def __init__(self, runtime: Runtime, unit: int) -> None:
        self._runtime = runtime
        self._unit = unit
        self._pushed: list[bool] = []

    def before(self, *_: Any) -> None:
        self._pushed.append(self._runtime.enter(self._unit))

    def after(self, *_: Any) -> None:
        if self._pushed:
            self._runtime.leave(self._unit, pushed=self._pushed.pop())

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call`` inside the bracket."""

        @functools.wraps(call)
        def bracketed(*args: Any, **kwargs: Any) -> Any:
            self.before()
            try:
                return call(*args, **kwargs)
            finally:
                self.after()

        return bracketed


class ModelBracket(UnitBracket):
    """A call of the whole model."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime, -1)

    def before(self, *_: Any) -> None:
        self._pushed.append(self._runtime.enter_model())

    def after(self, *call: Any) -> None:
        if self._pushed:
            output = call[-1] if call else None
            self._runtime.leave_model(output, pushed=self._pushed.pop())


def _refuse(what: str, *_: Any) -> None:
    raise StateError(
        f"{what} of a prepared model is refused: its parameters live in hetero's tiers",
        advice="use model.state_dict(), or hetero.release(model, optimizer) first",
    )


def _guarded_apply(
    module: nn.Module, func: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """Let a ``.to()`` that changes nothing pass, and refuse one that would move or convert."""
    with plainly():
        tensors = [*module.parameters(), *module.buffers()]
        kinds = {(t.dtype, t.device, min(t.dim(), 4)) for t in tensors}
        probes = [torch.empty((2,) * dims, dtype=dtype, device=at) for dtype, at, dims in kinds]
    for probe in probes:
        before = _looks(probe)
        after = _looks(func(probe))
        if before != after:
            raise ConfigError(
                f"moving or converting a prepared model ({before} to {after}) is refused",
                advice="convert the model before hetero.prepare, or set device= there",
            )
    return module


def _looks(tensor: torch.Tensor) -> str:
    shared = " shared" if tensor.is_shared() else ""
    return f"{tensor.dtype} on {tensor.device}, strides {tensor.stride()}{shared}"


def _at_home(reading: Callable[[], Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a state dict method that reads and writes the homes."""

    @functools.wraps(call)
    def at_home(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, dict) and a.get("assign_to_params_buffers") for a in args):
            raise ConfigError(
                "load_state_dict(assign=True) would replace paged parameters",
                advice="call load_state_dict without assign=True",
            )
        with reading():
            return call(*args, **kwargs)

    return at_home

"""The only place that hangs anything on modules and parameters (floor 2).

Brackets stand around each unit's forward and the whole model's, a hook on each parameter hears of
its gradient, and the methods that would move or copy parameters behind our back are guarded; all
per instance, and put back on `remove`.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

from hetero.errors import ConfigError, StateError
from hetero.train.activation import SavedTensors
from hetero.train.check import PART
from hetero.train.head import causal_loss, head_of, late
from hetero.train.meter import Meter
from hetero.train.policy import Activations
from hetero.train.runtime import Runtime
from hetero.train.swizzle import plainly
from hetero.train.tiles import TILE, mlps, tile
from hetero.train.units import Unit, has_params


class Listener(Protocol):
    """Hears what a plain model does; a block is open for as long as it goes on."""

    def forward(self) -> AbstractContextManager[None]:
        """The whole model's forward."""

    def access(self, unit: int) -> AbstractContextManager[None]:
        """A unit's forward, which may be one that backward computes again."""

    def backward(self) -> AbstractContextManager[None]:
        """A backward pass."""

    def reached(self, unit: int) -> None:
        """A backward pass arrives at what a unit made."""

    def gradient(self, param: nn.Parameter) -> None:
        """Autograd has accumulated a gradient."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Some optimizer, not only the model's, begins a step."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """It made it."""


class Hooks:
    """Everything of ours that hangs on a model, and how to take it off again."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._reached: list[RemovableHandle] = []  # on nodes of graphs that may be alive
        self._many = MANY

    def listen(self, model: nn.Module, units: Sequence[Unit], listener: Listener) -> None:
        """Tell a listener what a model does that stays plain: no value of it changes."""
        self._undo.append(self._forget_nodes)
        for index, unit in enumerate(units):
            if unit.module is not None:
                made = functools.partial(self._await, listener, index)
                self._surround(unit.module, functools.partial(listener.access, index), made)
        self._surround(model, listener.forward)
        self.gradients(list(model.parameters()), listener.gradient)
        self._surround_backward(listener)
        before, after = listener.before_step, listener.after_step
        self._keep(register_optimizer_step_pre_hook(lambda optimizer, *_: before(optimizer)))
        self._keep(register_optimizer_step_post_hook(lambda optimizer, *_: after(optimizer)))

    def _surround(
        self,
        module: nn.Module,
        block: Callable[[], AbstractContextManager[None]],
        made: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self._replace(module, "forward", Within(module.forward, block, made))

    def _surround_backward(self, listener: Listener) -> None:
        autograd: Any = torch.autograd
        plain = autograd._engine_run_backward
        within = Within(plain, listener.backward)

        def undo() -> None:
            within.block = nullcontext  # somebody who replaced it meanwhile may call it still
            if autograd._engine_run_backward is within:
                autograd._engine_run_backward = plain

        autograd._engine_run_backward = within
        self._undo.append(undo)

    def _await(self, listener: Listener, unit: int, output: Any) -> None:
        """Hear of the backward pass that arrives at one of a unit's outputs."""
        for tensor in tree_iter(output):
            node: Any = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
            if node is not None:
                self._reached.append(node.register_prehook(lambda *_: listener.reached(unit)))
        if len(self._reached) > self._many:
            self._reached = [h for h in self._reached if h.hooks_dict_ref() is not None]
            self._many = 2 * len(self._reached) + MANY

    def _forget_nodes(self) -> None:
        while self._reached:
            self._reached.pop().remove()

    def remove(self) -> None:
        """Take everything off, newest first."""
        while self._undo:
            self._undo.pop()()

    def watch(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        runtime: Runtime,
        activations: Activations,
        meter: Meter,
    ) -> None:
        """Bracket every unit's forward, and the model's around them."""
        index_of = {id(unit.module): i for i, unit in enumerate(units) if unit.module is not None}
        self.shape(model, units, activations)
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder) and id(module) not in index_of:
                first = index_of.get(id(next(iter(module.layers), None)))
                if first is not None:
                    lend = functools.partial(around_encoder, runtime, runtime.needs[first])
                    self._bracket(module, lend)
        self._bracket(model, functools.partial(around_model, runtime, meter))

    def shape(self, model: nn.Module, units: Sequence[Unit], activations: Activations) -> None:
        """Let every unit's forward leave for backward what its policy says."""
        for index, unit in enumerate(units):
            if unit.module is not None:
                self._bracket(unit.module, functools.partial(around_unit, activations, index))
        self._bracket(model, functools.partial(around_batch, activations))

    def save_through(self, model: nn.Module, saved: SavedTensors) -> None:
        """Let what the whole model's forward saves pass through our pair of hooks."""
        self._bracket(model, functools.partial(around_saving, saved))

    def tile(self, units: Sequence[Unit], size: int) -> int:
        """Let the MLPs of blocks take ``size`` positions at a time; returns how many there are."""
        found = [m for unit in units if unit.module is not None for m in mlps(unit.module)]
        for module in found:
            self._replace(module, TILE, None)  # so that `remove` takes both off again
            self._replace(module, "forward", module.forward)
            del module.__dict__[TILE], module.__dict__["forward"]
            tile(module, size=size)
        return len(found)

    def fuse_loss(self, model: nn.Module) -> None:
        """Let a causal language model's head leave its logits to its loss."""
        head = head_of(model)
        loss: Any = model.loss_function
        self._replace(head, "forward", late(head, head.forward))
        self._replace(model, "_loss_function", causal_loss(head, loss))

    def gradients(
        self, params: Sequence[nn.Parameter], arrived: Callable[[nn.Parameter], None]
    ) -> None:
        """Hear of every gradient that autograd has accumulated."""
        listener = weakref.WeakMethod(arrived)  # autograd holds hooks where gc does not look

        def notify(param: Any) -> None:
            method = listener()
            if method is not None:
                method(param)

        for param in params:
            if param.dtype.is_floating_point or param.dtype.is_complex:
                frozen = not param.requires_grad
                if frozen:
                    param.requires_grad_(True)  # torch takes the hook only then; it may thaw later
                self._keep(param.register_post_accumulate_grad_hook(notify))
                if frozen:
                    param.requires_grad_(False)

    def guard(self, model: nn.Module, reading: Callable[[], Any]) -> None:
        """Guard moves and copies; let state dicts read and write the homes inside ``reading()``."""
        self._replace(model, "__deepcopy__", functools.partial(_refuse, "copy.deepcopy"))
        self._replace(model, "__reduce_ex__", functools.partial(_refuse, "pickling"))
        for module in model.modules():
            self._mark(module)
            if not has_params(module):
                continue  # it may be part of other models too
            self._replace(module, "_apply", functools.partial(_guarded_apply, module))
            if any(p is not None for p in module._parameters.values()):
                for name in ("_save_to_state_dict", "_load_from_state_dict"):
                    self._replace(module, name, _at_home(reading, getattr(module, name)))

    def refuse_forwards(self, model: nn.Module, check: Callable[[], None]) -> None:
        """Let no module of a model compute: ``check`` raises, and says why."""

        def around(call: Call) -> Call:
            @functools.wraps(call)
            def forward(*args: Any, **kwargs: Any) -> Any:
                check()
                return call(*args, **kwargs)

            return forward

        for module in model.modules():
            self._bracket(module, around)

    def _mark(self, module: nn.Module) -> None:
        """Count that a module is part of one more prepared model."""
        module.__dict__[PART] = module.__dict__.get(PART, 0) + 1
        self._undo.append(functools.partial(_unmark, module))

    def refuse_saving(self, model: nn.Module) -> None:
        """Refuse ``save_pretrained`` of parameters on disk, unless a state dict is given."""
        save = getattr(model, "save_pretrained", None)
        if callable(save):
            self._replace(model, "save_pretrained", functools.partial(_on_disk, save))

    def _bracket(self, module: nn.Module, around: Callable[[Call], Call]) -> None:
        # Around forward and not as hooks: torch skips hooks on KeyboardInterrupt, and some modules
        # (the transformer layers' fast path) compute differently when hooks hang on them. A module
        # compiled in place is bracketed around its compiled callable, so that ours is not traced.
        compiled = getattr(module, "_compiled_call_impl", None)
        name = "forward" if compiled is None else "_compiled_call_impl"
        self._replace(module, name, around(getattr(module, name)))

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


def _unmark(module: nn.Module) -> None:
    module.__dict__[PART] -= 1
    if not module.__dict__[PART]:
        del module.__dict__[PART]


Call = Callable[..., Any]
MANY = 256  # hooks on nodes, among which those of dead graphs are looked for


class Within:
    """A call inside a block, which then sees what was made.

    A copy of the module that has this for a forward, or a pickle of it, has the call alone.
    """

    def __init__(
        self,
        call: Call,
        block: Callable[[], AbstractContextManager[None]],
        made: Callable[[Any], None] = lambda _: None,
    ) -> None:
        functools.update_wrapper(self, call)
        self.call = call
        self.block = block
        self.made = made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a function around it, which is to stay what it is
            return self.call(*args, **kwargs)
        with self.block():
            found = self.call(*args, **kwargs)
            self.made(found)
            return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.call, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.call.__reduce_ex__(protocol)


def before_next_forward(module: nn.Module, call: Callable[[], None]) -> Callable[[], None]:
    """Call ``call`` before a module's next forward; returns what cancels that."""

    def once(*_: Any) -> None:
        handle.remove()
        call()

    handle = module.register_forward_pre_hook(once)
    return handle.remove


def before_forward(module: nn.Module, call: Callable[[], None]) -> Callable[[], None]:
    """Call ``call`` before every forward of a module; returns what ends that."""
    return module.register_forward_pre_hook(lambda *_: call()).remove


def before_node(node: Any, call: Callable[..., None]) -> None:
    """Call ``call`` before backward runs a node, for as long as its graph lives."""
    node.register_prehook(call)


def around_unit(activations: Activations, unit: int, call: Call) -> Call:
    """Return a unit's forward inside an access, under the unit's policy."""

    @functools.wraps(call)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return activations.run(unit, call, args, kwargs)

    return forward


def around_batch(activations: Activations, call: Call) -> Call:
    """Return the whole model's forward, of which it is told how large the batch is."""

    @functools.wraps(call)
    def forward(*args: Any, **kwargs: Any) -> Any:
        activations.begin(args, kwargs)
        return call(*args, **kwargs)

    return forward


def around_saving(saved: SavedTensors, call: Call) -> Call:
    """Return the whole model's forward, whose saved tensors pass through our pair of hooks."""

    @functools.wraps(call)
    def forward(*args: Any, **kwargs: Any) -> Any:
        pushed = saved.push_where_differentiated()
        try:
            return call(*args, **kwargs)
        finally:
            if pushed:
                saved.pop()

    return forward


def around_model(runtime: Runtime, meter: Meter, call: Call) -> Call:
    """Return the whole model's forward between its begin and its end."""

    @functools.wraps(call)
    def forward(*args: Any, **kwargs: Any) -> Any:
        pushed = runtime.enter_model()
        output = None
        try:
            with meter.watching() if pushed or runtime.evaluates else nullcontext():
                output = call(*args, **kwargs)
                meter.made(output)
            return output
        finally:
            runtime.leave_model(output, pushed=pushed)

    return forward


def around_encoder(runtime: Runtime, buckets: Sequence[int], call: Call) -> Call:
    """Return the forward of an `nn.TransformerEncoder` with its first layer bound, when in eval.

    It asks that layer's parameters, unbound at that point, whether nested tensors may be used.
    """

    @functools.wraps(call)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return call(*args, **kwargs)
        with runtime.lend(buckets, "encoder"):
            return call(*args, **kwargs)

    return forward


def _refuse(what: str, *_: Any) -> None:
    raise StateError(
        f"{what} of a prepared model is refused: its parameters live in hetero's tiers",
        advice="use model.state_dict(), or hetero.release(model, optimizer) first",
    )


def _on_disk(save: Call, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("state_dict") is not None:
        return save(*args, **kwargs)
    raise StateError(
        "save_pretrained tells tensors apart by their memory, and parameters of this model are on"
        " disk",
        advice="write it with hetero.export(model, directory), which streams them",
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

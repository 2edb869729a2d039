"""The only place that hangs anything on modules and parameters (floor 2).

Brackets stand around each unit's forward and the whole model's, a hook on each parameter hears of
its gradient, and the methods that would move or copy parameters unseen are guarded; all
per instance, and put back on `remove`.

[Note: brackets stay]  A user may patch a forward that we bracketed: the patch holds our bracket and
calls it. So there is one bracket for each call of a module, from `prepare` to `release`; what it
does changes while it stands (the model becomes resident), and it is taken off only where it is
still what the module has. Elsewhere it goes on as the call that it was put around.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from hetero.errors import ConfigError, StateError
from hetero.functional.head import causal_loss, head_of, late
from hetero.internals import RUN_BACKWARD, tree_iter
from hetero.interrupts import passing, theirs
from hetero.train.access.runtime import Runtime
from hetero.train.activations.meter import Meter
from hetero.train.activations.policy import Activations
from hetero.train.activations.saved import SavedTensors
from hetero.train.activations.tiles import TILE, mlps, tile, untile
from hetero.train.model.binding import plainly
from hetero.train.model.graph import OurHook
from hetero.train.model.units import MARK, PART, Unit, has_params


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
        self._brackets: dict[tuple[int, str], Bracket] = {}
        self._replaced: dict[tuple[int, str], tuple[Any, Any]] = {}  # what it is, and was
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
        made: list[Within] = []

        def make(plain: Any) -> Within:
            made.append(Within(plain, listener.backward))
            return made[0]

        watched = RUN_BACKWARD.replaced(make)
        watched.install()

        def undo() -> None:
            made[0].block = nullcontext  # other code that replaced it may call it still
            watched.uninstall()

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
        self.rest()
        self._brackets.clear()

    def rest(self) -> None:
        """Take everything off but brackets in a user's patch, which do nothing from here on."""
        while self._undo:
            self._undo.pop()()
        for key, bracket in list(self._brackets.items()):
            if bracket.remove():
                del self._brackets[key]

    def mend(self) -> None:
        """Put brackets back that went with a patch which the user has deleted."""
        for bracket in self._brackets.values():
            bracket.place()

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
                    self._surround_forward(module, lend)
        self._surround_forward(model, functools.partial(around_model, runtime, meter))
        for module in filter(has_params, model.modules()):  # asked by torch.jit.script
            refuse = functools.partial(_refuse, "torch.jit.script")
            self._replace(module, "__prepare_scriptable__", refuse)

    def shape(self, model: nn.Module, units: Sequence[Unit], activations: Activations) -> None:
        """Let every unit's forward leave for backward what its policy says."""
        for index, unit in enumerate(units):
            if unit.module is not None:
                around = functools.partial(around_unit, activations, index)
                self._surround_forward(unit.module, around)
        self._surround_forward(model, functools.partial(around_batch, activations))

    def save_through(self, model: nn.Module, saved: SavedTensors) -> None:
        """Let what the whole model's forward saves pass through our pair of hooks."""
        self._surround_forward(model, functools.partial(around_saving, saved))

    def tile(self, units: Sequence[Unit], size: int) -> int:
        """Let the MLPs of blocks take ``size`` positions at a time; returns how many there are."""
        found = [m for unit in units if unit.module is not None for m in mlps(unit.module)]
        for module in found:
            before = module.__dict__.get(TILE)
            if before is None:
                tile(module, size=size)
            else:
                put(module, TILE, (before[0], size))
            self._undo.append(functools.partial(untile, module, before))
        return len(found)

    def fuse_loss(self, model: nn.Module) -> None:
        """Let a causal language model's head leave its logits to its loss."""
        head = head_of(model)
        loss: Any = model.loss_function
        self._bracket(head, "forward", functools.partial(late, head))
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
                with thawed(param):
                    self._keep(param.register_post_accumulate_grad_hook(notify))

    def before_gradients(
        self, params: Mapping[int, nn.Parameter], arriving: Callable[[int], None]
    ) -> None:
        """Hear, by its number, of every parameter to which autograd is about to add."""
        listener = weakref.WeakMethod(arriving)

        class Notify(OurHook):
            def __init__(self, index: int) -> None:
                self.index = index

            def __call__(self, grad: torch.Tensor) -> None:
                method = listener()
                if method is not None:
                    method(self.index)

        for index, param in params.items():
            with thawed(param):
                self._keep(param.register_hook(Notify(index)))

    def guard(
        self, model: nn.Module, reading: Callable[[], Any], fits: Callable[[int], None]
    ) -> None:
        """Guard moves and copies; let state dicts read and write the homes inside ``reading()``.

        A deep copy is a plain module in RAM; ``fits(n_bytes)`` refuses one that is too large.
        """
        self._replace(model, "__reduce_ex__", functools.partial(_refuse, "pickling"))
        for module in model.modules():
            self._mark(module)
            if not has_params(module):
                continue  # it may be part of other models too
            self._replace(module, "__deepcopy__", functools.partial(self._copied, module, fits))
            self._bracket(module, "_apply", functools.partial(_guarding, module))
            if any(p is not None for p in module._parameters.values()):
                for name in ("_save_to_state_dict", "_load_from_state_dict"):
                    self._bracket(module, name, functools.partial(_at_home, reading))

    def _copied(
        self, module: nn.Module, fits: Callable[[int], None], memo: dict[int, Any]
    ) -> nn.Module:
        """Return a deep copy of a module as it would be without us."""
        with plainly():
            fits(sum(p.nbytes for p in module.parameters() if id(p) not in memo))
        own = getattr(type(module), "__deepcopy__", None)
        twin: nn.Module = self._twin(module, memo) if own is None else own(module, memo)
        for part in twin.modules():
            part.__dict__.pop(PART, None)
        return twin

    def _twin(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        reduced: Any = type(module).__reduce_ex__(module, 4)
        make, args, state = reduced[:3]
        twin: nn.Module = make(*args)
        memo[id(module)] = twin
        state = copy.deepcopy(self._without_ours(module, state), memo)
        twin.__setstate__(state)
        return twin

    def _without_ours(self, module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Return a module's state with what stood there before us in place of what is ours."""
        found = {}
        for name, value in state.items():
            bracket = self._brackets.get((id(module), name))
            ours, before = self._replaced.get((id(module), name), (ABSENT, ABSENT))
            if bracket is not None and bracket.is_placed:
                found[name] = bracket.before
            else:
                found[name] = before if value is ours else value
        return {k: v for k, v in found.items() if v is not ABSENT and k not in (MARK, PART)}

    def refuse_forwards(self, model: nn.Module, check: Callable[[], None]) -> None:
        """Let no module of a model compute: ``check`` raises, and says why."""

        def around(call: Call) -> Call:
            @functools.wraps(call)
            def forward(*args: Any, **kwargs: Any) -> Any:
                check()
                return call(*args, **kwargs)

            return forward

        for module in model.modules():
            if has_params(module):  # any other may be part of a model that may be used
                self._surround_forward(module, around)

    def _mark(self, module: nn.Module) -> None:
        """Count that a module is part of one more prepared model."""
        module.__dict__[PART] = module.__dict__.get(PART, 0) + 1
        self._undo.append(functools.partial(_unmark, module))

    def refuse_saving(self, model: nn.Module) -> None:
        """Refuse ``save_pretrained`` of parameters on disk, unless a state dict is given."""
        if callable(getattr(model, "save_pretrained", None)):
            around = functools.partial(functools.partial, _on_disk)
            self._bracket(model, "save_pretrained", around)

    def _surround_forward(self, module: nn.Module, around: Callable[[Call], Call]) -> None:
        # Around forward and not as hooks: torch skips hooks on KeyboardInterrupt, and some modules
        # (the transformer layers' fast path) compute differently when hooks hang on them. A module
        # compiled in place is bracketed around its compiled callable, so that ours is not traced.
        if (id(module), "compile") not in self._brackets:
            self._bracket(module, "compile", functools.partial(self._following, module))
        is_compiled = module.__dict__.get(COMPILED) is not None
        self._bracket(module, COMPILED if is_compiled else FORWARD, around)

    def _following(self, module: nn.Module, call: Call) -> Call:
        """Return a module's ``compile`` that leaves what we put around it out of compiled code."""

        def compile(*args: Any, **kwargs: Any) -> None:
            call(*args, **kwargs)
            bracket = self._brackets.pop((id(module), FORWARD), None)
            for around in list(bracket.layers) if bracket is not None else ():
                self._bracket(module, COMPILED, around)
            if bracket is not None:
                bracket.remove()

        return compile

    def _bracket(self, module: nn.Module, name: str, around: Callable[[Call], Call]) -> None:
        """Put something around a call of a module, and around what is there already."""
        bracket = self._brackets.get((id(module), name))
        if bracket is None:
            bracket = self._brackets[id(module), name] = Bracket(module, name)
        bracket.add(around)
        bracket.place()

    def _keep(self, handle: RemovableHandle) -> None:
        self._undo.append(handle.remove)

    def _replace(self, module: nn.Module, name: str, value: Any) -> None:
        old = module.__dict__.get(name, ABSENT)
        self._replaced[id(module), name] = value, old
        object.__setattr__(module, name, value)

        def undo() -> None:
            self._replaced.pop((id(module), name), None)
            if module.__dict__.get(name) is value:  # else it is the user's
                put(module, name, old)

        self._undo.append(undo)


def _unmark(module: nn.Module) -> None:
    module.__dict__[PART] -= 1
    if not module.__dict__[PART]:
        del module.__dict__[PART]


@contextmanager
def thawed(param: nn.Parameter) -> Iterator[None]:
    """Let a parameter take hooks: torch allows it only where it trains, and it may thaw later."""
    trains = param.requires_grad
    param.requires_grad_(True)
    try:
        yield
    finally:
        param.requires_grad_(trains)


Call = Callable[..., Any]
ABSENT = object()
FORWARD, COMPILED = CALLS = "forward", "_compiled_call_impl"
EAGER = "hetero fetches what a unit computes with: compile what is inside a unit, or a unit"
MANY = 256  # prune hooks of dead graphs once there are this many


class Bracket:
    """One call of one module, in whose place ``run`` is called (see [Note: brackets stay]).

    A copy of the module that has this for a call, or a pickle of it, has the call alone.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = module
        self._name = name
        self.before = module.__dict__.get(name, ABSENT)
        self._found: Call = getattr(module, name)
        functools.update_wrapper(self, self._found)
        own = self.before is ABSENT and isinstance(getattr(type(module), name), FunctionType)
        self.call = self.run = self._of_class if own else self._found
        self.layers: list[Callable[[Call], Call]] = []
        self._stand_in = torch.compiler.disable(self, reason=EAGER) if name in CALLS else self
        put(module, name, self._stand_in)

    @passing
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    @passing
    def _of_class(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(self._module), self._name)(self._module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._found, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._found.__reduce_ex__(protocol)

    def place(self) -> None:
        """Stand where nothing stands: the user has deleted a patch."""
        if self._name not in self._module.__dict__:
            put(self._module, self._name, self._stand_in)

    @property
    def is_placed(self) -> bool:
        """Whether this is what the module has, and not a patch of the user's."""
        return self._module.__dict__.get(self._name) is self._stand_in

    def add(self, around: Callable[[Call], Call]) -> None:
        """Put something around what is called."""
        self.layers.append(around)
        self.run = around(self.run)

    def remove(self) -> bool:
        """Be the call that was there before, for a patch that holds this; without one be gone."""
        self.layers.clear()
        self.run = self.call
        is_placed = self.is_placed
        if is_placed:
            put(self._module, self._name, self.before)
        return is_placed


def put(module: nn.Module, name: str, value: Any) -> None:
    """Give a module an attribute past its own ``__setattr__``, or take it off: ABSENT."""
    if value is ABSENT:
        module.__dict__.pop(name, None)
    else:
        object.__setattr__(module, name, value)


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
            found = theirs(self.call, *args, **kwargs)
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
        return theirs(call, *args, **kwargs)

    return forward


def around_saving(saved: SavedTensors, call: Call) -> Call:
    """Return the whole model's forward, whose saved tensors pass through our pair of hooks."""

    @functools.wraps(call)
    def forward(*args: Any, **kwargs: Any) -> Any:
        pushed = saved.push_where_differentiated()
        try:
            return theirs(call, *args, **kwargs)
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
                output = theirs(call, *args, **kwargs)
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
            return theirs(call, *args, **kwargs)
        with runtime.lend(buckets, "encoder"):
            return theirs(call, *args, **kwargs)

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


def _guarding(module: nn.Module, _: Call) -> Call:
    return functools.partial(_guarded_apply, module)


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

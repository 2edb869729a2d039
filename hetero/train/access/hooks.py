"""The only place that attaches anything to modules and parameters (floor 2).

Brackets wrap each unit's forward and the whole model's, a hook on each parameter reports its
gradient, and methods that would move or copy parameters unseen are guarded; all per instance, and
undone by `remove`.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from hetero.errors import ConfigError, OutOfMemory, StateError
from hetero.functional.head import causal_loss, causal_model_of, head_of, late
from hetero.interrupts import theirs
from hetero.train.access.attachments import Attachments, Call, put, thawed
from hetero.train.access.runtime import Runtime
from hetero.train.activations.meter import Meter
from hetero.train.activations.policy import ActivationPolicies
from hetero.train.activations.saved import SavedTensors
from hetero.train.activations.tiles import TILE, mlps, tile, untile
from hetero.train.model.binding import without_faults
from hetero.train.model.faults import Prepared
from hetero.train.model.graph import OurHook
from hetero.train.model.units import PART, Unit, entries_of, has_params

STATE_DICT_METHODS = {"_save_to_state_dict": False, "_load_from_state_dict": True}
"""Of a module, and whether they load."""


class MemoryGuard(Protocol):
    """Follows the forwards of a model that stays on its device."""

    def begins(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """A forward of the whole model begins, on these arguments."""

    def refusal(self, error: torch.OutOfMemoryError) -> OutOfMemory:
        """Return the error for a forward that found no room."""


class Hooks(Attachments):
    """The brackets and guards of a prepared model."""

    def watch(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        runtime: Runtime,
        activations: ActivationPolicies,
        meter: Meter,
    ) -> None:
        """Bracket every unit's forward, and the whole model's."""
        index_of = {id(unit.module): i for i, unit in enumerate(units) if unit.module is not None}
        self.shape(model, units, activations)
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder) and id(module) not in index_of:
                first = index_of.get(id(next(iter(module.layers), None)))
                if first is not None:
                    lend = functools.partial(around_encoder, runtime, runtime.needs[first])
                    self.surround_forward(module, lend)
        for entry in entries_of(model):
            self.surround_forward(entry, functools.partial(around_model, runtime, meter))
        for module in filter(has_params, model.modules()):  # called by torch.jit.script
            refuse = functools.partial(_refuse, "torch.jit.script")
            self.replace(module, "__prepare_scriptable__", refuse)

    def shape(
        self, model: nn.Module, units: Sequence[Unit], activations: ActivationPolicies
    ) -> None:
        """Run every unit's forward under its activation policy."""
        for index, unit in enumerate(units):
            if unit.module is not None:
                around = functools.partial(around_unit, activations, index)
                self.surround_forward(unit.module, around)
        for entry in entries_of(model):
            self.surround_forward(entry, functools.partial(around_batch, activations))

    def guard_memory(self, model: nn.Module, guard: MemoryGuard) -> None:
        """Let ``guard`` look at what the whole model's forward is given, and at its end."""
        for entry in entries_of(model):
            around = functools.partial(around_guarded, guard)
            self.surround_forward(entry, around, traced=True)

    def watch_units(
        self, units: Sequence[Unit], activations: ActivationPolicies
    ) -> Callable[[], None]:
        """Run every unit's forward under its activation policy; return a call that ends that."""
        layers = []
        for index, unit in enumerate(units):
            if unit.module is not None:
                around = functools.partial(around_unit, activations, index)
                self.surround_forward(unit.module, around, traced=True)
                layers.append(around)

        def end() -> None:
            for around in layers:
                self.let_go(around)

        return end

    def save_through(self, model: nn.Module, saved: SavedTensors) -> None:
        """Let tensors saved by the whole model's forward pass through our pair of hooks."""
        for entry in entries_of(model):
            self.surround_forward(entry, functools.partial(around_saving, saved))

    def tile(self, units: Sequence[Unit], size: int) -> int:
        """Let the MLPs of blocks take ``size`` positions at a time; return how many there are."""
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
        """Let a causal language model's loss compute without its head's logits."""
        causal = causal_model_of(model)
        head = head_of(causal)
        loss: Any = causal.loss_function
        self.bracket(head, "forward", functools.partial(late, head))
        self.replace(causal, "_loss_function", causal_loss(head, loss))

    def before_gradients(
        self, params: Mapping[int, nn.Parameter], arriving: Callable[[int], None]
    ) -> None:
        """Call ``arriving`` with a parameter's number before autograd adds to its gradient."""
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
                self.keep(param.register_hook(Notify(index)))

    def guard(
        self, model: nn.Module, reading: Callable[[], Any], fits: Callable[[int], None]
    ) -> None:
        """Guard moves and copies; let state dicts read and write the homes inside ``reading()``.

        A deep copy is a plain module in RAM; ``fits(n_bytes)`` refuses one that is too large.
        """
        self.replace(model, "__reduce_ex__", functools.partial(_refuse, "pickling"))
        for module in model.modules():
            self._mark(module)
            if not has_params(module):
                continue  # it may be part of other models, too
            self.replace(module, "__deepcopy__", functools.partial(_copied, self, module, fits))
            self.bracket(module, "_apply", functools.partial(_guarding, module))
            if any(p is not None for p in module._parameters.values()):
                for name, loads in STATE_DICT_METHODS.items():
                    self.bracket(module, name, functools.partial(_at_home, reading, loads))

    def refuse_forwards(self, model: nn.Module, check: Callable[[], None]) -> None:
        """Let no module of a model compute: ``check`` raises, with the reason."""

        def around(call: Call) -> Call:
            @functools.wraps(call)
            def forward(*args: Any, **kwargs: Any) -> Any:
                check()
                return call(*args, **kwargs)

            return forward

        for module in model.modules():
            if has_params(module):  # others may be shared with usable models
                self.surround_forward(module, around)

    def _mark(self, module: nn.Module) -> None:
        """Count that a module is part of one more prepared model."""
        module.__dict__[PART] = module.__dict__.get(PART, 0) + 1
        self._undo.append(functools.partial(_unmark, module))

    def refuse_saving(self, model: nn.Module) -> None:
        """Refuse ``save_pretrained`` of parameters on disk, unless a state dict is given."""
        if callable(getattr(model, "save_pretrained", None)):
            around = functools.partial(functools.partial, _on_disk)
            self.bracket(model, "save_pretrained", around)


def _copied(
    ours: Attachments, module: nn.Module, fits: Callable[[int], None], memo: dict[int, Any]
) -> nn.Module:
    """Return a deep copy of a module without our attachments."""
    with without_faults():
        fits(sum(p.nbytes for p in module.parameters() if id(p) not in memo))
    _copy_buffers(module, memo)
    own = getattr(type(module), "__deepcopy__", None)
    if own is None:
        twin = _twin(ours, module, memo)
    else:  # it may copy all attributes, as that of a parametrized module does
        attached = module.__dict__
        module.__dict__ = ours.without_ours(module, attached)
        try:
            twin = own(module, memo)
        finally:
            module.__dict__ = attached
    for part in twin.modules():
        part.__dict__.pop(PART, None)
    return twin


def _copy_buffers(module: nn.Module, memo: dict[int, Any]) -> None:
    """Copy a module's buffers to RAM, where copies of its pages are."""
    if any(isinstance(param, Prepared) for param in module.parameters()):
        for buffer in module.buffers():
            if id(buffer) not in memo and type(buffer) is torch.Tensor:
                memo[id(buffer)] = buffer.detach().to("cpu", copy=True)


def _twin(ours: Attachments, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    reduced: Any = type(module).__reduce_ex__(module, 4)
    make, args, state = reduced[:3]
    twin: nn.Module = make(*args)
    memo[id(module)] = twin
    twin.__setstate__(copy.deepcopy(ours.without_ours(module, state), memo))
    return twin


def _unmark(module: nn.Module) -> None:
    module.__dict__[PART] -= 1
    if not module.__dict__[PART]:
        del module.__dict__[PART]


def before_next_forward(module: nn.Module, call: Callable[[], None]) -> Callable[[], None]:
    """Call ``call`` before a module's next forward; return a function that cancels that."""

    def once(*_: Any) -> None:
        handle.remove()
        call()

    handle = module.register_forward_pre_hook(once)
    return handle.remove


def before_forward(module: nn.Module, call: Callable[[], None]) -> Callable[[], None]:
    """Call ``call`` before every forward of a module; return a function that ends that."""
    return module.register_forward_pre_hook(lambda *_: call()).remove


def after_next_forward(module: nn.Module, call: Callable[[Any], None]) -> Callable[[], None]:
    """Call ``call`` with what a module's next forward returns; return a function that cancels
    that."""

    def once(_: nn.Module, __: Any, output: Any) -> None:
        handle.remove()
        call(output)

    handle = module.register_forward_hook(once)
    return handle.remove


def before_load(
    module: nn.Module, call: Callable[[dict[str, Any], str], None]
) -> Callable[[], None]:
    """Call ``call`` with the state dict, and this module's prefix in it, before each load of a
    module's own tensors; return a function that ends that."""

    def with_state(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        call(state, prefix)

    handle: Any = module.register_load_state_dict_pre_hook(with_state)
    end: Callable[[], None] = handle.remove
    return end


def before_node(node: Any, call: Callable[..., None]) -> None:
    """Call ``call`` before backward runs a node, for as long as its graph lives."""
    node.register_prehook(call)


def around_unit(activations: ActivationPolicies, unit: int, call: Call) -> Call:
    """Return a unit's forward inside an access, under the unit's policy."""

    @functools.wraps(call)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return activations.run(unit, call, args, kwargs)

    return forward


def around_batch(activations: ActivationPolicies, call: Call) -> Call:
    """Return the whole model's forward, whose batch is passed to ``activations``."""

    @functools.wraps(call)
    def forward(*args: Any, **kwargs: Any) -> Any:
        activations.begin(args, kwargs)
        return theirs(call, *args, **kwargs)

    return forward


def around_guarded(guard: MemoryGuard, call: Call) -> Call:
    """Return the whole model's forward, whose begin, and lack of room, ``guard`` hears of."""

    @functools.wraps(call)
    def forward(*args: Any, **kwargs: Any) -> Any:
        guard.begins(args, kwargs)
        try:
            return theirs(call, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise guard.refusal(error) from error

    return forward


def around_saving(saved: SavedTensors, call: Call) -> Call:
    """Return the whole model's forward inside our pair of saved-tensor hooks."""

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
    """Return the whole model's forward between `Runtime.enter_model` and `leave_model`."""

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
    """Return the forward of an `nn.TransformerEncoder`; under no_grad its first layer is bound.

    It reads that layer's parameters, else unbound, to decide on nested tensors.
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
    """Refuse a ``.to()`` that would move or convert; let one that changes nothing pass."""
    with without_faults():
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


def _at_home(
    reading: Callable[[], Any], loads: bool, call: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a state dict method that reads and writes the homes."""

    @functools.wraps(call)
    def at_home(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, dict) and a.get("assign_to_params_buffers") for a in args):
            raise ConfigError(
                "load_state_dict(assign=True) would replace paged parameters",
                advice="call load_state_dict without assign=True",
            )
        if loads and torch.__future__.get_swap_module_params_on_conversion():
            raise ConfigError(
                "load_state_dict would replace paged parameters, since"
                " torch.__future__.set_swap_module_params_on_conversion(True) is set",
                advice="set it to False around load_state_dict",
            )
        with reading():
            return call(*args, **kwargs)

    return at_home

"""The one door to torch's private names (floor 0).

They may change with any release of torch. Each is looked up once, on import; if one is missing, the
error names the releases that hetero knows. A `Replacement` replaces one while it has users.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from operator import methodcaller
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_iter as tree_iter
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

from hetero.errors import unknown_torch

_MODES, _DEFAULT_HOOKS = "torch.utils._python_dispatch", "_saved_tensors_default_hooks"
NAMES = (  # module, attribute
    *(("torch._C", "_current_graph_task_id"), ("torch._C", "_storage_Use_Count")),
    *(("torch._C", "_get_tracing_state"), ("torch._C", "DisableTorchFunctionSubclass")),
    *(("torch._C", "_disabled_torch_function_impl"), ("torch.Tensor", "_make_wrapper_subclass")),
    *(("torch.Tensor", "_make_subclass"), ("torch.Tensor", "_version")),
    *(("torch._C._autograd", f"_{do}{_DEFAULT_HOOKS}") for do in ("top", "push", "pop")),
    ("torch._C._autograd", "_get_current_graph_task_keep_graph"),
    *(("torch._C", "_get_dispatch_mode"), ("torch._C", "_TorchDispatchModeKey")),
    *(("torch._C._functorch", "peek_interpreter_stack"), ("torch", "_foreach_norm")),
    *(("torch.autograd", "_engine_run_backward"), ("torch.autograd.graph", "_engine_run_backward")),
    *(("torch.autograd.Variable", "_execution_engine"), ("torch._C", "_to_dlpack")),
    *((_MODES, "_disable_current_modes"), (_MODES, "_pop_mode"), (_MODES, "_push_mode")),
    *((_MODES, "_get_current_dispatch_mode"), (_MODES, "_get_current_dispatch_mode_stack")),
    *(("torch._functorch.eager_transforms", "_wrap_for_grad"),),
    *(("torch.nn.utils.parametrize", "_cache_enabled"), ("torch.ops.aten", "_trilinear")),
    ("torch.utils._foreach_utils", "_foreach_supported_types"),
    *(("torch._C", "_SetExcludeDispatchKeyGuard"), ("torch._C", "_RestorePythonTLSSnapshot")),
    *(("torch._functorch.vmap", "_add_batch_dim"), ("torch._dynamo.trace_rules", "add")),
)


class DispatchMode(TorchDispatchMode):
    """torch's mode, which has no types, with some."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's modes have no types

    def __enter__(self) -> Any:
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch's modes have no types

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's modes have no types


def apply_function(kind: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    """Return what a function with a backward of its own makes: its method has no types."""
    call: Callable[..., torch.Tensor] = kind.apply
    return call(*args)


def find(module: str, name: str) -> Any:
    """Return a private name of torch; raises UnknownTorch if this release lacks it."""
    owner: Any
    try:
        owner = import_module(module)
    except ImportError:  # a class or a namespace in C++ is no module
        above, _, last = module.rpartition(".")
        owner = getattr(import_module(above), last, None)
    found = getattr(owner, name, None)
    if found is None:
        raise unknown_torch(f"{module}.{name}", torch.__version__)
    return found


_FOUND = {f"{module}.{name}": find(module, name) for module, name in NAMES}

_norms: Callable[..., Sequence[torch.Tensor]] = _FOUND["torch._foreach_norm"]


def foreach_norm(tensor: torch.Tensor, ord: float) -> torch.Tensor:
    """Return a tensor's norm by the kernel that `clip_grad_norm_` uses for a list of tensors."""
    return _norms([tensor], ord)[0]


def takes_lists_of(kind: type[torch.Tensor]) -> None:
    """Let torch's clipping use its operations on lists for a class of gradients, as for plain ones:
    on an accelerator they may round otherwise than those on one tensor."""
    _FOUND["torch.utils._foreach_utils._foreach_supported_types"].append(kind)


# -- collectives ---------------------------------------------------------------------------------


def all_gathered(part: torch.Tensor, n: int, group: str) -> torch.Tensor:
    """Return the parts of the n ranks of a group, one after the other along dimension 0."""
    return waited_for(torch.ops._c10d_functional.all_gather_into_tensor(part, n, group))


def reduce_scattered(addend: torch.Tensor, n: int, group: str) -> torch.Tensor:
    """Return this rank's part, along dimension 0, of the sum of n ranks' addends."""
    return waited_for(torch.ops._c10d_functional.reduce_scatter_tensor(addend, "sum", n, group))


def all_reduced(addend: torch.Tensor, group: str, op: str = "sum") -> torch.Tensor:
    """Return the sum of what a group's ranks have each, or "max" for the largest."""
    return waited_for(torch.ops._c10d_functional.all_reduce(addend, op, group))


def waited_for(result: torch.Tensor) -> torch.Tensor:
    """Return what a collective fills, once it has: by the wait of DTensors, which is ours while a
    model of tensors is prepared."""
    find("torch.distributed._functional_collectives", "wait_tensor")(result)
    return result


def limits_of(group: Any) -> dict[torch.device, timedelta]:
    """Return after how long a group's collectives end in an error, by the device of their tensors;
    without those whose backend has no limit."""
    found = {}
    for device in group._device_types:
        limit = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        if limit is not None:
            found[device] = limit
    return found


def set_limits(group: Any, limits: Mapping[torch.device, timedelta]) -> None:
    """Set what `limits_of` returns, for collectives that begin from now on."""
    for device, limit in limits.items():
        group._get_backend(device)._set_default_timeout(limit)


# -- backward passes -----------------------------------------------------------------------------

NO_TASK = -1
graph_task: Callable[[], int] = _FOUND["torch._C._current_graph_task_id"]
"""Return the number of the calling thread's backward pass; NO_TASK outside of one."""
ENGINE_CODE: CodeType = _FOUND["torch.autograd.graph._engine_run_backward"].__code__
"""Of the frame that calls the engine of autograd."""
DISPATCHERS = (
    *("torch._ops", "torch.utils._python_dispatch", "torch._dynamo.eval_frame", "torch._compile"),
    "torch.distributed.tensor._dispatch",
)
"""Modules whose frames stand between an operation and its caller."""


NODE_ASKERS = frozenset({"torch.autograd.graph", "torch.distributed.pipelining._backward"})
"""Modules that make a view of a leaf for its graph node alone, and drop it."""
GRADIENT_ADDERS = frozenset({"torch.distributed.pipelining._backward"})
"""Modules of torch that add to gradients as autograd does, between passes."""


def asks_for_node() -> bool:
    """Whether the function that called the caller of this one makes a view for its graph node."""
    return sys._getframe(2).f_globals.get("__name__") in NODE_ASKERS


def adds_gradients() -> bool:
    """Whether the function that called the caller of this one adds to gradients as autograd."""
    return sys._getframe(2).f_globals.get("__name__") in GRADIENT_ADDERS


keeps_graph: Callable[[], bool] = _FOUND["torch._C._autograd._get_current_graph_task_keep_graph"]
"""Whether the backward pass of this thread retains its graph."""


def in_backward() -> bool:
    """Whether the calling thread is inside a backward pass."""
    return graph_task() != NO_TASK


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call ``call`` when the backward pass of this thread ends without an error."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def run_backward(loss: torch.Tensor) -> None:
    """Run backward under the active modes; `Tensor.backward` would run without them."""
    autograd: Any = torch.autograd
    autograd._engine_run_backward(
        *((loss,), (torch.ones_like(loss),), False, False, ()),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def backward_of_inputs(output: torch.Tensor, given: torch.Tensor, module: torch.nn.Module) -> Any:
    """Compute the gradient of what a stage was given, and leave it there; returns what
    `backward_of_weights` needs."""
    run = find(HALVES, "stage_backward_input")
    _, groups = run([output], None, [given], module.parameters())
    return groups


def backward_of_weights(module: torch.nn.Module, groups: Any) -> None:
    """Compute the gradients of a stage's weights, as torch's schedules do after others'."""
    find(HALVES, "stage_backward_weight")(module.parameters(), groups)


HALVES = "torch.distributed.pipelining._backward"


# -- storages ------------------------------------------------------------------------------------

storage_uses: Callable[[int], int] = _FOUND["torch._C._storage_Use_Count"]
"""Return how many tensors and handles share a storage, by its address in C++."""
capsule_of: Callable[[torch.Tensor], object] = _FOUND["torch._C._to_dlpack"]
"""Return a tensor for `from_dlpack`, which becomes another one with a storage of its own."""

# -- saved tensors -------------------------------------------------------------------------------

top_saved_hooks: Callable[[bool], Any] = _FOUND[
    "torch._C._autograd._top_saved_tensors_default_hooks"
]
push_saved_hooks: Callable[[Any, Any], None] = _FOUND[
    "torch._C._autograd._push_saved_tensors_default_hooks"
]
pop_saved_hooks: Callable[[], None] = _FOUND["torch._C._autograd._pop_saved_tensors_default_hooks"]

# -- dispatch ------------------------------------------------------------------------------------

without_torch_function: Any = _FOUND["torch._C.DisableTorchFunctionSubclass"]
"""A block in which subclasses of tensors are plain tensors."""
no_torch_function: Any = _FOUND["torch._C._disabled_torch_function_impl"]
"""The ``__torch_function__`` of a class that has none."""
version_of: Callable[[torch.Tensor], int] = _FOUND["torch.Tensor._version"].__get__
"""Return how often a tensor was written."""
make_subclass: Callable[..., Any] = _FOUND["torch.Tensor._make_subclass"]
"""Return a tensor of a subclass on the memory of another."""
make_wrapper: Callable[..., Any] = _FOUND["torch.Tensor._make_wrapper_subclass"]
"""Return a tensor of a subclass, with a shape and no memory."""
without_modes: Callable[[], Any] = _FOUND[f"{_MODES}._disable_current_modes"]
"""A block in which no dispatch mode sees operations."""
_dispatch_mode = _FOUND["torch._C._get_dispatch_mode"]
_FAKE = _FOUND["torch._C._TorchDispatchModeKey"].FAKE
_excluding = _FOUND["torch._C._SetExcludeDispatchKeyGuard"]
as_called: Callable[[], Any] = _FOUND["torch._C._RestorePythonTLSSnapshot"]
"""A block, inside of a mode, with the switches of the code that called the operation."""
TRILINEAR = _FOUND["torch.ops.aten._trilinear"].default
_KEYS = vars(torch._C.DispatchKey)


def switching_autocast(kind: str, *, on: bool) -> Any:
    """Return a block, inside of a mode, in which autocast is on or off for a type of device."""
    return _excluding(_KEYS.get(f"Autocast{kind.upper()}", _KEYS["AutocastPrivateUse1"]), not on)


current_mode: Callable[[], Any] = _FOUND[f"{_MODES}._get_current_dispatch_mode"]
modes_on: Callable[[], list[Any]] = _FOUND[f"{_MODES}._get_current_dispatch_mode_stack"]
"""Return the dispatch modes that are on, the outermost first."""
_pop_mode = _FOUND[f"{_MODES}._pop_mode"]
_push_mode = _FOUND[f"{_MODES}._push_mode"]


def pop_modes() -> list[Any]:
    """Take all dispatch modes of this thread off; returns them, the outermost first."""
    modes = modes_on()
    for _ in modes:
        _pop_mode()
    return modes


def push_modes(modes: Sequence[Any]) -> None:
    """Put modes that were taken off back."""
    for mode in modes:
        _push_mode(mode)


def is_faking() -> bool:
    """Whether operations make fake tensors, which have no bytes."""
    return _dispatch_mode(_FAKE) is not None


functorch_level: Callable[[], Any] = _FOUND["torch._C._functorch.peek_interpreter_stack"]
"""Return the innermost functorch transform; None outside of all."""
tracing_state: Callable[[], Any] = _FOUND["torch._C._get_tracing_state"]
"""Return the state of `torch.jit.trace`; None outside of it."""
break_graphs_at: Callable[[str], None] = _FOUND["torch._dynamo.trace_rules.add"]
"""Make the compiler break its graph at functions of a module."""

# -- functions that are replaced -----------------------------------------------------------------

_lock = threading.RLock()


class Replacement:
    """A function of torch that is replaced while it has users.

    Args:
        make: returns the replacement of torch's own. If other code has replaced ours in turn, ours
            stays beneath it, and serves the next user again.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._owner, self._name, self._make = owner, name, make
        self._n_users = 0
        self._own: Any = None  # the owner's own attribute; None if inherited
        self._ours: Any = None

    def install(self) -> None:
        """Count one more user."""
        with _lock:
            if self._ours is None:
                self._own = vars(self._owner).get(self._name)
                self._ours = self._make(getattr(self._owner, self._name))
                setattr(self._owner, self._name, self._ours)
            self._n_users += 1

    def uninstall(self) -> None:
        """Count one user less; after the last, put torch's own back."""
        with _lock:
            self._n_users -= 1
            if self._n_users or vars(self._owner).get(self._name) is not self._ours:
                return
            if self._own is None:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, self._own)
            self._ours = None


class Place(NamedTuple):
    """The place of a function of torch that may be replaced."""

    owner: Any
    name: str

    def replaced(self, make: Callable[[Any], Any]) -> Replacement:
        """Return a `Replacement` by ``make(torch's own)``."""
        return Replacement(self.owner, self.name, make)


class PipelinePlaces(NamedTuple):
    """Where torch's pipeline schedules begin and wait."""

    steps: tuple[Place, ...]
    """A schedule's step."""
    trials: tuple[Place, ...]
    """Where a schedule lets its stages compute once, before its first step, to learn shapes."""
    makers: tuple[Place, ...]
    """Of schedules that refuse some numbers of micro-batches."""
    wait: Place
    """Takes a list of works, and blocks until all are over."""


def pipeline_places() -> PipelinePlaces:
    """Return the places of torch's pipeline schedules. Programs that have none do not pay for the
    import, which takes seconds."""
    module = "torch.distributed.pipelining.schedules"
    kinds = [find(module, name) for name in ("PipelineScheduleSingle", "PipelineScheduleMulti")]
    trials = zip(kinds, ("_initialize_stage", "_initialize_stages"), strict=True)
    find(module, "_wait_batch_p2p")
    return PipelinePlaces(
        steps=tuple(Place(kind, "step") for kind in kinds),
        trials=tuple(Place(kind, name) for kind, name in trials if hasattr(kind, name)),
        makers=tuple(Place(find(module, name), "__init__") for name in PARTICULAR),
        wait=Place(import_module(module), "_wait_batch_p2p"),
    )


PARTICULAR = (
    *("Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"),
    *("ScheduleZBVZeroBubble", "ScheduleDualPipeV"),
)


def stages_of(schedule: Any) -> list[Any]:
    """Return the stages of a pipeline schedule on this rank."""
    found = vars(schedule).get("_stages") or [vars(schedule).get("_stage")]
    return [stage for stage in found if stage is not None]


class StagePass(NamedTuple):
    """A pass of a micro-batch through a stage, by its index."""

    kind: str
    """F, a forward; B, a backward; I and W, the halves of one, for inputs and for weights."""
    stage: int
    batch: int


def passes_of(schedule: Any, rank: int) -> list[StagePass]:
    """Return the passes of a rank's step, in order; empty if the schedule does not tell."""
    orders = vars(schedule).get("pipeline_order") or {}
    actions = (each for action in filter(None, orders.get(rank, ())) for each in _parts(action))
    all_ = (StagePass(a.computation_type.value, a.stage_index, a.microbatch_index) for a in actions)
    return [each for each in all_ if each.kind in ("F", "B", "I", "W")]


def leave_forwards(schedule: Any) -> None:
    """Take all but the forwards, and what they send, out of a schedule of several stages a rank:
    torch's would take gradients from stages that make none in an evaluation."""
    orders = vars(schedule).get("pipeline_order_with_comms")
    for rank, actions in (orders or {}).items():
        flat = (each for action in actions for each in _parts(action))
        orders[rank] = [a for a in flat if a.computation_type.value in ("F", "SEND_F", "RECV_F")]


def _parts(action: Any) -> Any:
    """Return the actions of one that overlaps some, or it alone."""
    return getattr(action, "sub_actions", None) or (action,)


class RingTemplates(NamedTuple):
    """torch's ring attention over any kernel, and what it looks at."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    options: Any
    rotations: Any
    kernel: Callable[..., Any]
    """Of CPUs, for one block of keys; with the logs of its sums."""
    kernel_backward: Callable[..., Any]
    wait: Place
    """Takes a tensor that a collective fills, and blocks until it has."""


def ring_templates() -> RingTemplates:
    """Return torch's templates of ring attention. Programs that use none do not pay for the import,
    which takes seconds."""
    module = "torch.distributed.tensor.experimental._context_parallel._attention"
    if find_spec(module.rpartition(".")[0]) is None:  # before torch 2.10
        module = "torch.distributed.tensor.experimental._attention"
    names = ("_templated_ring_attention", "_templated_ring_attention_backward")
    forward, backward = (find(module, name) for name in names)
    options, rotations = find(module, "_cp_options"), find(module, "_RotateMethod")
    find(module, "_maybe_wait")
    wait = Place(import_module(module), "_maybe_wait")
    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    one, its_backward = (find("torch.ops.aten", f"{kernel}{of}") for of in ("", "_backward"))
    return RingTemplates(forward, backward, options, rotations, one, its_backward, wait)


def collective_wait() -> Place:
    """Return where DTensors wait for their collectives."""
    module = "torch.distributed._functional_collectives"
    find(module, "wait_tensor")
    return Place(import_module(module), "wait_tensor")


n_calls: Callable[[Any], int] = methodcaller("_get_sequence_number_for_group")
"""Return how many collectives of a group this rank has begun."""


@contextmanager
def ring_options(*, is_balanced: bool) -> Iterator[None]:
    """Say how sequences are cut for torch's ring attention inside a block, where keys and values
    go round block by block: all of them at once, as is torch's default, would not be in parts."""
    templates = ring_templates()
    options = templates.options
    before = options.enable_load_balance, options.rotate_method
    options.enable_load_balance = is_balanced
    options.rotate_method = templates.rotations.ALL_TO_ALL
    try:
        yield
    finally:
        options.enable_load_balance, options.rotate_method = before


RUN_BACKWARD = Place(torch.autograd, "_engine_run_backward")
MODULE_CALL = Place(torch.nn.Module, "__call__")
SCRIPT_CALL = Place(torch.jit.ScriptFunction, "__call__")
AUTOCAST_INIT = Place(torch.autocast, "__init__")
WEIGHTS_ONCE = Place(import_module("torch.nn.utils.parametrize"), "_cache_enabled")
SAVED_HOOKS_ENTER = Place(torch.autograd.graph.saved_tensors_hooks, "__enter__")
WRAPPERS = (  # through which transforms of functorch take their arguments
    Place(import_module("torch._functorch.eager_transforms"), "_wrap_for_grad"),
    Place(import_module("torch._functorch.vmap"), "_add_batch_dim"),
)


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell schedulers of learning rates, which look for this, that an optimizer has stepped."""
    vars(optimizer)["_opt_called"] = True


def install(replacements: tuple[Replacement, ...]) -> Callable[[], None]:
    """Install replacements; returns a call that uninstalls them."""
    for each in replacements:
        each.install()
    left = list(replacements)

    def undo() -> None:
        while left:  # a second call finds none
            left.pop().uninstall()

    return undo

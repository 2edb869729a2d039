"""Running a torch optimizer's own arithmetic on tensors that are not its parameters (floor 2).

The rule is the `step` of the user's class, run on a throw-away worker whose parameters are pieces
of the homes. Elementwise rules give the same bits on any cut of an index space. Fused kernels and
two-byte arithmetic depend on vector tails, and other rules on whole tensors: those run on segments.
A class that is not known here is tried on small tensors first (trial.py), then on whole tensors.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hetero import optim
from hetero.train.update.formulas import Formula, formula_of

O = torch.optim
ELEMENTWISE = (
    *(O.SGD, O.Adam, O.AdamW, O.NAdam, O.RAdam, O.Adamax),
    *(O.Adagrad, O.Adadelta, O.RMSprop, O.ASGD, O.Rprop),
    optim.Lion,
)
WHOLE_TENSOR = (
    *(getattr(O, name) for name in ("Adafactor", "Muon") if hasattr(O, name)),
    *(optim.LAMB, optim.LARS, optim.AdamW8bit),
)
OF_PARTS = (*((O.Muon,) if hasattr(O, "Muon") else ()), optim.LAMB, optim.LARS)
"""Those of them that step DTensors; of the others torch itself fails."""
PLACING = (*ELEMENTWISE, optim.LAMB, optim.LARS)
"""Rules to whose numbers it is all the same how ranks divide a gradient."""
SCALARS = frozenset({"step", "mu", "mu_product", "eta"})  # whatever their shape
INERT = frozenset(  # names of a class body that no step reads
    {"__doc__", "__init__", "__module__", "__qualname__", "__firstlineno__", "__annotations__"}
    | {"__annotate_func__", "__annotations_cache__", "__static_attributes__", "__parameters__"}
    | {"__dict__", "__weakref__", "__abstractmethods__", "_abc_impl", "__orig_bases__"}
)
LIKE_NUMEL = 2**20  # elements of a probe that shows a rule's states of large parameters
State = dict[str, Any]
Group = dict[str, Any]


def make_worker(inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and settings, without parameters, states or hooks."""
    worker = object.__new__(type(inner))
    worker.__dict__.update({k: v for k, v in inner.__dict__.items() if k != "step"})
    worker._optimizer_step_pre_hooks = OrderedDict()
    worker._optimizer_step_post_hooks = OrderedDict()
    worker.param_groups = []
    worker.state = defaultdict(dict)
    return worker


def raw_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return a class's step without the wrapper that runs user hooks and profiles."""
    step = kind.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def known_rule(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer] | None:
    """Return the class above whose unchanged step an optimizer makes; None for others.

    A subclass that sets other defaults, or has methods of its own, makes the same step. One that
    redefines a name of the class may compute otherwise.
    """
    kind = type(optimizer)
    for place, base in enumerate(kind.__mro__):
        if base in (*ELEMENTWISE, *WHOLE_TENSOR):
            below = kind.__mro__[:place]
            named = {name for cls in below for name in vars(cls)} - INERT
            if place:
                named |= {name for name in vars(optimizer) if callable(getattr(base, name, None))}
            same_step = raw_step(kind) is raw_step(base)
            own = named - ({"step"} if same_step else set())
            return None if any(hasattr(base, name) for name in own) else base
    return None


class Rule:
    """The step of one optimizer's class and settings, to be called from any thread."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.kind = type(inner)
        self.known = known_rule(inner)
        self.elementwise = self.known in ELEMENTWISE
        self.places_grads = self.known in PLACING
        self.steps_parts = self.elementwise or self.known in OF_PARTS
        self._keeps_dtypes = self.kind.load_state_dict is not O.Optimizer.load_state_dict
        self._pattern = make_worker(inner)
        self._step = raw_step(self.kind)
        self._kept: dict[tuple[str, torch.dtype, tuple[int, ...]], dict[str, torch.dtype]] = {}

    @property
    def formula(self) -> Formula | None:
        """The written arithmetic of the same step, for masters; None if there is none."""
        return None if self.known is None else formula_of(self.known)

    def step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the step of an optimizer of this class, without the hooks around it."""
        self._step(optimizer)

    def run(
        self, group: Group, params: Sequence[torch.Tensor], states: Sequence[State]
    ) -> list[State]:
        """Step ``params`` by their ``grad`` as one group; return the states afterwards."""
        worker = make_worker(self._pattern)
        worker.param_groups = [{**group, "params": list(params)}]
        both = zip(params, states, strict=True)
        known = {p: found for p, s in both if (found := s or self._born(p))}
        worker.state = defaultdict(dict, known)
        with torch.device("cpu"):  # the default device is the user's, and each thread's own
            self._step(worker)
        return [dict(worker.state[p]) for p in params]

    def _born(self, param: torch.Tensor) -> State:
        """Return the state that a rule gives a parameter before any step: Adagrad of torch 2.11
        does; in 2.13 its step makes it, as others do."""
        if self.known is not O.Adagrad:
            return {}
        first = self._pattern.defaults["initial_accumulator_value"]
        with torch.device("cpu"):
            return dict(O.Adagrad([param], initial_accumulator_value=first).state[param])

    def step_in_place(self, groups: list[Group], states: defaultdict[torch.Tensor, State]) -> None:
        """Step the parameters of ``groups`` themselves."""
        self._pattern.param_groups, self._pattern.state = groups, states
        try:
            self._step(self._pattern)
        finally:
            self._pattern.param_groups, self._pattern.state = [], defaultdict(dict)

    def settings_after(self, group: Group, *, stepped: bool) -> Group:
        """Return a group's settings as a step leaves them: some rules count in their groups.

        ``stepped`` says whether any parameter of the group has a gradient. A probe is stepped to
        see: settings do not depend on the parameters there are (trial.py).
        """
        worker = make_worker(self._pattern)
        probes = [zeros(tiny(param.shape), param.dtype) for param in group["params"][:1]]
        for probe in probes if not stepped else ():
            probe.grad = None
        after = {**frozen(group), "params": probes}
        worker.param_groups = [after]
        worker.state = defaultdict(dict, {p: born for p in probes if (born := self._born(p))})
        with torch.no_grad(), torch.device("cpu"):
            self._step(worker)
        return {key: value for key, value in after.items() if key != "params"}

    def states_of(
        self, group: Group, dtype: torch.dtype, shape: Sequence[int]
    ) -> dict[str, torch.dtype]:
        """Return the states with one number per element that such a parameter comes to have.

        A probe is stepped to see: known rules choose states by dtype, dimensions and sizes of 1,
        others perhaps by size too.
        """
        like = tiny(shape) if self.known is not None else large(shape)
        key = kinds_of(group), dtype, like
        if key not in self._kept:
            self._kept[key] = {} if self.refuses(len(shape)) else self._seen(group, dtype, like)
        return self._kept[key]

    def _seen(
        self, group: Group, dtype: torch.dtype, shape: Sequence[int]
    ) -> dict[str, torch.dtype]:
        probe, state = zeros(shape, dtype), State()
        for _ in range(1 if self.known is not None else 4):  # of others, states may come later
            with torch.no_grad():
                (state,) = self.run(frozen(group), [probe], [state])
        return {k: v.dtype for k, v in state.items() if is_elementwise(k, v, shape)}

    def loaded(self, key: str, value: Any, dtype: torch.dtype) -> Any:
        """Return a loaded state as torch has it afterwards: mostly in its parameter's dtype."""
        if key == "step" or self._keeps_dtypes or not isinstance(value, torch.Tensor):
            return value
        return value.to(dtype) if value.is_floating_point() and dtype.is_floating_point else value

    def refuses(self, n_dims: int) -> bool:
        """Whether the rule does not step parameters of so many dimensions."""
        return n_dims != 2 and self.known is getattr(O, "Muon", object)

    def adds_to_gradients(self, group: Group) -> bool:
        """Whether a step begins by adding a tensor to the gradient, a decayed weight or a momentum.
        On addends of ranks, torch adds a part of it on each, and sums then."""
        is_apart = group.get("decoupled_weight_decay") or issubclass(self.kind, torch.optim.AdamW)
        return bool(group.get("nesterov") or (group.get("weight_decay") and not is_apart))

    def may_flatten(self, group: Group, dtype: torch.dtype) -> bool:
        """Whether parameters of a group may be updated as one run, cut anywhere."""
        return self.elementwise and not group.get("fused") and dtype.itemsize >= 4


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a parameter to step in place of a real one, with a gradient."""
    probe = torch.zeros(shape, dtype=dtype, device="cpu")
    probe.grad = torch.zeros_like(probe)
    return probe


def tiny(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a small probe of parameters of a shape."""
    return tuple(min(size, 4) for size in shape)


def large(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a probe as large as the parameter, up to `LIKE_NUMEL` elements."""
    most = round(LIKE_NUMEL ** (1 / max(1, len(shape))))
    return tuple(min(size, most) for size in shape)


def frozen(group: Group) -> Group:
    """Return settings as they are now: tensors among them are changed in place by schedulers. Those
    on a device come to RAM, where threads that update read them in no order with compute."""
    return {key: _frozen(value) for key, value in group.items() if key != "params"}


def _frozen(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_frozen(v) for v in value)
    if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
        return value.cpu()
    return copied(value)


def kinds_of(group: Group) -> str:
    """Return the part of settings that decides which way a step goes: which numbers are zero."""
    return repr([(key, _kind(value)) for key, value in group.items() if key != "params"])


def _kind(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_kind(v) for v in value]
    return value != 0 if isinstance(value, (int, float)) else type(value).__name__


def is_elementwise(key: str, value: Any, shape: Sequence[int]) -> bool:
    """Return whether a state entry is one number per element of its parameter."""
    if key in SCALARS or not isinstance(value, torch.Tensor):
        return False
    return value.shape == tuple(shape)


def copied(value: Any) -> Any:
    """Return a value that nothing else writes to."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def same(first: Any, second: Any) -> bool:
    """Whether two values are of one kind and have the same bits."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        alike = first.shape == second.shape and first.dtype == second.dtype
        return alike and bytes_of(first) == bytes_of(second)
    if isinstance(first, np.ndarray):
        return bool(np.array_equal(first, second))
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(v, second[k]) for k, v in first.items())
    return bool(first == second) or repr(first) == repr(second)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bits of a tensor's elements in row-major order."""
    raw = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return raw.view(torch.uint8).cpu().numpy().tobytes()

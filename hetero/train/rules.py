"""Running a torch optimizer's own arithmetic on tensors that are not its parameters (floor 2).

The rule is torch's `step` of the user's class, run on a throw-away worker whose parameters are
pieces of the homes. Elementwise rules give the same bits on any cut of an index space. Fused
kernels and two-byte arithmetic depend on vector tails, and other rules on whole tensors: those run
on segments.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hetero import optim
from hetero.errors import ConfigError

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
BLOCK_SCALES = frozenset({"exp_avg_absmax", "exp_avg_sq_absmax"})  # of AdamW8bit, always fp32
SCALARS = frozenset({"step", "mu", "mu_product", "eta"}) | BLOCK_SCALES  # whatever their shape
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


class Rule:
    """The step of one optimizer's class and settings, to be called from any thread."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.kind = type(inner)
        self.elementwise = self.kind in ELEMENTWISE
        self._pattern = make_worker(inner)
        self._step = raw_step(self.kind)

    def run(
        self, group: Group, params: Sequence[torch.Tensor], states: Sequence[State]
    ) -> list[State]:
        """Step ``params`` by their ``grad`` as one group; return the states afterwards."""
        worker = make_worker(self._pattern)
        worker.param_groups = [{**group, "params": list(params)}]
        worker.state = defaultdict(dict, {p: s for p, s in zip(params, states, strict=True) if s})
        self._step(worker)
        return [dict(worker.state[p]) for p in params]

    def step_in_place(self, groups: list[Group], states: defaultdict[torch.Tensor, State]) -> None:
        """Step the parameters of ``groups`` themselves."""
        self._pattern.param_groups, self._pattern.state = groups, states
        try:
            self._step(self._pattern)
        finally:
            self._pattern.param_groups, self._pattern.state = [], defaultdict(dict)

    def refuses(self, n_dims: int) -> bool:
        """Whether the rule does not step parameters of so many dimensions."""
        return n_dims != 2 and self.kind.__name__ == "Muon"

    def may_flatten(self, group: Group, dtype: torch.dtype) -> bool:
        """Whether parameters of a group may be updated as one run, cut anywhere."""
        return self.elementwise and not group.get("fused") and dtype.itemsize >= 4


def tiny(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a parameter that is stepped to see what a rule keeps of such ones."""
    return tuple(min(size, 4) for size in shape)


def is_elementwise(key: str, value: Any, shape: Sequence[int]) -> bool:
    """Return whether a state entry is one number per element of its parameter."""
    return (
        isinstance(value, torch.Tensor)
        and key not in SCALARS
        and tuple(value.shape) == tuple(shape)
    )


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers whose step does not work parameter by parameter, by name."""
    kind = type(optimizer)
    if kind in (*ELEMENTWISE, *WHOLE_TENSOR):
        flagged = [f for g in optimizer.param_groups for f in ("differentiable",) if g.get(f)]
        if flagged:
            raise ConfigError(
                f"{kind.__name__}(differentiable=True) cannot be paged", advice="drop the flag"
            )
        return
    raise ConfigError(
        f"optimizer {kind.__name__} is not supported: its step is not known to work parameter by"
        " parameter",
        advice="use one of " + ", ".join(k.__name__ for k in (*ELEMENTWISE, *WHOLE_TENSOR)),
    )

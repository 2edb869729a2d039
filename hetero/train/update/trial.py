"""Trying an optimizer that is not known here: does it step its parameters one at a time? (floor 2)

Small parameters are stepped together, by a copy of the user's optimizer, and each alone, as the
update does it: fresh tensors every time, one parameter in the group, nothing but its own state.
Both have to give the same bits, at several scales of the gradients, in another order, with
gradients that are missing or not finite; and nothing else that a later step could read may have
changed. Any difference is refused, and the error names it.

[Note: ahead of the run]  Rules may go another way after many steps. One trial goes on a few steps
ahead of the run, so that such a step is refused before it is made.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import nn

from hetero.errors import ConfigError
from hetero.internals import DispatchMode
from hetero.train.model.binding import without_faults
from hetero.train.update.rules import (
    ELEMENTWISE,
    WHOLE_TENSOR,
    Group,
    Rule,
    State,
    bytes_of,
    copied,
    frozen,
    is_elementwise,
    kinds_of,
    make_worker,
    same,
    tiny,
)

STEPS = 6
OWN_METHODS = ("state_dict", "load_state_dict", "zero_grad")  # which hetero's optimizer would drop


class Course(NamedTuple):
    """How one trial goes."""

    scale: float = 1.0
    """Size of the gradients: a global norm may act on large ones only."""
    backwards: bool = False
    """Whether the parameters of each group come in the other order."""
    spoiled: bool = False
    """Whether a gradient is not finite: some rules then leave all parameters alone."""
    loaded: bool = False
    """Whether a state dict is loaded on the way, for which torch casts states to dtypes of
    parameters; a home keeps its own dtype."""


COURSES = (
    Course(),
    Course(scale=1e-9),
    Course(scale=1e9, backwards=True),
    Course(spoiled=True, backwards=True),
    Course(loaded=True),
)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot be stepped parameter by parameter; touches nothing of it."""
    rule = Rule(optimizer)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(
            f"{rule.kind.__name__}(differentiable=True) cannot be paged", advice="drop the flag"
        )
    if rule.known is None:
        _check_class(rule, optimizer)
        try_out(rule, optimizer, optimizer.param_groups)


class Trials:
    """The trials of one rule: one for every variety of settings that it is stepped with."""

    def __init__(self, rule: Rule, optimizer: torch.optim.Optimizer) -> None:
        self._rule = rule
        self._optimizer = optimizer
        self._passed = {_variety(optimizer.param_groups)}  # by `check_optimizer`
        self._ahead: _Trial | None = None  # [Note: ahead of the run]

    def admit(self, groups: Sequence[Group]) -> None:
        """Raise ConfigError if the next step cannot be made one parameter at a time."""
        if self._rule.known is not None:
            return
        variety = _variety(groups)
        if variety not in self._passed:
            try_out(self._rule, self._optimizer, groups)
            self._passed.add(variety)
        with _undrawn() as drawn:
            if self._ahead is None or not self._ahead.follow(groups):
                plans, apart = _plans(groups), _apart_from(self._optimizer)
                trial = _Trial(self._rule, self._optimizer, plans, torch.float32, COURSES[0], apart)
                trial.run(drawn)
                self._ahead = trial
            self._ahead.go_on(drawn)


Variety = tuple[bool, frozenset[str]]


def _variety(groups: Sequence[Group]) -> Variety:
    """Return whether there are several groups, and their kinds: these decide how steps go."""
    return len(groups) > 1, frozenset(kinds_of(_moving(group)) for group in groups)


def _check_class(rule: Rule, optimizer: torch.optim.Optimizer) -> None:
    for name in OWN_METHODS:
        if getattr(rule.kind, name) is not getattr(torch.optim.Optimizer, name):
            _refuse(rule, f"its {name}() is its own, and would not be called")
    for name, value in vars(optimizer).items():
        if isinstance(value, (nn.Module, torch.optim.Optimizer)):
            _refuse(rule, f"its attribute {name!r} is a {type(value).__name__}, which it may step")


def try_out(rule: Rule, optimizer: torch.optim.Optimizer, groups: Sequence[Group]) -> None:
    """Raise ConfigError if these groups' parameters cannot be stepped one at a time."""
    apart, plans = _apart_from(optimizer), _plans(groups)
    with without_faults():
        dtypes = {p.dtype for group in groups for p in group["params"]} | {torch.float32}
    with _undrawn() as drawn:
        for dtype in sorted(filter(_trains, dtypes), key=str):
            for course in COURSES:
                _Trial(rule, optimizer, plans, dtype, course, apart).run(drawn)


def _apart_from(optimizer: torch.optim.Optimizer) -> _Apart:
    with without_faults():
        return _Apart([p for group in optimizer.param_groups for p in group["params"]])


def _plans(groups: Sequence[Group]) -> list[Plan]:
    with without_faults():
        return [(group, _shapes(group)) for group in _few(groups)]


Plan = tuple[Group, tuple[tuple[int, ...], ...]]


def _few(groups: Sequence[Group]) -> list[Group]:
    """Return up to two groups of each kind of settings, which differ: one may rule both."""
    found: dict[str, dict[str, Group]] = {}
    for group in groups:
        alike = found.setdefault(kinds_of(group), {})
        if group["params"] and len(alike) < 2:
            alike[repr(frozen(group))] = group
    return [group for alike in found.values() for group in alike.values()]


def _shapes(group: Group) -> tuple[tuple[int, ...], ...]:
    return tuple(dict.fromkeys(tiny(p.shape) for p in group["params"]))[:3]


def _trains(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


class _Watched(nn.Parameter):
    """A parameter that notes reads of attributes that parameters do not have."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            self.__dict__.setdefault("asked", []).append(name)
        raise AttributeError(name)


class _Lone(NamedTuple):
    """A parameter that is stepped alone, and its double among others."""

    together: nn.Parameter
    value: torch.Tensor
    group: int
    state: State


class _Trial:
    """One course: the parameters together, and each alone."""

    def __init__(
        self,
        rule: Rule,
        optimizer: torch.optim.Optimizer,
        plans: Sequence[Plan],
        dtype: torch.dtype,
        course: Course,
        apart: _Apart,
    ) -> None:
        self._rule = rule
        self._apart = apart
        self._optimizer = optimizer
        self._course = course
        self._numbers = torch.Generator().manual_seed(0)
        self._together = _copy(rule, optimizer, apart.held)
        self._models = [group for group, _ in plans]
        self._counted: set[str] = set()  # settings that a step changes
        self._attributes = self._own_attributes()
        self._number = 0
        self._lone: list[_Lone] = []
        for group, shapes in plans:
            params = [self._param(shape, dtype) for shape in shapes * 2]
            params = params[::-1] if course.backwards else params
            self._together.param_groups.append({**_moving(group), "params": params})
        for number, group in enumerate(self._together.param_groups):
            for param in group["params"]:
                self._lone.append(_Lone(param, param.detach().clone(), number, {}))

    def _param(self, shape: Sequence[int], dtype: torch.dtype) -> nn.Parameter:
        return _Watched(self._draw(shape, dtype))

    def _draw(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        kind = torch.complex64 if dtype.is_complex else torch.float32
        numbers = torch.empty(tuple(shape), dtype=kind, device="cpu")
        return numbers.normal_(generator=self._numbers).to(dtype)

    def run(self, drawn: Callable[[], bool]) -> None:
        """Raise ConfigError at the first difference; ``drawn``: were random numbers drawn?"""
        while self._number < STEPS:
            if self._course.loaded and self._number == STEPS // 2:
                self._load()
            self.go_on(drawn)
        self._check_dtypes()

    def follow(self, groups: Sequence[Group]) -> bool:
        """Take the settings as they are now; False where the groups are others."""
        there = {id(group) for group in groups}
        if not there.issuperset(map(id, self._models)):
            return False
        for group, model in zip(self._together.param_groups, self._models, strict=True):
            now = _moving(model).items()
            group.update((key, value) for key, value in now if key not in self._counted)
        return len(groups) == 1 or len(self._models) > 1

    def go_on(self, drawn: Callable[[], bool]) -> None:
        """Make one more step of both."""
        with torch.inference_mode(False):
            self._make_gradients()
            self._number += 1
            before = [frozen(group) for group in self._together.param_groups]
            grads = [copied(one.together.grad) for one in self._lone]
            self._step_together()
            if self._own_attributes() != self._attributes:
                self._refuse("its step changes an attribute of the optimizer itself")
            if drawn():
                self._refuse("its step draws random numbers, in the order of the parameters")
            self._check_settings(before)
            for at, (one, grad) in enumerate(zip(self._lone, grads, strict=True)):
                if grad is not None:
                    state = self._step_alone(one, grad, before[one.group])
                    self._lone[at] = one = one._replace(state=state)
                self._compare(one)

    def _load(self) -> None:
        """Cast states as torch does when it loads them, and as `StateHomes.adopt` does."""
        for at, one in enumerate(self._lone):
            among, dtype = self._together.state[one.together], one.value.dtype
            for key, value in among.items():
                if isinstance(value, torch.Tensor) and key != "step":
                    among[key] = value.to(dtype)
            alone = {key: _loaded(key, value, one.value) for key, value in one.state.items()}
            self._lone[at] = one._replace(state=alone)

    def _make_gradients(self) -> None:
        """Give most parameters a gradient: each misses an early step, and all miss one."""
        number, early = self._number, self._number < STEPS
        for at, one in enumerate(self._lone):
            grad = self._draw(one.together.shape, one.together.dtype) * self._course.scale
            if self._course.spoiled and at == 0 and number == 2:
                grad.fill_(float("inf"))
            missing = early and number in (STEPS - 2, at % STEPS)
            one.together.grad = None if missing else grad

    def _step_together(self) -> None:
        given = [one.together.grad for one in self._lone]
        with self._told(), torch.enable_grad():
            self._rule.step_of(self._together)
        if any(one.together.grad is not grad for one, grad in zip(self._lone, given, strict=True)):
            self._refuse("its step replaces or drops gradients")
        asked = [name for one in self._lone for name in vars(one.together).get("asked", ())]
        if asked:  # updates step pieces of homes, which have no attributes
            self._refuse(f"its step asks parameters for an attribute {asked[0]!r} of the user's")

    def _step_alone(self, one: _Lone, grad: torch.Tensor, group: Group) -> State:
        """Step a parameter as an update does: a new tensor, with its state apart."""
        param = one.value.clone()
        param.grad = grad
        place = param.untyped_storage()._cdata
        state = {key: copied(value) for key, value in one.state.items()}
        with self._told(), torch.no_grad():
            (after,) = self._fresh().run(frozen(group), [param], [state])
        if param.untyped_storage()._cdata != place:
            self._refuse("its step gives parameters other memory, as p.data = ... does")
        self._check_state(one, after, param, grad)
        one.value.copy_(param)
        return after

    def _own_attributes(self) -> Any:
        return _shown({k: v for k, v in vars(self._together).items() if _is_own(k)})

    def _fresh(self) -> Rule:
        """Return the rule as it was before the trial."""
        return Rule(_copy(self._rule, self._optimizer, self._apart.held))

    def _check_state(
        self, one: _Lone, after: State, param: torch.Tensor, grad: torch.Tensor
    ) -> None:
        for key in one.state:
            if key not in after:
                self._refuse(f"its step drops the state {key!r}")
        places = [param.untyped_storage()._cdata, grad.untyped_storage()._cdata]
        for key, value in after.items():
            if isinstance(value, torch.Tensor):
                place = value.untyped_storage()._cdata
                if place in places:
                    self._refuse(f"its state {key!r} is a view of something else that it changes")
                places.append(place)
            elif not isinstance(value, (bool, int, float, complex, str, type(None))):
                self._refuse(f"its state {key!r} is a {type(value).__name__}")

    def _check_settings(self, before: Sequence[Group]) -> None:
        """Refuse a step that changes settings by what the parameters are."""
        for group, then in zip(self._together.param_groups, before, strict=True):
            stepped = any(param.grad is not None for param in group["params"])
            with self._told():
                after = self._fresh().settings_after(
                    {**then, "params": group["params"]}, stepped=stepped
                )
            for key in {*after, *group} - {"params"}:
                if not same(then.get(key), group.get(key)):
                    self._counted.add(key)
                if not same(after.get(key), group.get(key)):
                    self._refuse(f"its step changes the setting {key!r} by what the parameters are")

    def _compare(self, one: _Lone) -> None:
        among = self._together.state.get(one.together, {})
        numbers = same(one.together.detach(), one.value)
        if self._course.loaded and not (numbers and same(among, one.state)):
            self._refuse(
                f"its states are not {one.value.dtype}, which load_state_dict makes of them"
            )
        if not numbers or not same(among, one.state):
            self._refuse(
                "its step gives a parameter other numbers among others than alone, as where a norm"
                " of all gradients enters"
            )

    def _check_dtypes(self) -> None:
        """Refuse states of several dtypes: those with a number per element share a home."""
        found: dict[str, torch.dtype] = {}
        for one in self._lone:
            for key, value in one.state.items():
                shared = is_elementwise(key, value, one.value.shape)
                if shared and found.setdefault(key, value.dtype) is not value.dtype:
                    self._refuse(f"its state {key!r} has several dtypes")

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Refuse a step that raises: it is made without a closure, on dense gradients."""
        try:
            with self._apart:
                yield
        except ConfigError:
            raise
        except Exception as error:  # the user's code: whatever it raises is the reason
            after = " after load_state_dict" if self._course.loaded else ""
            words = f"a step of small tensors{after} raised {type(error).__name__}: {error}"
            _refuse(self._rule, words, error)

    def _refuse(self, reason: str) -> NoReturn:
        _refuse(self._rule, reason)


class _Apart(DispatchMode):
    """Keeps a trial off the model's own parameters."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.held = {id(p): p for p in params}
        self._places = {p.untyped_storage()._cdata for p in params}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            for one in value if isinstance(value, (list, tuple)) else (value,):
                dense = isinstance(one, torch.Tensor) and one.layout is torch.strided
                if dense and (id(one) in self.held or self._is_theirs(one)):
                    raise RuntimeError("it reaches parameters of the model past its param_groups")
        return func(*args, **(kwargs or {}))

    def _is_theirs(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._places


@contextmanager
def _undrawn() -> Iterator[Any]:
    """Yield a function that tells whether the block drew random numbers; restore generators."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def drawn() -> bool:
        now = torch.get_rng_state(), random.getstate(), np.random.get_state()
        return not all(same(a, b) for a, b in zip(before, now, strict=True))

    try:
        yield drawn
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


def _copy(
    rule: Rule, optimizer: torch.optim.Optimizer, held: dict[int, torch.Tensor]
) -> torch.optim.Optimizer:
    """Return an optimizer with copies of its attributes, but no parameters; ``held`` stay."""
    worker = make_worker(optimizer)
    own = {k: v for k, v in vars(worker).items() if _is_own(k)}
    try:
        copied = copy.deepcopy(own, {id(optimizer): optimizer, **held})
    except (TypeError, RuntimeError, NotImplementedError) as error:
        _refuse(rule, f"its attributes cannot be copied for a trial ({error})", error)
    worker.__dict__.update(copied)
    return worker


def _is_own(name: str) -> bool:
    """Whether an attribute is not one of every optimizer's, for parameters and hooks."""
    return name not in ("param_groups", "state") and not name.startswith("_optimizer_")


def _moving(group: Group) -> Group:
    """Return settings with a learning rate: with none, all steps look alike."""
    settings = frozen(group)
    lr = settings.get("lr")
    if isinstance(lr, (int, float, torch.Tensor)) and not lr:
        settings["lr"] = torch.full_like(lr, 0.01) if isinstance(lr, torch.Tensor) else 0.01
    return settings


def _shown(value: Any, depth: int = 4) -> Any:
    """Return a value's content, to be compared with its content later."""
    if isinstance(value, torch.Tensor):
        if isinstance(value, nn.Parameter):
            return id(value)  # of the model, which trains
        return id(value), value._version, bytes_of(value) if value.numel() < 64 else b""
    if isinstance(value, dict):
        return [(_shown(k, depth - 1), _shown(v, depth - 1)) for k, v in value.items()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [_shown(one, depth - 1) for one in value]
    if isinstance(value, (str, int, float, complex, bytes, type(None))):
        return repr(value)
    inside = depth > 0 and not callable(value) and hasattr(value, "__dict__")
    return id(value), _shown(vars(value), depth - 1) if inside else None


def _loaded(key: str, value: Any, param: torch.Tensor) -> Any:
    """Return a loaded state as `StateHomes.adopt` keeps it."""
    if key == "step" or not isinstance(value, torch.Tensor):
        return value
    cast = value.to(param.dtype) if value.is_floating_point() and _trains(param.dtype) else value
    return cast.to(value.dtype) if is_elementwise(key, value, param.shape) else cast


def _refuse(rule: Rule, reason: str, cause: Exception | None = None) -> NoReturn:
    name = rule.kind.__name__
    others = (
        f"{kind.__module__.removesuffix('.' + kind.__name__.lower())}.{kind.__name__}"
        for kind in (*ELEMENTWISE, *WHOLE_TENSOR)
        if kind.__name__.lower() != name.lower()
    )
    raise ConfigError(
        f"optimizer {name} is not supported: {reason}",
        advice="any optimizer is taken whose step() makes of each parameter, its gradient, its"
        " state and its group what it would make of them alone (clip gradients with"
        f" optimizer.clip_grad_norm_ or max_grad_norm=); {', '.join(others)} do",
    ) from cause

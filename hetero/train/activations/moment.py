"""The state that a unit's forward reads and writes, apart from its tensor arguments (floor 2).

A recomputed forward must find the same state: generators, autocast, torch's switches, the
attributes, buffers and containers of its modules, and the outside names that its code reads. Its
changes are then undone: a side effect happens once.

[Note: what code can reach]  Python does not list what a function reads. We follow the attributes of
the unit's modules, their classes and hooks, the objects that these and the arguments hold, and the
globals, closures and defaults of each function met, however far away. Code of installed packages is
assumed to keep no state outside its objects. A moment that met anything else, such as an iterator
or a lock, is not *whole*: trying such a unit could change it.
"""

from __future__ import annotations

import re
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from itertools import islice
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from hetero.internals import WEIGHTS_ONCE
from hetero.train.activations.reach import (
    CODE,
    Attributes,
    Reach,
    is_object,
    known_by_class,
    spaces_of,
)
from hetero.train.activations.state_kinds import (
    ARRAY,
    CELL,
    NAMES,
    SETTING,
    SMALL,
    SPACE,
    TABLE,
    Buffer,
    RandomSource,
    StateKind,
    absent,
    common_sources,
    contents,
    device_source,
    source_of,
    stand_in,
    switches,
)

TABLES = (dict, list, set, deque)  # and subclasses
PLAIN = frozenset((int, float, bool, str, bytes, type(None)))
MANY = 4096  # most entries of a container, or objects in all, to look at; no vocabulary is state
FEW = 32  # most modules in one held outside the unit
DEPTH = 3  # of nested containers and objects
STATELESS = ("torch", "transformers", "hetero", "logging")  # their objects keep no such state
CONSTANT = (  # code cannot change these in place, or has no reason to
    *(ModuleType, BuiltinFunctionType, Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.nn.Parameter),
    *(complex, frozenset, range, slice, np.generic, np.dtype, re.Pattern, PurePath),
    *(type(...), type(NotImplemented)),
)
PARTS = ("__func__", "__wrapped__", "__self__", "func", "args", "keywords", "fget", "fset", "fdel")
HOOKS = [name for name in vars(nn.modules.module) if re.fullmatch("_global_.*_hooks", name)]
TABLES_OF_HOOKS = frozenset(
    name for name, value in vars(nn.Module()).items() if isinstance(value, OrderedDict)
)
HOOKS_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
SHORT = frozenset((list, tuple, OrderedDict))
OWN = ("_parameters", "_buffers", "_modules")  # a module's tables


class Moment:
    """The state that a forward begins with, to be restored.

    Args:
        module: the owner of the forward.
        place: the device it computes on.
        reach: the names in the code of modules, looked up once.
        given: arguments that are not tensors; the forward may write to them.
    """

    def __init__(
        self, module: nn.Module, place: torch.device, reach: Reach, given: Sequence[Any] = ()
    ) -> None:
        self._reach = reach
        self._found: list[tuple[StateKind, Any, Any]] = []
        """(kind, holder, its state)."""
        self._empty: list[dict[Any, Any]] = []  # tables of hooks, empty then
        self._tuples: list[tuple[Any, ...]] = []  # that hold tensors
        self.params: list[nn.Parameter] = []
        """Those of its modules."""
        self._makes_weights_once = bool(getattr(*WEIGHTS_ONCE))
        self._tensors: dict[int, Buffer] = {}
        self._sources = [*common_sources(), *device_source(place)]
        self._seen: set[int] = set()
        self.is_whole = True
        """Whether all state that the code may change was recorded."""
        owners = (module, *(value for value in given if isinstance(value, nn.Module)))
        parts = {id(part): part for owner in owners for part in owner.modules()}
        self._seen.update(parts)
        for part in parts.values():
            self._look_at_module(part)
        for value in given:
            self._look_at(value, DEPTH)
        for name in HOOKS:
            for hook in vars(nn.modules.module)[name].values():
                self._look_at(hook, DEPTH)
        for switch in switches():
            self._note(SETTING, switch)
        self._casts = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", place.type))
            if torch.amp.is_autocast_available(kind)
        )
        self._caches_casts = torch.is_autocast_cache_enabled()
        self._drawn = [(source, source.get()) for source in self._sources]
        self._asks = [param.requires_grad for param in self.params]

    # -- recording -------------------------------------------------------------------------------

    def _note(self, kind: StateKind, holder: Any) -> Any:
        """Record a holder's state, and return it."""
        state = kind.read(holder)
        self._found.append((kind, holder, state))
        return state

    def _look_at_module(self, module: nn.Module) -> None:
        for name, value in self._note(SPACE, vars(module)).items():
            if name in OWN:
                self._note(SPACE, value)
                for tensor in value.values() if name == "_buffers" else ():
                    self._look_at(tensor, DEPTH)
            elif name in TABLES_OF_HOOKS and not value:
                self._empty.append(value)
            elif type(value) not in PLAIN:
                self._look_at(value, DEPTH)
        self.params.extend(p for p in module._parameters.values() if p is not None)
        self._look_at_class(type(module))

    def _look_at_class(self, kind: type) -> None:
        """Record the attributes of a user's class, and the state that its methods reach."""
        if id(kind) in self._seen:
            return
        self._seen.add(id(kind))
        for base, functions in self._reach.of(kind):
            self._look_at_attributes(Attributes(base), DEPTH)
            for function in functions:
                self._look_at_code(function, DEPTH)

    def _look_at_attributes(self, space: MutableMapping[str, Any], depth: int) -> None:
        if space or isinstance(space, dict):
            for value in self._note(SPACE, space).values():
                self._look_at(value, depth)

    def _look_at_code(self, value: Any, depth: int) -> None:
        """Record the state that a function, or a wrapper of one, reads outside its frame."""
        if not isinstance(value, FunctionType):
            parts = [getattr(value, name, None) for name in PARTS]
            parts.append(value() if isinstance(value, weakref.ref) else None)
            for part in parts:
                self._look_at(part, depth)
                self.is_whole &= not _has_tensors(part)  # no copy could be lent there
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._look_at(getattr(value, "__wrapped__", None), depth)
        reached = self._reach.named(value)
        for names in reached:
            for found in self._note(NAMES, names).values():
                self._look_at(found, depth)
        for cell in (value.__closure__ or ()) if reached else ():
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                self._look_at(self._note(CELL, cell), depth)
        for default in (value.__defaults__, value.__kwdefaults__, value.__dict__):
            if default and reached:
                self._look_at(default, depth)
                self.is_whole &= not _has_tensors(default)

    def _look_at(self, value: Any, depth: int) -> None:
        """Record the parts of a value that code may change in place."""
        kind: Any = type(value)
        if kind in PLAIN or value is absent or id(value) in self._seen:
            return
        if kind is torch.Tensor:
            if not value.requires_grad and id(value) not in self._tensors:
                self._tensors[id(value)] = Buffer(value)
        elif issubclass(kind, CODE):
            self._look_at_code(value, depth)
        elif issubclass(kind, type):
            self._look_at_class(value)
        elif _is_constant(kind):
            return
        elif not depth or len(self._seen) > MANY:
            self.is_whole = False
        else:
            self._seen.add(id(value))
            self._look_into(value, kind, depth)

    def _look_into(self, value: Any, kind: type, depth: int) -> None:
        if isinstance(value, TABLES):
            self._look_at_table(value, depth)
        elif isinstance(value, tuple):
            for inner in value:
                self._look_at(inner, depth - 1)
            if _has_tensors(value):
                self._tuples.append(value)
        elif isinstance(value, np.ndarray):
            if value.nbytes > SMALL or value.dtype.hasobject:
                self.is_whole = False
            elif value.flags.writeable:
                self._note(ARRAY, value)
        elif (source := source_of(value)) is not None:
            self._sources.append(source)
        elif isinstance(value, nn.Module):
            self._look_at_other(value)
        elif is_object(value):
            for space in spaces_of(value):
                self._look_at_attributes(space, depth - 1)
            self._look_at_class(kind)
        elif (kind.__module__ or "").partition(".")[0] not in STATELESS:
            self.is_whole = False

    def _look_at_table(self, table: Any, depth: int) -> None:
        if len(table) > MANY:
            self.is_whole = False
            return
        self._note(TABLE, table)
        for inner in table.values() if isinstance(table, dict) else table:
            self._look_at(inner, depth - 1)
        if type(table).__module__ not in ("builtins", "collections") and is_object(table):
            self._look_at_attributes(vars(table), depth - 1)
            self._look_at_class(type(table))

    def _look_at_other(self, module: nn.Module) -> None:
        """Record the state of a module outside the unit; a whole model is too much."""
        parts = list(islice(module.modules(), FEW + 1))
        if len(parts) > FEW:
            self.is_whole = False
            return
        for part in parts:
            if part is module or id(part) not in self._seen:
                self._seen.add(id(part))
                self._look_at_module(part)

    # -- after the forward -----------------------------------------------------------------------

    def close(self) -> None:
        """End the forward: forget unused generators, and copies of buffers not written."""
        self._drawn = [(s, state) for s, state in self._drawn if not s.same(state, s.get())]
        for buffer in self._tensors.values():
            buffer.close()

    def is_lost(self) -> bool:
        """Whether others have written tensors since, of which there is no copy."""
        return any(buffer.is_lost for buffer in self._tensors.values())

    def has_drawn(self) -> bool:
        """Whether any generator was drawn from since."""
        return any(not source.same(state, source.get()) for source, state in self._drawn)

    def is_as(self, later: Moment) -> bool:
        """Whether all state is in a later moment of the same code as in this one, to the object;
        False where a part of it is not recorded. Neither may be closed."""
        pairs = zip(self._found, later._found, strict=False)
        return (
            (self.is_whole and later.is_whole and len(self._found) == len(later._found))
            and all(_unchanged(then[2], now[2]) for then, now in pairs)
            and self._casts == later._casts
            and self._tensors.keys() == later._tensors.keys()
            and not any(buffer.is_written() for buffer in self._tensors.values())
            and not self.has_drawn()
        )

    def path(self) -> list[Any]:
        """Return a key of the way through the unit's code: its modules' switches and hooks, and
        whether a weight that is made of others is made once (`parametrize.cached`)."""
        found: list[Any] = [self._casts, self._makes_weights_once]
        for how, _, values in self._found:
            for name, value in values.items() if how is SPACE else ():
                kind = type(value)
                if kind is bool or kind is str or value is None:
                    found.append((name, value))
                elif kind in SHORT and value and len(value) <= 8:
                    found.append((name, _said(value)))
        return found

    # -- once more -------------------------------------------------------------------------------

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore the forward's state for a block, and the present state after it.

        Copies stand in for buffers and other tensors of modules, since they may be written.
        """
        now = [(kind, holder, kind.read(holder)) for kind, holder, _ in self._found]
        now += [(TABLE, table, contents(table)) for table in self._empty if table]
        # the tables are held: another one must not come to lie where one of them was
        hooks = {id(table): (table, contents(table)) for table in self._hooks_of_parameters()}
        after = [(source, source.get()) for source, _ in self._drawn]
        lent: dict[int, Any] = {key: buffer.copy() for key, buffer in self._tensors.items()}
        lent.update([(id(value), stand_in(value, lent)) for value in self._tuples])
        try:
            self._put_back([(kind, of, kind.lend(then, lent)) for kind, of, then in self._found])
            _draw_from(self._drawn)
            with self._casting(), self._asking():
                yield
        finally:
            self._put_back(now)
            for table in self._hooks_of_parameters():
                _, before = hooks.get(id(table), (table, ()))
                if len(table) != len(before):
                    TABLE.write(table, before)
            _draw_from(after)

    def _put_back(self, states: Sequence[tuple[StateKind, Any, Any]]) -> None:
        for table in filter(None, self._empty):
            table.clear()
        for kind, holder, state in states:
            kind.write(holder, state)

    @contextmanager
    def _casting(self) -> Iterator[None]:
        caches = self._caches_casts
        with ExitStack() as stack:
            for kind, enabled, dtype in self._casts:
                cast = torch.autocast(kind, dtype, enabled=enabled, cache_enabled=caches)
                stack.enter_context(cast)
            yield

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Let parameters that were frozen or thawed since ask for gradients as they did: a graph
        saves by that. What they get is dropped as torch does, which asks them later."""
        pairs = zip(self.params, self._asks, strict=True)
        changed = [(param, asks) for param, asks in pairs if param.requires_grad is not asks]
        for param, asks in changed:
            param.requires_grad_(asks)
        try:
            yield
        finally:
            for param, asks in changed:
                param.requires_grad_(not asks)

    def _hooks_of_parameters(self) -> Iterator[dict[int, Any]]:
        for param in self.params:
            for name in HOOKS_OF_PARAMETERS:
                if table := getattr(param, name):
                    yield table


def _unchanged(then: Any, now: Any) -> bool:
    """Whether a state is what it was, part by part."""
    if then is now:
        return True
    kind = type(then)
    if kind is not type(now):
        return False
    if kind is dict:
        return list(then) == list(now) and all(_unchanged(then[key], now[key]) for key in then)
    if kind in (list, tuple):
        return len(then) == len(now) and all(map(_unchanged, then, now))
    if kind is np.ndarray:
        return bool(np.array_equal(then, now))
    return kind in (*PLAIN, torch.dtype) and bool(then == now)


def _draw_from(sources: Sequence[tuple[RandomSource, Any]]) -> None:
    for source, state in sources:
        source.set(state)


def _said(values: Any) -> Any:
    """Return a short container's part of a path: its strings and flags, or its length."""
    if isinstance(values, dict):
        return len(values)
    return tuple(v for v in values if v is None or type(v) in (bool, str))


@known_by_class
def _is_constant(kind: type) -> bool:
    return issubclass(kind, CONSTANT)


def _has_tensors(value: Any) -> bool:
    """Whether a value is a tensor without gradient, or a tuple that holds one."""
    if isinstance(value, tuple):
        return any(_has_tensors(inner) for inner in value)
    return type(value) is torch.Tensor and not value.requires_grad

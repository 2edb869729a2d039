"""What a unit's forward reads and writes beside the tensors it is given, as it stood (floor 2).

A forward that is computed again has to find what it found: generators, autocast, torch's own
switches, the attributes, buffers and containers of its modules, and the names outside of them that
its code reads. What it changes then is put back: a side effect happens once.

[Note: what code can reach]  Python has no list of what a function reads. Followed are the
attributes of the unit's modules, of their classes and hooks, what these and the arguments hold, and
the globals, closures and defaults of each function that is met, far as it may lie. Code of
installed packages is taken to keep no state outside of its objects. A moment that met something
else, as an iterator or a lock, is not *whole*: to try such a unit could change it.
"""

from __future__ import annotations

import functools
import operator
import random
import re
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from itertools import islice
from pathlib import Path, PurePath
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from hetero.device import accelerator_rng, set_accelerator_rng

TABLES = (dict, list, set, deque)  # and what derives from them
PLAIN = frozenset((int, float, bool, str, bytes, type(None)))
MANY = (
    4096  # entries of a container, or objects in all, that are looked at; a vocabulary is no state
)
FEW = 32  # modules of one that is held outside of the unit
DEPTH = 3  # containers and objects inside each other
SMALL = 2**20  # bytes of a buffer on a device that are kept without asking whether it was written
LIBRARIES = ("torch", "transformers", "numpy", "hetero", *sys.stdlib_module_names)
STATELESS = ("torch", "transformers", "hetero", "logging")  # whose objects keep no such state
HOUSE = str(Path(__file__).parents[2])
CONSTANT = (  # what code cannot change in place, or has no reason to
    *(ModuleType, BuiltinFunctionType, Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.nn.Parameter),
    *(complex, frozenset, range, slice, np.generic, np.dtype, re.Pattern, PurePath),
    *(type(...), type(NotImplemented)),
)
CODE = (
    *(FunctionType, MethodType, functools.partial, functools.partialmethod, weakref.ref),
    *(staticmethod, classmethod, property, functools.cached_property),
    type(functools.lru_cache(lambda: None)),
)
PARTS = ("__func__", "__wrapped__", "__self__", "func", "args", "keywords", "fget", "fset", "fdel")
HOOKS = [name for name in vars(nn.modules.module) if re.fullmatch("_global_.*_hooks", name)]
TABLES_OF_HOOKS = frozenset(
    name for name, value in vars(nn.Module()).items() if isinstance(value, OrderedDict)
)
HOOKS_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
SHORT = frozenset((list, tuple, OrderedDict))
OWN = ("_parameters", "_buffers", "_modules")  # of a module's attributes, the tables
_absent: Any = object()


class RandomSource(NamedTuple):
    """A generator of random numbers."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]


class Switch(NamedTuple):
    """One of torch's process-wide settings that choose arithmetic."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]


class Moment:
    """The state that a forward begins with, to be had again.

    Args:
        module: whose forward it is.
        place: the device it computes on.
        reach: what the code of the modules names, which is looked up once.
        given: arguments that are no tensors: objects that it may write to.
    """

    def __init__(
        self, module: nn.Module, place: torch.device, reach: Reach, given: Sequence[Any] = ()
    ) -> None:
        self._place = place
        self._reach = reach
        self._spaces: list[tuple[MutableMapping[Any, Any], dict[Any, Any]]] = []
        self._tables: list[tuple[Any, Any]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._names: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._empty: list[dict[Any, Any]] = []  # tables of hooks
        self._tuples: list[tuple[Any, ...]] = []  # that have tensors
        self._params: list[nn.Parameter] = []
        self._arrays: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        self._tensors: dict[int, Buffer] = {}
        self._generators: dict[int, RandomSource] = {}
        self._seen: set[int] = set()
        self.is_whole = True
        """Whether all that the code may change was taken down."""
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
        self._switches = [(switch, switch.get()) for switch in _switches()]
        self._casts = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", place.type))
            if torch.amp.is_autocast_available(kind)
        )
        self._caches_casts = torch.is_autocast_cache_enabled()
        self._drawn = [(source, source.get()) for source in self._sources()]

    # -- what there is ---------------------------------------------------------------------------

    def _look_at_module(self, module: nn.Module) -> None:
        space = vars(module)
        self._spaces.append((space, dict(space)))
        for name, value in space.items():
            if name in OWN:
                self._spaces.append((value, dict(value)))
                for tensor in value.values() if name == "_buffers" else ():
                    self._look_at(tensor, DEPTH)
            elif name in TABLES_OF_HOOKS and not value:
                self._empty.append(value)
            elif type(value) not in PLAIN:
                self._look_at(value, DEPTH)
        self._params.extend(p for p in module._parameters.values() if p is not None)
        self._look_at_class(type(module))

    def _look_at_class(self, kind: type) -> None:
        """Note the attributes of a class of the user's, and what its methods reach."""
        if id(kind) in self._seen:
            return
        self._seen.add(id(kind))
        for base, functions in self._reach.of(kind):
            attributes = Attributes(base)
            self._look_at_attributes(attributes, DEPTH)
            for function in functions:
                self._look_at_code(function, DEPTH)

    def _look_at_attributes(self, space: MutableMapping[str, Any], depth: int) -> None:
        then = dict(space)
        if then or isinstance(space, dict):
            self._spaces.append((space, then))
        for value in then.values():
            self._look_at(value, depth)

    def _look_at_code(self, value: Any, depth: int) -> None:
        """Note what a function, or what stands for one, reads outside of its own frame."""
        if not isinstance(value, FunctionType):
            parts = [getattr(value, name, None) for name in PARTS]
            parts.append(value() if isinstance(value, weakref.ref) else None)
            for part in parts:
                self._look_at(part, depth)
                self.is_whole &= not _has_tensors(part)  # which could not be lent there
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._look_at(getattr(value, "__wrapped__", None), depth)
        reached = self._reach.named(value)
        for space, names in reached:
            then = {name: space.get(name, _absent) for name in names}
            self._names.append((space, then))
            for found in then.values():
                self._look_at(found, depth)
        for cell in (value.__closure__ or ()) if reached else ():
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                self._cells.append((cell, _content(cell)))
                self._look_at(_content(cell), depth)
        for default in (value.__defaults__, value.__kwdefaults__, value.__dict__):
            if default and reached:
                self._look_at(default, depth)
                self.is_whole &= not _has_tensors(default)

    def _look_at(self, value: Any, depth: int) -> None:
        """Note what a value holds that code may change in place."""
        kind: Any = type(value)
        if kind in PLAIN or value is _absent or id(value) in self._seen:
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
        """Note what a container, a generator or an object holds."""
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
                self._arrays.append((value, value.copy()))
        elif (source := _source_of(value)) is not None:
            self._generators[id(value)] = source
        elif isinstance(value, nn.Module):
            self._look_at_other(value)
        elif _is_object(value):
            for space in _spaces_of(value):
                self._look_at_attributes(space, depth - 1)
            self._look_at_class(kind)
        elif (kind.__module__ or "").partition(".")[0] not in STATELESS:
            self.is_whole = False

    def _look_at_table(self, table: Any, depth: int) -> None:
        if len(table) > MANY:
            self.is_whole = False
            return
        self._tables.append((table, _copy(table)))
        for inner in table.values() if isinstance(table, dict) else table:
            self._look_at(inner, depth - 1)
        if type(table).__module__ not in ("builtins", "collections") and _is_object(table):
            self._look_at_attributes(vars(table), depth - 1)
            self._look_at_class(type(table))

    def _look_at_other(self, module: nn.Module) -> None:
        """Note the state of a module that is none of the unit's; a whole model is too much."""
        parts = list(islice(module.modules(), FEW + 1))
        if len(parts) > FEW:
            self.is_whole = False
            return
        for part in parts:
            if part is module or id(part) not in self._seen:
                self._seen.add(id(part))
                self._look_at_module(part)

    def _sources(self) -> Iterator[RandomSource]:
        """Yield every generator that the forward may draw from."""
        place = self._place
        yield RandomSource(random.getstate, random.setstate, operator.eq)
        yield RandomSource(np.random.get_state, np.random.set_state, _same_state)
        yield RandomSource(torch.get_rng_state, torch.set_rng_state, _same_bytes)
        if accelerator_rng(place) is not None:
            get, put = functools.partial(accelerator_rng, place), set_accelerator_rng
            yield RandomSource(get, functools.partial(put, place), _same_bytes)
        yield from self._generators.values()

    # -- after the forward -----------------------------------------------------------------------

    def close(self) -> None:
        """The forward is done: forget generators that were not drawn from, and copies of buffers
        that were not written."""
        self._drawn = [(s, state) for s, state in self._drawn if not s.same(state, s.get())]
        for buffer in self._tensors.values():
            buffer.close()

    def has_drawn(self) -> bool:
        """Whether any generator moved on since."""
        return any(not source.same(state, source.get()) for source, state in self._drawn)

    def path(self) -> list[Any]:
        """Return what tells one way through the unit's code from another: the switches among the
        attributes of its modules, and their hooks."""
        found: list[Any] = [self._casts]
        for _, values in self._spaces:
            for name, value in values.items():
                kind = type(value)
                if kind is bool or kind is str or value is None:
                    found.append((name, value))
                elif kind in SHORT and value and len(value) <= 8:
                    found.append((name, _told(value)))
        return found

    # -- once more -------------------------------------------------------------------------------

    @contextmanager
    def again(self) -> Iterator[None]:
        """Let a block find what the forward found; afterwards all stands as it does now.

        Copies stand in for buffers and for other tensors that modules have, since they may be
        written.
        """
        now = [(space, dict(space)) for space, _ in self._spaces]
        tables = [(table, _copy(table)) for table, _ in self._tables]
        cells = [(cell, _content(cell)) for cell, _ in self._cells]
        names = [(space, {n: space.get(n, _absent) for n in then}) for space, then in self._names]
        arrays = [(array, array.copy()) for array, _ in self._arrays]
        switches = [(switch, switch.get()) for switch, _ in self._switches]
        after = [(source, source.get()) for source, _ in self._drawn]
        hooks = [(table, _copy(table)) for table in self._hooks_of_parameters()]
        tables += [(table, _copy(table)) for table in self._empty if table]
        lent: dict[int, Any] = {key: buffer.copy() for key, buffer in self._tensors.items()}
        lent.update([(id(value), _lend(value, lent)) for value in self._tuples])
        try:
            for space, then in self._spaces:
                _put(space, _with(then, lent))
            for table in filter(None, self._empty):
                table.clear()
            for table, was in self._tables:
                _refill(table, _with(was, lent))
            for cell, value in self._cells:
                _fill(cell, lent.get(id(value), value))
            for outside, then in self._names:
                _assign(outside, _with(then, lent))
            for array, then_ in self._arrays:
                np.copyto(array, then_)
            _set(_changed(self._switches))
            _set(self._drawn)
            with ExitStack() as stack:
                for kind, enabled, dtype in self._casts:
                    cast = torch.autocast(
                        kind, dtype, enabled=enabled, cache_enabled=self._caches_casts
                    )
                    stack.enter_context(cast)
                yield
        finally:
            for space, values in now:
                _put(space, values)
            for table in filter(None, self._empty):
                table.clear()
            for table, is_now in (*tables, *self._new_hooks(hooks)):
                _refill(table, is_now)
            for cell, value in cells:
                _fill(cell, value)
            for outside, then in names:
                _assign(outside, then)
            for array, then_ in arrays:
                np.copyto(array, then_)
            _set(_changed(switches))
            _set(after)

    def _hooks_of_parameters(self) -> Iterator[dict[int, Any]]:
        for param in self._params:
            for name in HOOKS_OF_PARAMETERS:
                if table := getattr(param, name):
                    yield table

    def _new_hooks(
        self, before: Sequence[tuple[dict[int, Any], Any]]
    ) -> Iterator[tuple[dict[int, Any], Any]]:
        """Yield the hooks of parameters that have others now, with what they had."""
        had = {id(table): hooks for table, hooks in before}
        for table in self._hooks_of_parameters():
            if len(table) != len(had.get(id(table), ())):
                yield table, had.get(id(table), ())


class Attributes(MutableMapping[str, Any]):
    """Attributes that lie in no dictionary: the data of a class, or an object's slots."""

    def __init__(self, owner: Any, slots: Sequence[str] = ()) -> None:
        self._owner = owner
        self._slots = slots
        self._kind: Any = type if isinstance(owner, type) else object

    def __iter__(self) -> Iterator[str]:
        if self._slots:
            return (name for name in self._slots if hasattr(self._owner, name))
        return (name for name, value in vars(self._owner).items() if _is_data(name, value))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._owner, name) if self._slots else vars(self._owner)[name]
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._kind.__setattr__(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        self._kind.__delattr__(self._owner, name)


def _is_data(name: str, value: Any) -> bool:
    """Whether an entry of a class is state, and neither code nor Python's own."""
    return not (name.startswith(("__", "_abc_")) or hasattr(type(value), "__get__"))


def _spaces_of(value: Any) -> Iterator[MutableMapping[str, Any]]:
    """Yield where an object has its attributes."""
    if hasattr(value, "__dict__"):
        yield vars(value)
    kind: Any = type(value)
    if slots := _slots_of(kind):
        yield Attributes(value, slots)


@functools.cache
def _slots_of(kind: type) -> tuple[str, ...]:
    members = (vars(base).items() for base in kind.__mro__)
    return tuple(n for of in members for n, v in of if isinstance(v, MemberDescriptorType))


class Buffer:
    """A tensor that a module has, as it was before a forward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._before: torch.Tensor | None = tensor.clone()
        self._version = _version(tensor)

    def close(self) -> None:
        """Forget the copy where the forward did not write the tensor.

        On a CPU its bits say so: versions do not see what is written through ``.data``. To ask a
        device for bits would stop it: there a small copy stays.
        """
        tensor = self._tensor
        if _version(tensor) != self._version:
            return
        if tensor.device.type in ("cpu", "meta"):
            if _same_bits(self._before, tensor):
                self._before = None
        elif tensor.layout is not torch.strided or tensor.is_nested or tensor.nbytes > SMALL:
            self._before = None

    def copy(self) -> torch.Tensor:
        """Return a tensor of the forward's value that may be written."""
        return (self._tensor if self._before is None else self._before).clone()


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _same_bits(first: torch.Tensor | None, second: torch.Tensor) -> bool:
    if first is None or first.layout is not torch.strided or first.is_nested:
        return first is None
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    plain = (t.resolve_conj().resolve_neg() for t in (first, second))
    one, other = (t.contiguous().view(-1).view(torch.uint8) for t in plain)
    return second.is_meta or bool(np.array_equal(one.numpy(), other.numpy()))


def _put(space: MutableMapping[Any, Any], values: dict[Any, Any]) -> None:
    """Let a table have these entries, in place."""
    if _is_same(space, values):
        return
    for name, value in values.items():
        if space.get(name, _absent) is not value:
            space[name] = value
    for name in [name for name in space if name not in values]:
        del space[name]


def _is_same(space: MutableMapping[Any, Any], values: dict[Any, Any]) -> bool:
    same = len(space) == len(values) and all(map(operator.is_, space.values(), values.values()))
    return same and space.keys() == values.keys()


def _copy(table: Any) -> Any:
    """Return a container's contents in a plain one."""
    if not table:
        return ()
    return dict(table) if isinstance(table, dict) else list(table)


def _refill(table: Any, values: Any) -> None:
    """Let a container have these contents, in place and in their order."""
    if not (table or values):
        return
    if isinstance(table, dict):
        _put(table, dict(values))
        if list(table) != list(values):
            table.clear()
            table.update(values)
    elif isinstance(table, list):
        list.__setitem__(table, slice(None), values)
    else:
        table.clear()
        table.update(values) if isinstance(table, set) else table.extend(values)


def _fill(cell: CellType, value: Any) -> None:
    """Let a closure's variable have a value, or none."""
    if value is not _absent:
        cell.cell_contents = value
    elif _content(cell) is not _absent:
        del cell.cell_contents


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the name has no value yet
        return _absent


def _assign(space: dict[str, Any], values: dict[str, Any]) -> None:
    """Let some names have these values, or none."""
    for name, value in values.items():
        if value is _absent:
            space.pop(name, None)
        elif space.get(name, _absent) is not value:
            space[name] = value


def _with(table: Any, lent: dict[int, Any]) -> Any:
    """Return a container's contents with copies in place of tensors, and of tuples of them."""
    values = table.values() if isinstance(table, dict) else table
    if not lent or lent.keys().isdisjoint(map(id, values)):
        return table
    if isinstance(table, dict):
        return {k: lent.get(id(v), v) for k, v in table.items()}
    return [lent.get(id(v), v) for v in table]


def _lend(value: Any, lent: dict[int, Any]) -> Any:
    """Return what stands in for a tensor, or for a tuple that has it."""
    if not isinstance(value, tuple):
        return lent.get(id(value), value)
    return tuple.__new__(type(value), [_lend(inner, lent) for inner in value])


@functools.cache
def _is_constant(kind: type) -> bool:
    return issubclass(kind, CONSTANT)


def _has_tensors(value: Any) -> bool:
    """Whether a tensor stands where no other can be put in its place."""
    if isinstance(value, tuple):
        return any(_has_tensors(inner) for inner in value)
    return type(value) is torch.Tensor and not value.requires_grad


def _set(values: Sequence[tuple[Any, Any]]) -> None:
    for one, value in values:
        one.set(value)


def _changed(switches: Sequence[tuple[Switch, Any]]) -> list[tuple[Switch, Any]]:
    return [(switch, value) for switch, value in switches if switch.get() != value]


def _told(values: Any) -> Any:
    """Return what a short container says of a path: its words, or how many hooks it has."""
    if isinstance(values, dict):
        return len(values)
    return tuple(v for v in values if v is None or type(v) in (bool, str))


def _source_of(value: Any) -> RandomSource | None:
    """Return a generator object's source; None for any other object."""
    if isinstance(value, torch.Generator):
        return RandomSource(value.get_state, value.set_state, _same_bytes)
    if isinstance(value, np.random.RandomState):
        return RandomSource(value.get_state, value.set_state, _same_state)
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        get, put = lambda: bits.state, lambda state: setattr(bits, "state", state)
        return RandomSource(get, put, lambda a, b: repr(a) == repr(b))
    if isinstance(value, random.Random):
        return RandomSource(value.getstate, value.setstate, operator.eq)
    return None


def _same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool(np.array_equal(first.numpy(), second.numpy()))


def _same_state(first: Any, second: Any) -> bool:
    return bool(np.array_equal(first[1], second[1]) and first[2:] == second[2:])


def _is_object(value: Any) -> bool:
    """Whether a value is an object of attributes whose class is not a library's."""
    kind: Any = type(value)
    if (kind.__module__ or "").partition(".")[0] in ("torch", "transformers", "numpy", "hetero"):
        return False
    return hasattr(value, "__dict__") or bool(_slots_of(kind))


Names = tuple[dict[str, Any], tuple[str, ...]]


class Reach:
    """What the code of the user's classes and functions names, which is looked up once."""

    def __init__(self) -> None:
        self._of: dict[type, tuple[tuple[type, tuple[Any, ...]], ...]] = {}
        self._named: dict[CodeType, tuple[Names, ...]] = {}

    def of(self, kind: type) -> tuple[tuple[type, tuple[Any, ...]], ...]:
        """Return the classes of the user's that a class is made of, and their code."""
        found = self._of.get(kind)
        if found is None:
            bases = [base for base in kind.__mro__ if not _is_of_a_library(base)]
            found = tuple((base, tuple(_code_of(base))) for base in bases)
            self._of[kind] = found
        return found

    def named(self, function: FunctionType) -> tuple[Names, ...]:
        """Return the globals that a function names, and what it names of modules of the user's."""
        found = self._named.get(function.__code__)
        if found is None and is_trusted(function):
            found = self._named[function.__code__] = ()
        if found is None:
            names = tuple(dict.fromkeys(_names_in(function.__code__)))
            spaces = [function.__globals__]
            spaces += [
                vars(value)
                for name in names
                if isinstance(value := function.__globals__.get(name), ModuleType)
                and not _is_library(value.__name__, getattr(value, "__file__", None) or "")
            ]
            found = tuple((space, _own_names(space, names)) for space in spaces)
            self._named[function.__code__] = found
        return found


def _own_names(space: dict[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    """Return the names that are, or may become, state: neither modules nor a library's code."""

    def is_state(value: Any) -> bool:
        if isinstance(value, type):
            return not _is_of_a_library(value)
        if isinstance(value, FunctionType):
            return not is_trusted(value)
        return not isinstance(value, (ModuleType, BuiltinFunctionType))

    return tuple(name for name in names if name in space and is_state(space[name]))


def _code_of(kind: type) -> Iterator[Any]:
    """Yield the functions of a class that a forward may call."""
    for name, value in vars(kind).items():
        made = name == "__init__" and issubclass(kind, nn.Module)
        if isinstance(value, CODE) and not made:
            yield value


def _is_of_a_library(kind: type) -> bool:
    home = kind.__module__ or ""
    return _is_library(home, getattr(sys.modules.get(home), "__file__", None) or "")


def is_trusted(function: FunctionType) -> bool:
    """Whether a function is a package's, and not of the program that trains."""
    return _is_library("", function.__code__.co_filename) or (
        _is_library(function.__module__ or "", "") and not hasattr(function, "__wrapped__")
    )


def _is_library(name: str, path: str) -> bool:
    installed = "site-packages" in path or "dist-packages" in path or path.startswith(HOUSE)
    return installed or name.partition(".")[0] in LIBRARIES


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


@functools.cache
def _switches() -> tuple[Switch, ...]:
    """Return torch's settings that choose between ways to compute the same."""
    sdp, cudnn = torch.backends.cuda, torch.backends.cudnn
    found = [
        Switch(sdp.flash_sdp_enabled, sdp.enable_flash_sdp),
        Switch(sdp.mem_efficient_sdp_enabled, sdp.enable_mem_efficient_sdp),
        Switch(sdp.math_sdp_enabled, sdp.enable_math_sdp),
        Switch(sdp.cudnn_sdp_enabled, sdp.enable_cudnn_sdp),
        Switch(torch.get_default_dtype, torch.set_default_dtype),
        Switch(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        Switch(_deterministic, _set_deterministic),
    ]
    for name in ("enabled", "benchmark", "deterministic", "allow_tf32"):
        found.append(
            Switch(functools.partial(getattr, cudnn, name), functools.partial(setattr, cudnn, name))
        )
    return tuple(found)


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_deterministic(state: tuple[bool, bool]) -> None:
    if state != _deterministic():  # setting it imports torch's compiler
        torch.use_deterministic_algorithms(state[0], warn_only=state[1])

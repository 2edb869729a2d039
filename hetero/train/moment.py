"""What a unit's forward reads and writes beside the tensors it is given, as it stood (floor 2).

A forward that is computed again has to find what it found: generators, autocast, torch's own
switches, the attributes, buffers and containers of its modules, and the names outside of them that
its code reads. What it changes then is put back: a side effect happens once.

[Note: what code can reach]  Python has no list of what a function reads. Followed are the
attributes of the unit's modules, the objects that these and the arguments hold, and the globals and
closures that the methods of their classes name. A moment that met something else, as an iterator,
a lock, or code that lies further away, is not *whole*: to try such a unit could change it.
"""

from __future__ import annotations

import functools
import operator
import random
import re
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from hetero.device import accelerator_rng, set_accelerator_rng

TABLES = (dict, list, set, deque, OrderedDict, defaultdict)
PLAIN = (int, float, bool, str, bytes, type(None))
MANY = 4096  # entries of a container that are looked at; a vocabulary is no state
DEPTH = 3  # containers and objects inside each other
SMALL = 2**20  # bytes of a buffer on a device that are kept without asking whether it was written
LIBRARIES = (
    "torch",
    "transformers",
    "numpy",
    "hetero",
    "builtins",
    "functools",
    "typing",
    "logging",
)
STATELESS = ("torch", "transformers", "hetero", "logging")  # whose objects keep no such state
CONSTANT = (  # what code cannot change in place, or has no reason to
    *(type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, functools.partial, Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.nn.Parameter),
    *(complex, frozenset, range, slice, np.generic, np.dtype, re.Pattern, PurePath, type(...)),
    *(weakref.ref, type(NotImplemented)),
)
OWN = ("_parameters", "_buffers", "_modules")  # of a module's attributes, the tables
_absent = object()


class Source(NamedTuple):
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
        self._tensors: dict[int, Buffer] = {}
        self._generators: dict[int, Source] = {}
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
            elif not isinstance(value, PLAIN):
                self._look_at(value, DEPTH)
        self._look_at_code(type(module))

    def _look_at_code(self, kind: type) -> None:
        for names, cells, is_whole in self._reach.of(kind):
            self._look_outside(names, cells)
            self.is_whole &= is_whole

    def _look_outside(self, names: Sequence[Name], cells: Sequence[CellType]) -> None:
        for space, name in names:
            value = space.get(name, _absent)
            if isinstance(value, PLAIN):
                self._names.append((space, {name: value}))
            elif value is not _absent:
                self._look_at(value, DEPTH)
        for cell in cells:
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                self._cells.append((cell, cell.cell_contents))
                self._look_at(cell.cell_contents, DEPTH)

    def _look_at(self, value: Any, depth: int) -> None:
        """Note what a value holds that code may change in place."""
        kind = type(value)
        if kind in PLAIN or id(value) in self._seen:
            return
        if isinstance(value, CONSTANT):
            return
        if not depth:
            self.is_whole = False
            return
        if kind is torch.Tensor:
            if not value.requires_grad and id(value) not in self._tensors:
                self._tensors[id(value)] = Buffer(value)
            return
        self._seen.add(id(value))
        if kind in TABLES:
            if len(value) > MANY:
                self.is_whole = False
            else:
                self._tables.append((value, kind.copy(value)))
                for inner in value.values() if isinstance(value, dict) else value:
                    self._look_at(inner, depth - 1)
        elif isinstance(value, tuple):
            for inner in value:
                self._look_at(inner, depth - 1)
        elif (source := _source_of(value)) is not None:
            self._generators[id(value)] = source
        elif _is_object(value):
            self._spaces.append((vars(value), dict(vars(value))))
            for inner in vars(value).values():
                self._look_at(inner, depth - 1)
            self._look_at_code(kind)
        elif (kind.__module__ or "").partition(".")[0] not in STATELESS:
            self.is_whole = False

    def _sources(self) -> Iterator[Source]:
        """Yield every generator that the forward may draw from."""
        place = self._place
        yield Source(random.getstate, random.setstate, operator.eq)
        yield Source(np.random.get_state, np.random.set_state, _same_state)
        yield Source(torch.get_rng_state, torch.set_rng_state, _same_bytes)
        if accelerator_rng(place) is not None:
            get, put = functools.partial(accelerator_rng, place), set_accelerator_rng
            yield Source(get, functools.partial(put, place), _same_bytes)
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
                if value is None or type(value) in (bool, str):
                    found.append((name, value))
                elif type(value) in (list, tuple, OrderedDict) and len(value) <= 8:
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
        tables = [(table, type(table).copy(table)) for table, _ in self._tables]
        cells = [(cell, cell.cell_contents) for cell, _ in self._cells]
        names = [(space, {n: space[n] for n in then if n in space}) for space, then in self._names]
        switches = [(switch, switch.get()) for switch, _ in self._switches]
        after = [(source, source.get()) for source, _ in self._drawn]
        lent = {key: buffer.copy() for key, buffer in self._tensors.items()}
        try:
            for space, then in self._spaces:
                _put(space, {k: lent.get(id(v), v) for k, v in then.items()})
            for table, was in self._tables:
                _refill(table, _with(was, lent))
            for cell, value in self._cells:
                cell.cell_contents = lent.get(id(value), value)
            for outside, then in self._names:
                outside.update(then)
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
            for table, is_now in tables:
                _refill(table, is_now)
            for cell, value in cells:
                cell.cell_contents = value
            for outside, then in names:
                outside.update(then)
            _set(_changed(switches))
            _set(after)


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
        elif tensor.layout is not torch.strided or tensor.nbytes > SMALL:
            self._before = None

    def copy(self) -> torch.Tensor:
        """Return a tensor of the forward's value that may be written."""
        return (self._tensor if self._before is None else self._before).clone()


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _same_bits(first: torch.Tensor | None, second: torch.Tensor) -> bool:
    if first is None or first.layout is not torch.strided:
        return first is None
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    one, other = (t.contiguous().view(-1).view(torch.uint8) for t in (first, second))
    return second.is_meta or bool(np.array_equal(one.numpy(), other.numpy()))


def _put(space: MutableMapping[Any, Any], values: dict[Any, Any]) -> None:
    """Let a table have these entries, in place."""
    for name, value in values.items():
        if space.get(name, _absent) is not value:
            space[name] = value
    for name in [name for name in space if name not in values]:
        del space[name]


def _refill(table: Any, values: Any) -> None:
    """Let a container have these contents, in place."""
    if isinstance(table, dict):
        _put(table, values)
        return
    if isinstance(table, list):
        table[:] = values
        return
    table.clear()
    table.update(values) if isinstance(table, set) else table.extend(values)


def _with(table: Any, lent: dict[int, torch.Tensor]) -> Any:
    """Return a container's contents with copies in place of tensors."""
    if isinstance(table, dict):
        return {k: lent.get(id(v), v) for k, v in table.items()}
    return [lent.get(id(v), v) for v in table]


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


def _source_of(value: Any) -> Source | None:
    """Return a generator object's source; None for any other object."""
    if isinstance(value, torch.Generator):
        return Source(value.get_state, value.set_state, _same_bytes)
    if isinstance(value, np.random.RandomState):
        return Source(value.get_state, value.set_state, _same_state)
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        get, put = lambda: bits.state, lambda state: setattr(bits, "state", state)
        return Source(get, put, lambda a, b: repr(a) == repr(b))
    if isinstance(value, random.Random):
        return Source(value.getstate, value.setstate, operator.eq)
    return None


def _same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool(np.array_equal(first.numpy(), second.numpy()))


def _same_state(first: Any, second: Any) -> bool:
    return bool(np.array_equal(first[1], second[1]) and first[2:] == second[2:])


def _is_object(value: Any) -> bool:
    """Whether a value is an object of attributes whose class is the user's own."""
    if isinstance(value, (type, ModuleType, FunctionType, nn.Module, torch.Tensor)):
        return False
    home = type(value).__module__ or ""
    return hasattr(value, "__dict__") and home.partition(".")[0] not in LIBRARIES


Name = tuple[dict[str, Any], str]
Outside = tuple[tuple[Name, ...], tuple[CellType, ...], bool]


class Reach:
    """What the methods of modules' classes name outside of their own frames."""

    def __init__(self) -> None:
        self._of: dict[type, tuple[Outside, ...]] = {}

    def of(self, kind: type) -> tuple[Outside, ...]:
        """Return the globals and the cells that each method of a class names, and whether that is
        all of them."""
        if kind not in self._of:
            seen: set[CodeType] = set()
            functions = [
                value
                for base in kind.__mro__
                if (base.__module__ or "").partition(".")[0] not in LIBRARIES
                for value in vars(base).values()
                if isinstance(value, FunctionType)
            ]
            self._of[kind] = tuple(_named(function, seen, DEPTH) for function in functions)
        return self._of[kind]


def _named(function: FunctionType, seen: set[CodeType], depth: int) -> Outside:
    """Return what a function, and the functions it names, read outside of their own frames."""
    home = (function.__module__ or "").partition(".")[0]
    if function.__code__ in seen or home in LIBRARIES or _is_installed(function):
        return (), (), True
    if not depth:
        return (), (), False
    seen.add(function.__code__)
    cells = tuple(cell for cell in function.__closure__ or () if _is_filled(cell))
    names: list[Name] = []
    is_whole = True
    inner = [cell.cell_contents for cell in cells]
    for name in _names_in(function.__code__):
        value = function.__globals__.get(name, _absent)
        if isinstance(value, FunctionType):
            inner.append(value)
        elif value is not _absent and not isinstance(value, (type, ModuleType)):
            names.append((function.__globals__, name))
    found = tuple(cell for cell in cells if not isinstance(cell.cell_contents, FunctionType))
    for value in inner:
        if isinstance(value, FunctionType):
            more, deeper, ends = _named(value, seen, depth - 1)
            names.extend(more)
            found += deeper
            is_whole &= ends
    return tuple(names), found, is_whole


def _is_installed(function: FunctionType) -> bool:
    """Whether a function is a package's, and not of the program that trains."""
    path = function.__code__.co_filename
    return "site-packages" in path or "dist-packages" in path


def _is_filled(cell: CellType) -> bool:
    try:
        return not isinstance(cell.cell_contents, (type, ModuleType))
    except ValueError:  # empty: the name has no value yet
        return False


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

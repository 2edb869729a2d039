"""Names that code can reach outside its frame, looked up once (floor 2).

Code of installed packages is assumed to keep no state outside its objects.
"""

from __future__ import annotations

import dis
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, TypeVar

from torch import nn

LIBRARIES = ("torch", "transformers", "numpy", "hetero", *sys.stdlib_module_names)
HOUSE = str(Path(__file__).parents[2])
CODE = (
    *(FunctionType, MethodType, functools.partial, functools.partialmethod, weakref.ref),
    *(staticmethod, classmethod, property, functools.cached_property),
    type(functools.lru_cache(lambda: None)),
)

GLOBAL_CODES = ("_GLOBAL", "_GLOBALS", "LOAD_NAME", "STORE_NAME", "DELETE_NAME")
"""How operations of the interpreter end that read or write a global, or perhaps one."""

Names = tuple[dict[str, Any], tuple[str, ...]]


class Reach:
    """The names in the code of the user's classes and functions, looked up once."""

    def __init__(self) -> None:
        self._of: dict[type, tuple[tuple[type, tuple[Any, ...]], ...]] = {}
        self._named: dict[CodeType, tuple[Names, ...]] = {}

    def of(self, kind: type) -> tuple[tuple[type, tuple[Any, ...]], ...]:
        """Return the user's classes among a class and its bases, with their code."""
        found = self._of.get(kind)
        if found is None:
            bases = [base for base in kind.__mro__ if not _is_of_a_library(base)]
            found = tuple((base, tuple(_code_of(base))) for base in bases)
            self._of[kind] = found
        return found

    def named(self, function: FunctionType) -> tuple[Names, ...]:
        """Return the names a function reads in its globals, and in the user's modules there."""
        found = self._named.get(function.__code__)
        if found is None and is_trusted(function):
            found = self._named[function.__code__] = ()
        if found is None:
            code, own = function.__code__, function.__globals__
            globals_in, names = tuple(_globals_in(code)), tuple(dict.fromkeys(_names_in(code)))
            spaces = [(own, globals_in)]
            spaces += [
                (vars(value), names)
                for name in globals_in
                if isinstance(value := own.get(name), ModuleType)
                and not _is_library(value.__name__, getattr(value, "__file__", None) or "")
            ]
            found = tuple((space, _own_names(space, read)) for space, read in spaces)
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
    """Whether a function belongs to an installed package, and not to the training program."""
    return _is_library("", function.__code__.co_filename) or (
        _is_library(function.__module__ or "", "") and not hasattr(function, "__wrapped__")
    )


def _is_library(name: str, path: str) -> bool:
    installed = "site-packages" in path or "dist-packages" in path or path.startswith(HOUSE)
    return installed or name.partition(".")[0] in LIBRARIES


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and of attributes in code."""
    for part in _parts_of(code):
        yield from part.co_names


def _globals_in(code: CodeType) -> dict[str, None]:
    """Return the names of globals in code; one that is an attribute only may be the program's own
    name of something large."""
    return {
        str(step.argval): None
        for part in _parts_of(code)
        for step in dis.get_instructions(part)
        if step.opname.endswith(GLOBAL_CODES)
    }


def _parts_of(code: CodeType) -> Iterator[CodeType]:
    """Yield code and all that is nested in it: comprehensions, functions, classes."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts_of(constant)


class Attributes(MutableMapping[str, Any]):
    """Attributes without a dictionary, as a mapping: a class's data, or an object's slots."""

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


def spaces_of(value: Any) -> Iterator[MutableMapping[str, Any]]:
    """Yield the mappings that hold an object's attributes."""
    if hasattr(value, "__dict__"):
        yield vars(value)
    kind: Any = type(value)
    if slots := _slots_of(kind):
        yield Attributes(value, slots)


T = TypeVar("T")


def known_by_class(function: Callable[[type], T]) -> Callable[[type], T]:
    """Remember what a function returns for a class as long as that lives: the classes of a prepared
    model's parameters lead to all that it has."""
    known: weakref.WeakKeyDictionary[type, T] = weakref.WeakKeyDictionary()

    def ask(kind: type) -> T:
        found = known.get(kind)
        if found is None:
            found = known[kind] = function(kind)
        return found

    return ask


@known_by_class
def _slots_of(kind: type) -> tuple[str, ...]:
    members = (vars(base).items() for base in kind.__mro__)
    return tuple(n for of in members for n, v in of if isinstance(v, MemberDescriptorType))


def is_object(value: Any) -> bool:
    """Whether a value is an object of attributes whose class is not a library's."""
    kind: Any = type(value)
    if (kind.__module__ or "").partition(".")[0] in ("torch", "transformers", "numpy", "hetero"):
        return False
    return hasattr(value, "__dict__") or bool(_slots_of(kind))

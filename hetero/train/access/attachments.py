"""Hooks and replaced attributes on modules and parameters, and their removal (floor 2).

[Note: brackets stay]  A user may patch a forward that we bracketed: the patch holds our bracket and
calls it. So each call of a module has one bracket from `prepare` to `release`. Its effect may
change meanwhile (the model becomes resident). It is removed only if the module still has it; if a
patch holds it, it stays and only calls the original.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hetero.interrupts import passing
from hetero.train.model.units import MARK, PART

Call = Callable[..., Any]
ABSENT = object()
FORWARD, COMPILED = CALLS = "forward", "_compiled_call_impl"
EAGER = "hetero fetches what a unit computes with: compile what is inside a unit, or a unit"


class Attachments:
    """All that we attach to a model, and its removal."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._brackets: dict[tuple[int, str], Bracket] = {}
        self._replaced: dict[tuple[int, str], tuple[Any, Any]] = {}  # (our value, the one before)

    def remove(self) -> None:
        """Take everything off, newest first."""
        self.rest()
        self._brackets.clear()

    def rest(self) -> None:
        """Take everything off; brackets held by a user's patch stay, without effect."""
        while self._undo:
            self._undo.pop()()
        for key, bracket in list(self._brackets.items()):
            if bracket.remove():
                del self._brackets[key]

    def mend(self) -> None:
        """Put back brackets that were lost when the user deleted a patch."""
        for bracket in self._brackets.values():
            bracket.place()

    def gradients(
        self, params: Sequence[nn.Parameter], arrived: Callable[[nn.Parameter], None]
    ) -> None:
        """Call ``arrived`` for every gradient that autograd has accumulated."""
        listener = weakref.WeakMethod(arrived)  # autograd holds hooks where gc does not look

        def notify(param: Any) -> None:
            method = listener()
            if method is not None:
                method(param)

        for param in params:
            if param.dtype.is_floating_point or param.dtype.is_complex:
                with thawed(param):
                    self.keep(param.register_post_accumulate_grad_hook(notify))

    def surround_forward(
        self, module: nn.Module, around: Callable[[Call], Call], *, traced: bool = False
    ) -> None:
        """Wrap a module's forward in ``around``.

        ``traced``: code that is compiled around the module compiles its forward without ours;
        else it runs ours, and what is inside uncompiled.
        """
        # Around forward and not as hooks: torch skips hooks on KeyboardInterrupt, and some modules
        # (the transformer layers' fast path) compute differently when hooks hang on them. A module
        # compiled in place is bracketed around its compiled callable, so that ours is not traced.
        if (id(module), "compile") not in self._brackets:
            self.bracket(module, "compile", functools.partial(self._following, module))
        is_compiled = module.__dict__.get(COMPILED) is not None
        self.bracket(module, COMPILED if is_compiled else FORWARD, around, traced=traced)

    def let_go(self, around: Callable[[Call], Call]) -> None:
        """Take one wrapper off its call; the call is the module's own again if it has no other."""
        for key, bracket in list(self._brackets.items()):
            if around in bracket.layers:
                bracket.drop(around)
                if not bracket.layers and bracket.remove():
                    del self._brackets[key]

    def _following(self, module: nn.Module, call: Call) -> Call:
        """Return a module's ``compile`` that keeps our wrappers out of the compiled code."""

        def compile(*args: Any, **kwargs: Any) -> None:
            call(*args, **kwargs)
            bracket = self._brackets.pop((id(module), FORWARD), None)
            for around in list(bracket.layers) if bracket is not None else ():
                self.bracket(module, COMPILED, around)
            if bracket is not None:
                bracket.remove()

        return compile

    def bracket(
        self,
        module: nn.Module,
        name: str,
        around: Callable[[Call], Call],
        *,
        traced: bool = False,
    ) -> None:
        """Wrap a call of a module, and its present wrappers, in ``around``."""
        bracket = self._brackets.get((id(module), name))
        if bracket is None:
            bracket = self._brackets[id(module), name] = Bracket(module, name, traced=traced)
        bracket.add(around)
        bracket.place()

    def keep(self, handle: RemovableHandle) -> None:
        """Remove a hook of torch's with the rest."""
        self._undo.append(handle.remove)

    def replace(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute of a module, over its own or its class's."""
        old = module.__dict__.get(name, ABSENT)
        self._replaced[id(module), name] = value, old
        object.__setattr__(module, name, value)

        def undo() -> None:
            self._replaced.pop((id(module), name), None)
            if module.__dict__.get(name) is value:  # else it is the user's
                put(module, name, old)

        self._undo.append(undo)

    def without_ours(self, module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Return a module's state with our attributes replaced by those before them."""
        found = {}
        for name, value in state.items():
            bracket = self._brackets.get((id(module), name))
            ours, before = self._replaced.get((id(module), name), (ABSENT, ABSENT))
            if bracket is not None and bracket.is_placed:
                found[name] = bracket.before
            else:
                found[name] = before if value is ours else value
        return {k: v for k, v in found.items() if v is not ABSENT and k not in (MARK, PART)}


class Bracket:
    """Replaces one call of one module by ``run`` (see [Note: brackets stay]).

    Copies and pickles of the module have the original call.
    """

    def __init__(self, module: nn.Module, name: str, *, traced: bool = False) -> None:
        self._module = module
        self._name = name
        self.before = module.__dict__.get(name, ABSENT)
        self._found: Call = getattr(module, name)
        # of one of ours, attributes would come along that say what *it* replaced
        functools.update_wrapper(self, self._found, updated=())
        own = self.before is ABSENT and isinstance(getattr(type(module), name), FunctionType)
        self.call = self.run = self._of_class if own else self._found
        self.layers: list[Callable[[Call], Call]] = []
        if name not in CALLS:
            self._stand_in: Call = self
        elif traced:
            self._stand_in = unless_traced(self)
        else:
            self._stand_in = torch.compiler.disable(self, reason=EAGER)
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
        """Put this back if the user has deleted a patch over it."""
        if self._name not in self._module.__dict__:
            put(self._module, self._name, self._stand_in)

    @property
    def is_placed(self) -> bool:
        """Whether the module has this, and not a user's patch."""
        return self._module.__dict__.get(self._name) is self._stand_in

    def add(self, around: Callable[[Call], Call]) -> None:
        """Wrap the present call in ``around``."""
        self.layers.append(around)
        self.run = around(self.run)

    def drop(self, around: Callable[[Call], Call]) -> None:
        """Wrap the call in ``around`` no longer; other wrappers stay."""
        self.layers.remove(around)
        self.run = self.call
        for layer in self.layers:
            self.run = layer(self.run)

    def remove(self) -> bool:
        """Call only the original from now on; leave the module too, unless a patch holds this."""
        self.layers.clear()
        self.run = self.call
        is_placed = self.is_placed
        if is_placed:
            put(self._module, self._name, self.before)
        return is_placed


def unless_traced(bracket: Bracket) -> Call:
    """Return a call of a bracket, or of the original where it is compiled."""

    @functools.wraps(bracket)
    @passing
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # keep our code out of the graph
            return bracket.call(*args, **kwargs)
        return bracket(*args, **kwargs)

    return call


def put(module: nn.Module, name: str, value: Any) -> None:
    """Set a module's attribute past its own ``__setattr__``; ABSENT deletes it."""
    if value is ABSENT:
        module.__dict__.pop(name, None)
    else:
        object.__setattr__(module, name, value)


@contextmanager
def thawed(param: nn.Parameter) -> Iterator[None]:
    """Allow hooks on a frozen parameter, which may be unfrozen later; torch refuses them."""
    trains = param.requires_grad
    param.requires_grad_(True)
    try:
        yield
    finally:
        param.requires_grad_(trains)

"""What hangs on modules and parameters in place of what was there, and how it comes off (floor 2).

[Note: brackets stay]  A user may patch a forward that we bracketed: the patch holds our bracket and
calls it. So there is one bracket for each call of a module, from `prepare` to `release`; what it
does changes while it stands (the model becomes resident), and it is taken off only where it is
still what the module has. Elsewhere it goes on as the call that it was put around.
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
    """Everything of ours that hangs on a model, and how to take it off again."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._brackets: dict[tuple[int, str], Bracket] = {}
        self._replaced: dict[tuple[int, str], tuple[Any, Any]] = {}  # what it is, and was

    def remove(self) -> None:
        """Take everything off, newest first."""
        self.rest()
        self._brackets.clear()

    def rest(self) -> None:
        """Take everything off but brackets in a user's patch, which do nothing from here on."""
        while self._undo:
            self._undo.pop()()
        for key, bracket in list(self._brackets.items()):
            if bracket.remove():
                del self._brackets[key]

    def mend(self) -> None:
        """Put brackets back that went with a patch which the user has deleted."""
        for bracket in self._brackets.values():
            bracket.place()

    def gradients(
        self, params: Sequence[nn.Parameter], arrived: Callable[[nn.Parameter], None]
    ) -> None:
        """Hear of every gradient that autograd has accumulated."""
        listener = weakref.WeakMethod(arrived)  # autograd holds hooks where gc does not look

        def notify(param: Any) -> None:
            method = listener()
            if method is not None:
                method(param)

        for param in params:
            if param.dtype.is_floating_point or param.dtype.is_complex:
                with thawed(param):
                    self.keep(param.register_post_accumulate_grad_hook(notify))

    def surround_forward(self, module: nn.Module, around: Callable[[Call], Call]) -> None:
        """Put something around a module's forward."""
        # Around forward and not as hooks: torch skips hooks on KeyboardInterrupt, and some modules
        # (the transformer layers' fast path) compute differently when hooks hang on them. A module
        # compiled in place is bracketed around its compiled callable, so that ours is not traced.
        if (id(module), "compile") not in self._brackets:
            self.bracket(module, "compile", functools.partial(self._following, module))
        is_compiled = module.__dict__.get(COMPILED) is not None
        self.bracket(module, COMPILED if is_compiled else FORWARD, around)

    def _following(self, module: nn.Module, call: Call) -> Call:
        """Return a module's ``compile`` that leaves what we put around it out of compiled code."""

        def compile(*args: Any, **kwargs: Any) -> None:
            call(*args, **kwargs)
            bracket = self._brackets.pop((id(module), FORWARD), None)
            for around in list(bracket.layers) if bracket is not None else ():
                self.bracket(module, COMPILED, around)
            if bracket is not None:
                bracket.remove()

        return compile

    def bracket(self, module: nn.Module, name: str, around: Callable[[Call], Call]) -> None:
        """Put something around a call of a module, and around what is there already."""
        bracket = self._brackets.get((id(module), name))
        if bracket is None:
            bracket = self._brackets[id(module), name] = Bracket(module, name)
        bracket.add(around)
        bracket.place()

    def keep(self, handle: RemovableHandle) -> None:
        """Take a hook of torch's off with the rest."""
        self._undo.append(handle.remove)

    def replace(self, module: nn.Module, name: str, value: Any) -> None:
        """Give a module an attribute, in place of one of its own or of its class's."""
        old = module.__dict__.get(name, ABSENT)
        self._replaced[id(module), name] = value, old
        object.__setattr__(module, name, value)

        def undo() -> None:
            self._replaced.pop((id(module), name), None)
            if module.__dict__.get(name) is value:  # else it is the user's
                put(module, name, old)

        self._undo.append(undo)

    def without_ours(self, module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Return a module's state with what stood there before us in place of what is ours."""
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
    """One call of one module, in whose place ``run`` is called (see [Note: brackets stay]).

    A copy of the module that has this for a call, or a pickle of it, has the call alone.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = module
        self._name = name
        self.before = module.__dict__.get(name, ABSENT)
        self._found: Call = getattr(module, name)
        functools.update_wrapper(self, self._found)
        own = self.before is ABSENT and isinstance(getattr(type(module), name), FunctionType)
        self.call = self.run = self._of_class if own else self._found
        self.layers: list[Callable[[Call], Call]] = []
        self._stand_in = torch.compiler.disable(self, reason=EAGER) if name in CALLS else self
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
        """Stand where nothing stands: the user has deleted a patch."""
        if self._name not in self._module.__dict__:
            put(self._module, self._name, self._stand_in)

    @property
    def is_placed(self) -> bool:
        """Whether this is what the module has, and not a patch of the user's."""
        return self._module.__dict__.get(self._name) is self._stand_in

    def add(self, around: Callable[[Call], Call]) -> None:
        """Put something around what is called."""
        self.layers.append(around)
        self.run = around(self.run)

    def remove(self) -> bool:
        """Be the call that was there before, for a patch that holds this; without one be gone."""
        self.layers.clear()
        self.run = self.call
        is_placed = self.is_placed
        if is_placed:
            put(self._module, self._name, self.before)
        return is_placed


def put(module: nn.Module, name: str, value: Any) -> None:
    """Give a module an attribute past its own ``__setattr__``, or take it off: ABSENT."""
    if value is ABSENT:
        module.__dict__.pop(name, None)
    else:
        object.__setattr__(module, name, value)


@contextmanager
def thawed(param: nn.Parameter) -> Iterator[None]:
    """Let a parameter take hooks: torch allows it only where it trains, and it may thaw later."""
    trains = param.requires_grad
    param.requires_grad_(True)
    try:
        yield
    finally:
        param.requires_grad_(trains)

"""Observing a model that stays plain (floor 2)."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from hetero.functional.head import has_memory
from hetero.internals import RUN_BACKWARD, tree_iter
from hetero.interrupts import theirs
from hetero.train.access.attachments import Attachments, Call
from hetero.train.model.looking import unseeing
from hetero.train.model.units import Unit

MANY = 256  # prune hooks of dead graphs once there are this many


class Listener(Protocol):
    """Observes a plain model; a block is open while its event lasts."""

    def forward(self) -> AbstractContextManager[None]:
        """The whole model's forward."""

    def access(self, unit: int) -> AbstractContextManager[None]:
        """A unit's forward, perhaps recomputed in backward."""

    def backward(self) -> AbstractContextManager[None]:
        """A backward pass."""

    def reached(self, unit: int) -> None:
        """A backward pass reaches the outputs of a unit."""

    def gradient(self, param: nn.Parameter) -> None:
        """Autograd has accumulated a gradient."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer, of this model or not, begins a step."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """That step ended."""


class Listening(Attachments):
    """Hooks on a plain model that call a listener; no value changes."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener
        self._reached: list[RemovableHandle] = []  # on nodes of graphs that may be alive
        self._many = MANY

    def listen(self, model: nn.Module, units: Sequence[Unit]) -> None:
        """Call the listener for events of a model and of all optimizers."""
        listener = self._listener
        self._undo.append(self._forget_nodes)
        for index, unit in enumerate(units):
            if unit.module is not None:
                made = functools.partial(self._await, index)
                self._surround(unit.module, functools.partial(listener.access, index), made)
        self._surround(model, listener.forward)
        self.gradients(list(model.parameters()), listener.gradient)
        self._surround_backward()
        before, after = listener.before_step, listener.after_step
        self.keep(register_optimizer_step_pre_hook(lambda optimizer, *_: before(optimizer)))
        self.keep(register_optimizer_step_post_hook(lambda optimizer, *_: after(optimizer)))

    def _surround(
        self,
        module: nn.Module,
        block: Callable[[], AbstractContextManager[None]],
        made: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self.replace(module, "forward", Within(module.forward, block, made))

    def _surround_backward(self) -> None:
        made: list[Within] = []

        def make(plain: Any) -> Within:
            made.append(Within(unseeing(plain), self._listener.backward))
            return made[0]

        watched = RUN_BACKWARD.replaced(make)
        watched.install()

        def undo() -> None:
            made[0].block = nullcontext  # code that replaced it may still call it
            watched.uninstall()

        self._undo.append(undo)

    def _await(self, unit: int, output: Any) -> None:
        """Call the listener when a backward pass reaches one of a unit's outputs."""
        for tensor in tree_iter(output):
            node: Any = tensor.grad_fn if has_memory(tensor) else None
            if node is not None:
                self._reached.append(node.register_prehook(lambda *_: self._listener.reached(unit)))
        if len(self._reached) > self._many:
            self._reached = [h for h in self._reached if h.hooks_dict_ref() is not None]
            self._many = 2 * len(self._reached) + MANY

    def _forget_nodes(self) -> None:
        while self._reached:
            self._reached.pop().remove()


class Within:
    """A call inside a block; ``made`` gets its result.

    Copies and pickles of a module with this as its forward have the original call.
    """

    def __init__(
        self,
        call: Call,
        block: Callable[[], AbstractContextManager[None]],
        made: Callable[[Any], None] = lambda _: None,
    ) -> None:
        functools.update_wrapper(self, call)
        self.call = call
        self.block = block
        self.made = made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # keep our code out of the graph
            return self.call(*args, **kwargs)
        with self.block():
            found = theirs(self.call, *args, **kwargs)
            self.made(found)
            return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.call, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.call.__reduce_ex__(protocol)

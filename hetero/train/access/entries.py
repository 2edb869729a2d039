"""Where a plain program is: its outermost modules, its backward passes, its optimizers (floor 2).

No module is touched: what copies, pickles, scripts or inspects one finds it as it was. In place of
hooks, `nn.Module.__call__` is replaced for the while, so that a call inside another one costs a
test of one attribute.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hetero.internals import MODULE_CALL, RUN_BACKWARD
from hetero.train.model.looking import unseeing

Call = Callable[..., Any]


class EntryListener(Protocol):
    """Follows a program; none of these may raise."""

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """An outermost module is called."""

    def after_forward(self, module: nn.Module) -> None:
        """That call returned."""

    def before_backward(self) -> None:
        """A backward pass begins."""

    def after_backward(self) -> None:
        """It returned."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer begins a step."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """It returned."""

    def failed(self, error: BaseException) -> None:
        """An outermost module, or a backward pass, raised."""


class ProgramEntries:
    """Tells a listener where the thread that made this is."""

    def __init__(self, listener: EntryListener) -> None:
        self.path: list[nn.Module] | None = None
        """If a list: the modules whose calls are open, the outermost first."""
        self._listener = listener
        self._thread = threading.get_ident()
        self._busy = False  # inside an outermost call or a backward pass
        self._replaced = [
            MODULE_CALL.replaced(self._calls),
            RUN_BACKWARD.replaced(self._passes),
        ]
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Begin to tell, perhaps again."""
        self._busy = False
        for replacement in self._replaced:
            replacement.install()
            self._undo.append(replacement.uninstall)
        before, after = self._listener.before_step, self._listener.after_step
        for handle in (
            register_optimizer_step_pre_hook(lambda optimizer, *_: before(optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: after(optimizer)),
        ):
            self._undo.append(handle.remove)

    def remove(self) -> None:
        """End to tell, and put torch's own back."""
        self._busy = True  # code that took our functions meanwhile may still call them
        self.path = None
        while self._undo:
            self._undo.pop()()

    def _calls(self, plain: Call) -> Call:
        @functools.wraps(plain)
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # keep our code out of the graph
                return plain(module, *args, **kwargs)
            if not self._busy and threading.get_ident() == self._thread:
                return self._enter(plain, module, args, kwargs)
            path = self.path
            if path is None:
                return plain(module, *args, **kwargs)
            path.append(module)
            try:
                return plain(module, *args, **kwargs)
            finally:
                path.pop()

        return __call__

    def _enter(self, plain: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._busy = True
        try:
            self._listener.before_forward(module, args, kwargs)
            path = self.path
            if path is not None:
                path.append(module)
            found = plain(module, *args, **kwargs)
            self._listener.after_forward(module)
            return found
        except BaseException as error:
            self._listener.failed(error)
            raise
        finally:
            if self.path is not None:
                self.path.clear()
            self._busy = False

    def _passes(self, engine: Call) -> Call:
        plain = unseeing(engine)

        @functools.wraps(engine)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._busy or threading.get_ident() != self._thread:
                return plain(*args, **kwargs)
            self._busy = True
            try:
                self._listener.before_backward()
                found = plain(*args, **kwargs)
                self._listener.after_backward()
                return found
            except BaseException as error:
                self._listener.failed(error)
                raise
            finally:
                self._busy = False

        return run

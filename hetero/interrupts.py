"""Ctrl-C at safe points: it waits while code of ours runs (floor 0).

[Note: whose code runs]  While a model is prepared, the handler of SIGINT is a `Deferring` around
the previous one. It looks at the interrupted stack. The innermost frame of ours decides: under
`theirs`, or a `passing` function, the user's code runs, and the signal is handled at once; under
any other a change of state may be under way, and the signal waits. So nothing has to be announced,
the hot path pays nothing, and code that runs at odd times (finalizers, hooks that autograd calls)
is covered as well. A waiting signal is handled by `point`, at the end of a step, or a moment later,
when a thread finds no more code of ours on the stack.

Code that waits for other threads, or for a drive, uses `wait`, `join` or `finished`: the second
Ctrl-C comes out of these, like a disk's error. Threads that may have to work while the interpreter
ends are `running` before.
"""

from __future__ import annotations

import _thread
import math
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

ROOMS = (
    *("api", "checkpoint", "cores", "device", "events", "export", "functional", "internals"),
    *("io", "jobs", "memory", "modes", "train"),
)
MANAGERS = ("torch.autograd.grad_mode", "torch.autograd.graph", "torch.amp.autocast_mode")
LOOK_SECONDS = 1e-3  # between two looks at whether Ctrl-C may be handled
WAIT_SECONDS = 0.1  # between two looks at whether it was pressed again

P = ParamSpec("P")
R = TypeVar("R")
Handler = Callable[[int, FrameType | None], Any]


_OPEN: set[CodeType] = set()


def passing(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function of ours that only calls code that may be the user's."""
    _OPEN.add(function.__code__)
    return function


@passing
def theirs(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call the user's code: Ctrl-C comes out of it at once."""
    return call(*args, **kwargs)


def is_closed(frame: FrameType | None) -> bool:
    """Whether code of ours, or code it calls, is at the inner end of a stack."""
    while frame is not None:
        if frame.f_code in _OPEN:
            return False
        if _is_ours(frame):
            return True
        frame = frame.f_back
    return False


def _is_ours(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__"))
    if module == "contextlib":  # a manager of ours is entered or left, perhaps by a user
        generator = getattr(frame.f_locals.get("self"), "gen", None)
        inner = getattr(generator, "gi_frame", None)
        return inner is not None and _is_ours(inner)
    if module in MANAGERS:  # cut short, torch's setting of a thread would stay
        return frame.f_code.co_name in ("__enter__", "__exit__")
    package, _, rest = module.partition(".")
    return package == "hetero" and rest.partition(".")[0] in ROOMS


class Deferring:
    """A handler of SIGINT that calls the previous one at safe points."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        """The prepared models, and other callers of `hold`."""
        self.waiting = 0
        """Presses of Ctrl-C that are not handled yet."""
        self._looked = False  # whether the next signal is from `_look`, not from a user

    def __call__(self, number: int, frame: FrameType | None) -> None:
        pressed, self._looked = not self._looked, False
        self.waiting += pressed
        if not is_closed(frame):
            self.handle(frame)
        elif pressed:
            _thread.start_new_thread(self._look, ())  # takes no lock that may be held here

    def handle(self, frame: FrameType | None) -> None:
        """Call the previous handler, as often as Ctrl-C was pressed, until it raises."""
        presses, self.waiting = self.waiting, 0
        for _ in range(presses):
            self.handler(signal.SIGINT, frame)

    def _look(self) -> None:
        """Send the signal again, when no code of ours runs, until none waits."""
        main = threading.main_thread().ident or 0
        while self.waiting:
            time.sleep(LOOK_SECONDS)
            if not self.waiting or is_closed(sys._current_frames().get(main)):
                continue
            there: object = signal.getsignal(signal.SIGINT)
            if there is not self:  # the user set another handler since
                self.waiting = 0
            else:
                self._looked = True
            signal.pthread_kill(main, signal.SIGINT)


def hold(user: object) -> None:
    """Let Ctrl-C wait while code of ours runs, until `let_go`; wraps a handler set since, too. Only
    if a Python function handles it, and from the main thread, which alone is interrupted."""
    found: Any = signal.getsignal(signal.SIGINT)
    if not isinstance(found, Deferring):
        if not callable(found) or threading.current_thread() is not threading.main_thread():
            return
        found = Deferring(found)
        signal.signal(signal.SIGINT, found)
    found.users.add(user)


def let_go(user: object) -> None:
    """Drop one user; after the last, put the previous handler back."""
    found = signal.getsignal(signal.SIGINT)
    if isinstance(found, Deferring):
        found.users.discard(user)
        if not found.users and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, found.handler)
            found.handle(sys._getframe())


@contextmanager
def held() -> Iterator[None]:
    """Let Ctrl-C wait for the end of a block of ours, even if no model is prepared."""
    user = threading.Event()  # any object with weak references
    hold(user)
    try:
        yield
    finally:
        let_go(user)


def point(presses: int = 1) -> None:
    """Handle Ctrl-C here, if it was pressed so often and waits; raises its handler's error."""
    found = signal.getsignal(signal.SIGINT)
    if not isinstance(found, Deferring) or found.waiting < presses:
        return
    if threading.current_thread() is threading.main_thread():
        found.handle(sys._getframe())


def wait(
    changed: threading.Condition, happened: Callable[[], bool], seconds: float | None = None
) -> bool:
    """Wait on a held condition until ``happened``; False if that does not come in time. A
    notification just as a wait times out is lost: only ``happened`` counts."""
    if threading.current_thread() is not threading.main_thread():
        return changed.wait_for(happened, seconds)
    end = math.inf if seconds is None else time.monotonic() + seconds
    while not changed.wait_for(happened, min(WAIT_SECONDS, end - time.monotonic())):
        point(2)
        if time.monotonic() >= end:
            return False
    return True


def join(thread: threading.Thread) -> None:
    """Return when a thread has ended."""
    while thread.is_alive():
        thread.join(WAIT_SECONDS)
        point(2)


def finished(future: futures.Future[R]) -> R:
    """Return a future's result; the first Ctrl-C comes out, and the future goes on."""
    while not futures.wait([future], WAIT_SECONDS).done:
        point()
    return future.result()


def running(n_threads: int, name: str) -> futures.ThreadPoolExecutor:
    """Return an executor whose threads run by now: while the interpreter ends, from Python 3.12 on,
    none can be started, and a save may go on until then."""
    executor = futures.ThreadPoolExecutor(n_threads, name)
    all_there = threading.Barrier(n_threads + 1)
    for _ in range(n_threads):
        executor.submit(all_there.wait)
    all_there.wait()
    return executor

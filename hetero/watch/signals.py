"""A signal that would end the process, once its page is written (floor 4)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Terminations:
    """Handles SIGTERM while a program is watched.

    Where nothing handles it, the process ends by it as ever, after ``act``. A handler that is there
    is called as ever, and what it does is the program's; one that the program sets later replaces
    ours. Forked processes are not watched.
    """

    def __init__(self, act: Callable[[str], None]) -> None:
        self.received = ""
        """Name of the last signal that a handler of the program's was called with."""
        self._act = act
        self._pid = os.getpid()
        self._before: Any = None
        self._is_set = False

    def install(self) -> None:
        """Begin; only the main thread may handle signals, so that others change nothing."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, self._handle)
            self._is_set = True

    def remove(self) -> None:
        """Put the handler before ours back, unless the program has set another one."""
        if self._is_set and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before)
        self._is_set = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if callable(self._before):
            self.received = signal.Signals(number).name
            self._before(number, frame)
        elif self._before is not signal.SIG_IGN:
            if os.getpid() == self._pid:
                self._act(signal.Signals(number).name)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

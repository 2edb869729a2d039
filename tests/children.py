"""Children that a test forks."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import time
from collections.abc import Callable

SECONDS = 30.0


def in_child(body: Callable[[], object]) -> int:
    """Return how a forked child ended: 0 unless ``body`` returns False there, or raises. One that
    hangs is killed."""
    pid = os.fork()
    if not pid:
        code = 2
        try:
            faulthandler.disable()  # a fault is what some are to end by, without a core
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            code = 1 if body() is False else 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + SECONDS
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            deadline += SECONDS
        time.sleep(0.002)

"""Who of several updating threads may use torch's own threads (floor 2).

An operation of torch brings a team of OpenMP threads, as many as there are cores. Two teams at once
get in each other's way (measured: ten times slower), and one team beside threads that move data
waits at every barrier for whoever lost its core (measured: twice as slow). So where several threads
update, each stays on one core; only rules whose results depend on how many threads add (sums over
a tensor) bring the team that plain torch would bring, one after another.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Cores:
    """Turns at torch's threads, for updates that ``n_threads`` carry out beside the launcher."""

    def __init__(self, n_threads: int) -> None:
        self._alone = threading.Lock()
        self._limit = limiter() if n_threads else None

    @contextmanager
    def all(self) -> Iterator[None]:
        """Let operations use every core, as outside; one caller at a time."""
        with self._alone:
            yield

    @contextmanager
    def one(self) -> Iterator[None]:
        """Keep this thread's operations on one core: for work that is the same on any cut."""
        if self._limit is None:
            with self.all():
                yield
            return
        before = torch.get_num_threads()
        self._limit(1)
        try:
            yield
        finally:
            self._limit(before)


def limiter() -> Callable[[int], None] | None:
    """Return what sets torch's thread count for the calling thread; None where nothing can.

    `torch.set_num_threads` also changes what every thread that starts later begins with, the
    user's among them. OpenMP's own call does not; torch is asked whether it went by it.
    """
    try:
        limit = ctypes.CDLL(None).omp_set_num_threads
    except (OSError, AttributeError):  # another runtime, or one that is not shared
        return None
    before = torch.get_num_threads()
    limit(before + 1)
    heard = torch.get_num_threads() == before + 1
    limit(before)
    return limit if heard and torch.get_num_threads() == before else None
